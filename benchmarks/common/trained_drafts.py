# SPDX-License-Identifier: Apache-2.0
"""Trained SPIRe drafts in plain torch: from their files, and token by token as in serving."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from vllm_magicdec.spire.model import SpireDraft, is_visible
from vllm_magicdec.spire.settings import SpireError, SpireSettings


def load(folder: Path, dtype: torch.dtype = torch.float32) -> SpireDraft:
    """Load the draft that `save` wrote.

    Args:
        dtype: dtype of the weights; `memory_logits` stay float32.

    Raises:
        SpireError: the folder holds no draft.
    """
    try:
        fields = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
    except (OSError, ValueError):
        raise SpireError(f"{folder} is no SPIRe draft; train one with: magicdec train-draft") from None
    settings = SpireSettings.of(fields)
    draft = SpireDraft(LlamaConfig(**{**fields, "dtype": "float32"}), settings)
    missing, unexpected = draft.load_state_dict({n: w.float() for n, w in weights.items()}, strict=False)
    draft.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SpireError(
            f"the weights in {folder} are not a SPIRe draft's; train one with: magicdec train-draft"
        )
    draft.to(dtype)
    if settings.feedback_memory:
        draft.model.memory_logits.data = weights["model.memory_logits"].float()
    return draft.eval()


class DraftState:
    """The serving form for one request: a cache of all positions, and passes of one token.

    Args:
        draft: the model.
        max_tokens: number of positions in the cache.
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
        """Replace the drafted tokens by verified ones.

        Args:
            activations: the target's activations, `[num_tokens, num_layers + 1, hidden_size]`.
        """
        end = self.num_verified + len(activations)
        rotation = self._draft.rotations(self._positions[self.num_verified : end])
        for index, entry in enumerate(self._draft.project_memories(activations, rotation)):
            self._cache[:, index, self.num_verified : end] = torch.stack(entry)
        self.num_verified = self._num_tokens = end

    def step(self, token: int) -> Tensor:
        """Append a token and return the logits after it, `[vocab_size]`."""
        draft, at = self._draft, self._num_tokens
        position = self._positions[at]
        rotation = draft.rotations(position)
        seen = is_visible(position, self._positions[: at + 1], draft.settings).nonzero().squeeze(1)
        hidden = draft.model.embed_tokens.weight[token]
        activations = [hidden]
        for index, layer in enumerate(draft.layers):
            self._cache[:, index, at] = torch.stack(draft.project(layer, hidden, rotation))
            keys, values = self._cache[:, index, seen]
            attended = attend(draft.queries(layer, hidden, rotation), keys, values)
            hidden = draft.finish_block(layer, hidden, attended)
            activations.append(hidden)
        if draft.settings.feedback_memory:
            for index, entry in enumerate(draft.project_memories(torch.stack(activations), rotation)):
                self._cache[:, index, at] = torch.stack(entry)
        self._num_tokens += 1
        return draft.unembed(hidden)


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend with one token as a Llama does.

    Args:
        queries: `[num_kv_heads, groups, head_dim]`.
        keys, values: `[num_keys, num_kv_heads, head_dim]`.

    Returns:
        Attention output in the shape of `queries`.
    """
    scores = torch.einsum("kgd,skd->kgs", queries, keys) * queries.shape[-1] ** -0.5
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
    return torch.einsum("kgs,skd->kgd", weights, values)
