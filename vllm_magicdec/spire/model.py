# SPDX-License-Identifier: Apache-2.0
"""A SPIRe draft (arXiv 2504.06419): a pruned Llama with keys and values of memory vectors.

A token has `num_layers + 1` activations: the residual stream before the first block and after each block.
Its memory for a block is their softmax-weighted sum. A *verified* token has the activations of the target's
blocks from which the draft was pruned; a *drafted* token has the draft's own. A query attends to sinks and
a window of memories, and to itself as in a Llama, because its own memory does not exist yet.

This is the training form: the sequence is split into chunks of k tokens, and pass j runs the j-th token of
every chunk, which attends to the target's memories before its chunk and to the draft's own within it. In
serving (`vllm_api/spire_model.py`) tokens come one by one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from vllm_magicdec.spire.settings import SpireSettings

KeysAndValues = tuple[Tensor, Tensor]
_OWN_LAYER = 3.0  # initial logit of a block's own input; the others are 0
_BLOCK_TOKENS = 256  # training queries that share gathered keys


class SpireDraft(LlamaForCausalLM):
    """A Llama with the parameter `model.memory_logits`, `[num_layers, num_layers + 1]`."""

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
        """The decoder blocks."""
        return list(self.model.layers)

    def rotations(self, positions: Tensor) -> KeysAndValues:
        """Return RoPE's cosines and sines, `[..., head_dim]` each, at `positions` (`[...]` int64)."""
        cos, sin = self.model.rotary_emb(self.model.norm.weight, positions.reshape(1, -1))
        shape = (*positions.shape, self.config.head_dim)
        return cos.reshape(shape), sin.reshape(shape)

    def project(self, layer: LlamaDecoderLayer, hidden: Tensor, rotation: KeysAndValues) -> KeysAndValues:
        """Compute a block's keys and values, `[..., num_kv_heads, head_dim]` each.

        `hidden` is `[..., hidden_size]`, before the block's norm; `rotation` is that of `rotations`.
        """
        normed = layer.input_layernorm(hidden)
        keys = _rotate(self._heads(layer.self_attn.k_proj(normed)), rotation)
        return keys, self._heads(layer.self_attn.v_proj(normed))

    def queries(self, layer: LlamaDecoderLayer, hidden: Tensor, rotation: KeysAndValues) -> Tensor:
        """Compute queries, `[..., num_kv_heads, groups, head_dim]`, with the arguments of `project`."""
        queries = self._heads(layer.self_attn.q_proj(layer.input_layernorm(hidden)))
        return _rotate(queries, rotation).unflatten(-2, (-1, self.groups))

    def memories(self, activations: Tensor) -> list[Tensor]:
        """Compute blocks' memory vectors, `[..., hidden_size]`, of `[..., num_layers + 1, hidden_size]`."""
        if self.settings.feedback_memory:
            weights = self.model.memory_logits.float().softmax(-1)
            mixed = torch.einsum("il,...lh->...ih", weights, activations.float())
            activations = mixed.to(activations.dtype)
        return [activations[..., index, :] for index in range(self.settings.num_layers)]

    def project_memories(self, activations: Tensor, rotation: KeysAndValues) -> list[KeysAndValues]:
        """Compute keys and values of each block's memories; arguments as for `memories` and `project`."""
        pairs = zip(self.layers, self.memories(activations), strict=True)
        return [self.project(layer, memory, rotation) for layer, memory in pairs]

    def finish_block(self, layer: LlamaDecoderLayer, hidden: Tensor, attended: Tensor) -> Tensor:
        """Compute a block's output `[..., hidden_size]` from its input, in the same shape.

        `attended`, the output of attention, is `[..., num_kv_heads, groups, head_dim]`.
        """
        hidden = hidden + layer.self_attn.o_proj(attended.flatten(-3).to(hidden.dtype))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def unembed(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., vocab_size]` of the last block's output."""
        return self.lm_head(self.model.norm(hidden))

    def forward(self, tokens: Tensor, target_activations: Tensor, first: int = 0) -> Tensor:
        """Run the training form.

        Args:
            tokens: `[batch, length]` int64; an incomplete last chunk is ignored.
            target_activations: `[batch, length, num_layers + 1, hidden_size]`.
            first: index of the first chunk's first token; the tokens before it are verified.

        Returns:
            Logits `[num_draft_steps, batch, num_chunks, vocab_size]`: entry `[j, b, c]` follows the token
            at `first + c * num_draft_steps + j`.
        """
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device)
        verified = self.project_memories(target_activations, self.rotations(positions))
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
                entries = self.project_memories(torch.stack(activations, -2), rotation)
                for of_layer, entry in zip(own, entries, strict=True):
                    of_layer.append(entry)
            logits.append(self.unembed(hidden.flatten(1, 2)[:, : chunks.count]))
        return torch.stack(logits)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.config.head_dim))


def _rotate(heads: Tensor, rotation: KeysAndValues) -> Tensor:
    cos, sin = (each.to(heads.dtype) for each in rotation)
    return apply_rotary_pos_emb(heads, heads, cos, sin, unsqueeze_dim=-2)[0]


def is_visible(queries: Tensor, keys: Tensor, settings: SpireSettings) -> Tensor:
    """Return whether queries attend to keys, both given by position; shapes broadcast."""
    return (keys <= queries) & ((keys < settings.sinks) | (keys > queries - settings.window))


@dataclass(frozen=True)
class _Chunks:
    """A sequence's chunks, grouped into blocks that share gathered keys."""

    settings: SpireSettings
    count: int  # number of chunks
    starts: Tensor  # [blocks, chunks of a block] int64 positions; the last may exceed the sequence
    keys: Tensor  # [blocks, sinks + span] int64 positions of a block's gathered verified tokens
    is_sink: Tensor  # [sinks + span] bool
    span_starts: Tensor  # [blocks, 1] int64 first positions of the span; may be negative

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
        """Return the gathered keys that each chunk's token `step` attends to.

        The result is `[blocks, chunks, 1, sinks + span]` bool.
        """
        columns = torch.arange(self.keys.shape[1], device=self.keys.device) - self.is_sink.sum()
        positions = torch.where(self.is_sink, self.keys, self.span_starts + columns)  # [blocks, columns]
        # A sink within the span counts there only.
        once = torch.where(self.is_sink, positions < self.span_starts, positions >= 0)
        starts = self.starts[:, :, None]
        seen = is_visible(starts + step, positions[:, None], self.settings) & (positions[:, None] < starts)
        return (seen & once[:, None])[:, :, None]


def _attend_in_chunks(
    queries: Tensor, gathered: KeysAndValues, mask: Tensor, own: list[KeysAndValues]
) -> Tensor:
    """Attend from each chunk's token to verified tokens and to its own chunk.

    Args:
        queries: `[batch, blocks, chunks, num_kv_heads, groups, head_dim]`, the result's shape, too.
        gathered: keys and values of verified tokens, `[batch, blocks, columns, num_kv_heads, head_dim]`.
        mask: `[blocks, chunks, 1, columns]` bool.
        own: keys and values of the chunk's tokens, `[batch, blocks, chunks, num_kv_heads, head_dim]` each.
    """
    keys, values = gathered
    # [batch, blocks, chunks, num_kv_heads, own, head_dim] each
    own_keys, own_values = (torch.stack(each, dim=-2) for each in zip(*own, strict=True))
    scale = queries.shape[-1] ** -0.5
    before = torch.einsum("bnckgd,bnskd->bnkcgs", queries, keys) * scale
    before = before.masked_fill(~mask[:, None], float("-inf"))
    within = torch.einsum("bnckgd,bncksd->bnkcgs", queries, own_keys) * scale
    scores = torch.cat([before, within], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
    before, within = weights.split([before.shape[-1], len(own)], dim=-1)
    attended = torch.einsum("bnkcgs,bnskd->bnckgd", before, values)
    return attended + torch.einsum("bnkcgs,bncksd->bnckgd", within, own_values)
