# SPDX-License-Identifier: Apache-2.0
"""A SPIRe draft (arXiv 2504.06419): a pruned Llama whose keys and values are made of memory vectors.

A token has `num_layers + 1` activations: the residual stream that enters the first block and that leaves
each one. Its memory for a block is their sum, weighted by a softmax. Activations of a *verified* token are
the target's, of the blocks that the draft's were pruned from; those of a *drafted* token are the draft's
own. A query sees sinks and a window of memories, and itself as in any Llama: its own memory does not exist
yet.

There are two forms, which agree. In training (`forward`) the sequence is cut into chunks of k tokens; pass
j goes over the j-th token of every chunk at once, which sees the target's memories before its chunk and the
draft's own within (the k forward passes on every k-th prefix). In serving (`DraftState`) tokens come one by
one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from vllm_magicdec.spire.settings import SpireSettings

KeysAndValues = tuple[Tensor, Tensor]
_OWN_LAYER = 3.0  # logit with which training starts; the others are 0
_BLOCK_TOKENS = 256  # of training's queries that share the keys they gather


class SpireDraft(LlamaForCausalLM):
    """A Llama's weights by a Llama's names, and `model.memory_logits` `[num_layers, num_layers + 1]`.

    Args:
        config: of a Llama with the draft's number of layers.
        settings: what is no Llama's.
    """

    def __init__(self, config: LlamaConfig, settings: SpireSettings) -> None:
        super().__init__(config)
        self.settings = settings
        self.groups = config.num_attention_heads // config.num_key_value_heads
        if settings.feedback_memory:
            logits = torch.zeros(settings.num_layers, settings.num_layers + 1)
            logits.fill_diagonal_(_OWN_LAYER)
            self.model.memory_logits = nn.Parameter(logits)

    @property
    def layers(self) -> list[LlamaDecoderLayer]:
        """The draft's blocks."""
        return list(self.model.layers)

    def rotations(self, positions: Tensor) -> KeysAndValues:
        """RoPE's cosines and sines, `[..., head_dim]` each, at `positions` (`[...]` int64)."""
        weight = self.model.norm.weight
        cos, sin = self.model.rotary_emb(weight, positions.reshape(1, -1))
        shape = (*positions.shape, self.config.head_dim)
        return cos.reshape(shape), sin.reshape(shape)

    def project(self, layer: LlamaDecoderLayer, hidden: Tensor, rotation: KeysAndValues) -> KeysAndValues:
        """Keys and values of a block.

        Args:
            layer: the block.
            hidden: `[..., hidden_size]`, before the block's norm.
            rotation: `[..., head_dim]` each.

        Returns:
            `[..., num_kv_heads, head_dim]` each.
        """
        normed = layer.input_layernorm(hidden)
        keys = self._heads(layer.self_attn.k_proj(normed))
        cos, sin = (each.to(keys.dtype) for each in rotation)
        _, keys = apply_rotary_pos_emb(keys, keys, cos, sin, unsqueeze_dim=-2)
        return keys, self._heads(layer.self_attn.v_proj(normed))

    def queries(self, layer: LlamaDecoderLayer, hidden: Tensor, rotation: KeysAndValues) -> Tensor:
        """`[..., num_kv_heads, groups, head_dim]`; arguments as of `project`."""
        queries = self._heads(layer.self_attn.q_proj(layer.input_layernorm(hidden)))
        cos, sin = (each.to(queries.dtype) for each in rotation)
        queries, _ = apply_rotary_pos_emb(queries, queries, cos, sin, unsqueeze_dim=-2)
        return queries.unflatten(-2, (-1, self.groups))

    def memories(self, activations: Tensor) -> list[Tensor]:
        """Memory vectors for each block, `[..., hidden_size]`.

        Args:
            activations: `[..., num_layers + 1, hidden_size]`.
        """
        if not self.settings.feedback_memory:
            return [activations[..., index, :] for index in range(self.settings.num_layers)]
        weights = self.model.memory_logits.float().softmax(-1)
        mixed = torch.einsum("il,...lh->...ih", weights, activations.float()).to(activations.dtype)
        return [mixed[..., index, :] for index in range(self.settings.num_layers)]

    def remember(self, activations: Tensor, rotation: KeysAndValues) -> list[KeysAndValues]:
        """Keys and values of memories, for each block; see `memories` and `project`."""
        memories = self.memories(activations)
        return [
            self.project(layer, memory, rotation)
            for layer, memory in zip(self.layers, memories, strict=True)
        ]

    def finish_block(self, layer: LlamaDecoderLayer, hidden: Tensor, attended: Tensor) -> Tensor:
        """What leaves a block: `hidden` `[..., hidden_size]` entered it, `attended` is its heads' sum
        `[..., num_kv_heads, groups, head_dim]`."""
        hidden = hidden + layer.self_attn.o_proj(attended.flatten(-3).to(hidden.dtype))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab_size]` of what left the last block."""
        return self.lm_head(self.model.norm(hidden))

    def forward(self, tokens: Tensor, target_activations: Tensor | None, first: int = 0) -> Tensor:
        """The training form.

        Args:
            tokens: `[batch, length]` int64; what is left over at the end, less than a chunk, is unread.
            target_activations: `[batch, length, num_layers + 1, hidden_size]`; None where the draft's own
                are taken (an ablation).
            first: where the first chunk begins; tokens before are verified ones.

        Returns:
            Logits `[num_draft_steps, batch, num_chunks, vocab_size]`: entry `[j, b, c]` follows the token
            at `first + c * num_draft_steps + j`.
        """
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device)
        if target_activations is None:
            target_activations = self.own_activations(tokens)
        verified = self.remember(target_activations, self.rotations(positions))
        chunks = _Chunks.cut(length, first, self.settings, tokens.device)
        logits = []
        own: list[list[KeysAndValues]] = [[] for _ in self.layers]
        gathered = [(keys[:, chunks.keys], values[:, chunks.keys]) for keys, values in verified]
        for step in range(self.settings.num_draft_steps):
            at = chunks.starts + step  # [blocks, chunks of a block]
            rotation = self.rotations(at)
            hidden = self.model.embed_tokens(tokens[:, at.clamp(max=length - 1)])
            activations = [hidden]
            mask = chunks.mask(step)
            for index, layer in enumerate(self.layers):
                self_entry = self.project(layer, hidden, rotation)
                attended = _attend_in_chunks(
                    self.queries(layer, hidden, rotation), gathered[index], mask, [*own[index], self_entry]
                )
                if not self.settings.feedback_memory:
                    own[index].append(self_entry)
                hidden = self.finish_block(layer, hidden, attended)
                activations.append(hidden)
            if self.settings.feedback_memory and step + 1 < self.settings.num_draft_steps:
                for index, entry in enumerate(self.remember(torch.stack(activations, -2), rotation)):
                    own[index].append(entry)
            logits.append(self.unembed(hidden.flatten(1, 2)[:, : chunks.count]))
        return torch.stack(logits)

    def own_activations(self, tokens: Tensor) -> Tensor:
        """Of an ordinary pass of the draft, `[batch, length, num_layers + 1, hidden_size]`.

        Args:
            tokens: `[batch, length]` int64.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        rotation = self.rotations(positions)
        mask = is_visible(positions[:, None], positions, self.settings)
        hidden = self.model.embed_tokens(tokens)
        activations = [hidden]
        for layer in self.layers:
            keys, values = self.project(layer, hidden, rotation)
            attended = _attend(self.queries(layer, hidden, rotation), keys, values, mask)
            hidden = self.finish_block(layer, hidden, attended)
            activations.append(hidden)
        return torch.stack(activations, -2)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.config.head_dim))


class DraftState:
    """The serving form, of one request: a cache of all positions, and passes of one token.

    Args:
        draft: the model.
        max_tokens: positions that the cache has.
    """

    def __init__(self, draft: SpireDraft, max_tokens: int) -> None:
        self._draft = draft
        self.num_verified = 0
        self._num_tokens = 0
        weight = draft.model.norm.weight
        heads = (draft.config.num_key_value_heads, draft.config.head_dim)
        shape = (2, draft.settings.num_layers, max_tokens, *heads)
        self._cache = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self._positions = torch.arange(max_tokens, device=weight.device)

    def verify(self, activations: Tensor) -> None:
        """Append verified tokens; drafted ones are forgotten.

        Args:
            activations: the target's, `[num_tokens, num_layers + 1, hidden_size]`.
        """
        end = self.num_verified + len(activations)
        rotation = self._draft.rotations(self._positions[self.num_verified : end])
        for index, entry in enumerate(self._draft.remember(activations, rotation)):
            self._cache[:, index, self.num_verified : end] = torch.stack(entry)
        self.num_verified = self._num_tokens = end

    def step(self, token: int) -> Tensor:
        """Draft after one more token; returns logits `[vocab_size]`."""
        draft, at = self._draft, self._num_tokens
        position = self._positions[at]
        rotation = draft.rotations(position)
        seen = is_visible(position, self._positions[: at + 1], draft.settings).nonzero().squeeze(1)
        hidden = draft.model.embed_tokens.weight[token]
        activations = [hidden]
        for index, layer in enumerate(draft.layers):
            self._cache[:, index, at] = torch.stack(draft.project(layer, hidden, rotation))
            keys, values = self._cache[:, index, seen]
            attended = _attend(draft.queries(layer, hidden, rotation)[None], keys, values, None)[0]
            hidden = draft.finish_block(layer, hidden, attended)
            activations.append(hidden)
        if draft.settings.feedback_memory:
            for index, entry in enumerate(draft.remember(torch.stack(activations), rotation)):
                self._cache[:, index, at] = torch.stack(entry)
        self._num_tokens += 1
        return draft.unembed(hidden)


def is_visible(queries: Tensor, keys: Tensor, settings: SpireSettings) -> Tensor:
    """Whether a query sees a key, by their positions (broadcast against each other)."""
    return (keys <= queries) & ((keys < settings.sinks) | (keys > queries - settings.window))


@dataclass(frozen=True)
class _Chunks:
    """How a sequence is cut into chunks, and these into blocks that share the keys they gather."""

    settings: SpireSettings
    count: int  # chunks
    starts: Tensor  # [blocks, chunks of a block] int64; the last ones may be beyond the sequence
    keys: Tensor  # [blocks, sinks + span] int64 positions of verified tokens that a block gathers
    is_sink: Tensor  # [sinks + span] bool: the columns that hold sinks
    span_starts: Tensor  # [blocks, 1] int64: the first position of the others; may be negative

    @classmethod
    def cut(cls, length: int, first: int, settings: SpireSettings, device: Any) -> "_Chunks":
        k = settings.num_draft_steps
        count = (length - first) // k
        in_block = max(1, min(count, _BLOCK_TOKENS // k))
        blocks = -(-count // in_block)
        starts = first + k * torch.arange(blocks * in_block, device=device).view(blocks, in_block)
        window = min(settings.window, length)
        span = torch.arange(window + k * in_block, device=device)
        span_starts = starts[:, :1] - window
        sinks = torch.arange(min(settings.sinks, length), device=device)
        keys = torch.cat([sinks.expand(blocks, -1), span_starts + span], dim=1)
        is_sink = torch.arange(keys.shape[1], device=device) < len(sinks)
        return cls(settings, count, starts, keys.clamp(0, length - 1), is_sink, span_starts)

    def mask(self, step: int) -> Tensor:
        """Which gathered keys the token of each chunk sees, `[blocks, chunks, 1, sinks + span]` bool."""
        columns = torch.arange(self.keys.shape[1], device=self.keys.device) - self.is_sink.sum()
        positions = torch.where(self.is_sink, self.keys, self.span_starts + columns)  # [blocks, columns]
        # A sink that the span holds too is seen there.
        once = torch.where(self.is_sink, positions < self.span_starts, positions >= 0)
        starts = self.starts[:, :, None]
        seen = is_visible(starts + step, positions[:, None], self.settings) & (positions[:, None] < starts)
        return (seen & once[:, None])[:, :, None]


def _attend_in_chunks(
    queries: Tensor, gathered: KeysAndValues, mask: Tensor, own: list[KeysAndValues]
) -> Tensor:
    """Attention of each chunk's token to verified tokens and those of its own chunk.

    Args:
        queries: `[batch, blocks, chunks, num_kv_heads, groups, head_dim]`.
        gathered: keys and values of verified tokens, `[batch, blocks, columns, num_kv_heads, head_dim]`.
        mask: `[blocks, chunks, 1, columns]` bool.
        own: those of the chunk's tokens so far, `[batch, blocks, chunks, num_kv_heads, head_dim]` each.

    Returns:
        As `queries`.
    """
    keys, values = gathered
    own_keys = torch.stack(
        [entry[0] for entry in own], dim=-2
    )  # [batch, blocks, chunks, kv, own, head_dim]
    own_values = torch.stack([entry[1] for entry in own], dim=-2)
    scale = queries.shape[-1] ** -0.5
    before = torch.einsum("bnckgd,bnskd->bnkcgs", queries, keys) * scale
    before = before.masked_fill(~mask[:, None], float("-inf"))
    within = torch.einsum("bnckgd,bncksd->bnkcgs", queries, own_keys) * scale
    weights = _softmax(torch.cat([before, within], dim=-1)).to(values.dtype)
    before, within = weights.split([before.shape[-1], len(own)], dim=-1)
    attended = torch.einsum("bnkcgs,bnskd->bnckgd", before, values)
    return attended + torch.einsum("bnkcgs,bncksd->bnckgd", within, own_values)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention as of any Llama.

    Args:
        queries: `[..., num_queries, num_kv_heads, groups, head_dim]`.
        keys, values: `[..., num_keys, num_kv_heads, head_dim]`.
        mask: `[num_queries, num_keys]` bool; None if all is seen.
    """
    scores = torch.einsum("...qkgd,...skd->...kgqs", queries, keys) * queries.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = _softmax(scores).to(values.dtype)
    return torch.einsum("...kgqs,...skd->...qkgd", weights, values)


def _softmax(scores: Tensor) -> Tensor:
    """In float32 at least."""
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
