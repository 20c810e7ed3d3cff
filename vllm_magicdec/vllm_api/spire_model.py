# SPDX-License-Identifier: Apache-2.0
"""A SPIRe draft as a vLLM model (arXiv 2504.06419): a Llama whose KV cache holds memory.

A forward pass is that of a Llama, but for earlier tokens the cache holds keys and values of their *memory*:
a weighted sum of the token's activations before and after every block, with weights per block. `memorise`
writes it, for verified tokens from the target's activations, for drafts from this model's.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.nn as nn
from torch.nn.functional import linear
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM

from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.spire.serving import served_settings

_MAX_TOKENS_AT_ONCE = 1024  # bounds the memory of activations in float32


class MagicDecSpireForCausalLM(LlamaForCausalLM):
    """The draft that `magicdec train-draft` writes.

    Args:
        vllm_config: the engine's configuration, with this model's in place of the target's.
        prefix: prefix of its layers' names; "": it is served itself.

    Raises:
        MagicDecConfigError: it is served itself, or by another speculative method.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        spec = vllm_config.speculative_config
        if not (prefix and isinstance(spec, MagicDecSpeculativeConfig) and spec.has_draft_model):
            raise MagicDecConfigError(
                f"{METHOD}: a SPIRe draft cannot be served by itself; serve its target with --spec-method "
                f"{MODEL_METHOD} --speculative-model {vllm_config.model_config.model}"
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        fields = served_settings(vllm_config.model_config.hf_config)
        assert fields is not None
        self.fields = fields
        num_layers = len(self.model.layers)
        # Llama's EAGLE-3 support returns the output of each block. The input of the first, the embedding,
        # may be overwritten by fused norms.
        self.model._set_aux_hidden_state_layers(tuple(range(1, num_layers + 1)))
        if fields.feedback_memory:
            logits = torch.zeros(num_layers, num_layers + 1, dtype=torch.float32)
            self.model.memory_logits = nn.Parameter(logits, requires_grad=False)
            self.register_buffer("memory_weights", logits.softmax(dim=1), persistent=False)
        # vLLM packs linear layers for CPUs and drops the original weights.
        for index, layer in enumerate(self.model.layers):
            weight, bias = _keys_and_values(layer)
            self.register_buffer(_kv_weight(index), torch.zeros_like(weight), persistent=False)
            self.register_buffer(
                _kv_bias(index), None if bias is None else torch.zeros_like(bias), persistent=False
            )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights as vLLM does, and keep an unpacked copy of each block's K/V projection."""
        loaded = super().load_weights(weights)
        if self.fields.feedback_memory:
            self.memory_weights.copy_(self.model.memory_logits.softmax(dim=1))
        for index, layer in enumerate(self.model.layers):
            weight, bias = _keys_and_values(layer)
            getattr(self, _kv_weight(index)).copy_(weight)
            if bias is not None:
                getattr(self, _kv_bias(index)).copy_(bias)
        return loaded

    def memorise(
        self,
        activations: Sequence[torch.Tensor],
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor] | None,
    ) -> None:
        """Write the memory of tokens into the cache.

        Args:
            activations: num_layers + 1 of [num_tokens, hidden_size] in the model's dtype, the residual
                stream before each block and after the last one, of this model or of the corresponding
                blocks of the target.
            positions: [num_tokens] int64.
            slots: [num_tokens] int64 each, destinations by layer; `views.base.PAD_SLOT`: none. None: write
                nothing, because there is no KV cache yet.
        """
        for first in range(0, len(positions), _MAX_TOKENS_AT_ONCE):
            part = slice(first, first + _MAX_TOKENS_AT_ONCE)
            self._memorise(
                torch.stack([own[part] for own in activations]),
                positions[part],
                [None if slots is None else slots[index][part] for index in range(len(self.model.layers))],
            )

    def _memorise(
        self, activations: torch.Tensor, positions: torch.Tensor, slots: Sequence[torch.Tensor | None]
    ) -> None:
        # activations: [num_layers + 1, num_tokens, hidden_size]
        memories = activations  # without feedback memory, the input of each block as in any Llama
        if self.fields.feedback_memory:
            summed = self.memory_weights @ activations.float().flatten(1)
            memories = summed.to(activations.dtype).view(-1, *activations.shape[1:])
        for index, (layer, own_slots) in enumerate(zip(self.model.layers, slots, strict=True)):
            attention = layer.self_attn
            projected = linear(
                layer.input_layernorm(memories[index]),
                getattr(self, _kv_weight(index)),
                getattr(self, _kv_bias(index)),
            )
            keys, values = projected.split(attention.kv_size, dim=1)
            # Some implementations rotate in place; keys may be None.
            keys, _ = attention.rotary_emb(positions, keys.contiguous(), None)
            heads = (-1, attention.num_kv_heads, attention.head_dim)
            cache = attention.attn
            keys, values = keys.view(heads), values.contiguous().view(heads)
            if own_slots is not None:
                cache.impl.do_kv_cache_update(cache, keys, values, cache.kv_cache, own_slots)


def _keys_and_values(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return views of a block's K/V projection: weight [2 * kv_size, hidden_size], bias [2 * kv_size]."""
    own, first = layer.self_attn.qkv_proj, layer.self_attn.q_size
    return own.weight[first:], None if own.bias is None else own.bias[first:]


def _kv_weight(index: int) -> str:
    return f"kv_weight_{index}"


def _kv_bias(index: int) -> str:
    return f"kv_bias_{index}"
