# SPDX-License-Identifier: Apache-2.0
"""A SPIRe draft's memory, computed for all blocks at once; tests/engine/test_spire.py serves drafts."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from torch.nn.functional import linear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from vllm_magicdec.vllm_api.spire_model import MagicDecSpireForCausalLM

HIDDEN, HEADS, SIZE, EPS = 32, 2, 16, 1e-5


def imagined_draft(num_layers: int, *, has_memory: bool, has_bias: bool) -> MagicDecSpireForCausalLM:
    """A draft with random weights, without vLLM's layers. Its caches list what was written to them."""
    torch.manual_seed(num_layers)
    draft = MagicDecSpireForCausalLM.__new__(MagicDecSpireForCausalLM)
    nn.Module.__init__(draft)
    draft.fields = SimpleNamespace(feedback_memory=has_memory)
    draft.memory_weights = torch.randn(num_layers, num_layers + 1).softmax(dim=1)
    draft.kv_weights = torch.randn(num_layers, 2 * HEADS * SIZE, HIDDEN)
    draft.kv_biases = torch.randn(num_layers, 1, 2 * HEADS * SIZE) if has_bias else None
    cos_sin = torch.randn(100, SIZE)

    def rotate(positions, keys, none):
        return RotaryEmbedding.forward_static(positions, keys, none, SIZE, SIZE, cos_sin, True)

    layers = []
    for _ in range(num_layers):
        cache = SimpleNamespace(kv_cache=[])
        cache.impl = SimpleNamespace(
            do_kv_cache_update=lambda layer, k, v, kv_cache, slots: kv_cache.append((k, v, slots))
        )
        attention = SimpleNamespace(
            attn=cache, kv_size=HEADS * SIZE, num_kv_heads=HEADS, head_dim=SIZE, rotary_emb=rotate
        )
        norm = SimpleNamespace(weight=torch.randn(HIDDEN), variance_epsilon=EPS)
        layers.append(SimpleNamespace(self_attn=attention, input_layernorm=norm))
    draft.model = SimpleNamespace(layers=layers)
    return draft


@pytest.mark.parametrize("has_memory", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_all_blocks_at_once_write_what_each_block_alone_would(has_memory, has_bias):
    num_layers, num_tokens = 3, 1500  # two parts
    draft = imagined_draft(num_layers, has_memory=has_memory, has_bias=has_bias)
    activations = torch.randn(num_layers + 1, num_tokens, HIDDEN)
    positions = torch.randint(0, 100, (num_tokens,))
    slots = list(torch.arange(num_layers * num_tokens).view(num_layers, -1))
    draft.memorise(list(activations), positions, slots)
    for index, layer in enumerate(draft.model.layers):
        memory = activations[index]
        if has_memory:
            memory = torch.einsum("l,lth->th", draft.memory_weights[index], activations)
        variance = memory.pow(2).mean(dim=-1, keepdim=True)
        normed = memory * torch.rsqrt(variance + EPS) * layer.input_layernorm.weight
        bias = draft.kv_biases[index, 0] if has_bias else None
        keys, values = linear(normed, draft.kv_weights[index], bias).chunk(2, dim=-1)
        keys, _ = layer.self_attn.rotary_emb(positions, keys, None)
        written = [torch.cat(parts) for parts in zip(*layer.self_attn.attn.kv_cache, strict=True)]
        for found, expected in zip(written, (keys, values, slots[index]), strict=True):
            torch.testing.assert_close(found.view(expected.shape), expected, atol=1e-3, rtol=1e-4)
