# SPDX-License-Identifier: Apache-2.0
"""A SPIRe draft as a vLLM model (arXiv 2504.06419): a Llama whose KV cache holds memory.

A forward pass is that of a Llama, but for earlier tokens the cache holds keys and values of their *memory*:
a weighted sum of the token's activations before and after every block, with weights per block. `memorise`
writes it, for verified tokens from the target's activations, for drafts from this model's.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.nn as nn
from torch.nn.functional import rms_norm
from vllm.config import VllmConfig
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.llama import LlamaForCausalLM

from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.spire.settings import served_settings

_MAX_TOKENS_AT_ONCE = 1024  # bounds the memory of activations in float32


class MagicDecSpireForCausalLM(LlamaForCausalLM):
    """The draft that `magicdec train-draft` writes.

    Raises:
        MagicDecConfigError: it is served itself (no prefix of layers' names), or by another method.
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
        # Memory is written outside compiled code, so kernels count: one product projects for all blocks.
        # vLLM also packs linear layers for CPUs and drops the original weights.
        weight, bias = _keys_and_values(self.model.layers[0])
        self.register_buffer("kv_weights", weight.new_zeros(num_layers, *weight.shape), persistent=False)
        self.register_buffer(
            "kv_biases",
            None if bias is None else bias.new_zeros(num_layers, 1, *bias.shape),
            persistent=False,
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights as vLLM does, and keep an unpacked copy of the blocks' K/V projections."""
        loaded = super().load_weights(weights)
        if self.fields.feedback_memory:
            self.memory_weights.copy_(self.model.memory_logits.softmax(dim=1))
        for index, layer in enumerate(self.model.layers):
            weight, bias = _keys_and_values(layer)
            self.kv_weights[index].copy_(weight)
            if bias is not None:
                self.kv_biases[index].copy_(bias)
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
            slots: [num_tokens] int64 each, destinations by layer; `views.round.PAD_SLOT`: none. None: write
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
        layers = self.model.layers
        norms = [layer.input_layernorm for layer in layers]
        normed = rms_norm(memories[: len(layers)], memories.shape[-1:], eps=norms[0].variance_epsilon)
        normed = normed * torch.stack([norm.weight for norm in norms]).unsqueeze(1)
        # [num_layers, num_tokens, 2 * kv_size]
        projected = torch.bmm(normed, self.kv_weights.transpose(1, 2))
        if self.kv_biases is not None:
            projected += self.kv_biases
        attention = layers[0].self_attn
        keys, values = (part.contiguous() for part in projected.split(attention.kv_size, dim=-1))
        # Outside compiled code vLLM would rotate by a dozen operators on a GPU.
        rotary = attention.rotary_emb
        rotate = rotary.forward_cuda if keys.is_cuda and isinstance(rotary, RotaryEmbedding) else rotary
        # Some implementations rotate in place; keys may be None.
        rotated, _ = rotate(positions.repeat(len(layers)), keys.flatten(0, 1), None)
        shape = (len(layers), -1, attention.num_kv_heads, attention.head_dim)
        keys, values = rotated.view(shape), values.view(shape)
        for layer, *written, own_slots in zip(layers, keys, values, slots, strict=True):
            if own_slots is not None:
                cache = layer.self_attn.attn
                cache.impl.do_kv_cache_update(cache, *written, cache.kv_cache, own_slots)


def _keys_and_values(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return views of a block's K/V projection: weight [2 * kv_size, hidden_size], bias [2 * kv_size]."""
    own, first = layer.self_attn.qkv_proj, layer.self_attn.q_size
    return own.weight[first:], None if own.bias is None else own.bias[first:]
