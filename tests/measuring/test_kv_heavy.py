# SPDX-License-Identifier: Apache-2.0
"""The KV-heavy copies compute the same as the original models, with larger KV caches."""

import kv_heavy
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_magicdec.planner.models import find_model

SOURCES = {
    kv_heavy.KV_HEAVY: kv_heavy.TINY_LLAMA,
    kv_heavy.KV_HEAVY_GROUPED: kv_heavy.TINY_LLAMA,
    **dict.fromkeys(kv_heavy.KV_HEAVY_HYBRIDS, kv_heavy.TINY_HYBRID),
}


@pytest.mark.parametrize("name", SOURCES)
@torch.inference_mode()
def test_a_copy_computes_the_same_function(name):
    tokens = torch.randint(8, 2048, (1, 700), generator=torch.Generator().manual_seed(0))
    with kv_heavy.model_folder(name) as folder:
        logits = [_load(path)(tokens).logits for path in (SOURCES[name], folder)]
    bound = 0.1 if name == kv_heavy.KV_HEAVY_GROUPED else 1e-3  # queries are rounded to bfloat16 there
    assert (logits[0] - logits[1]).abs().max() < bound


def _load(path):
    # The copy's architecture is named for vLLM; its type is what `transformers` goes by.
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@pytest.mark.parametrize(
    ("name", "num_full"),
    {kv_heavy.KV_HEAVY: 8, kv_heavy.KV_HEAVY_GROUPED: 8, **kv_heavy.KV_HEAVY_HYBRIDS}.items(),
)
def test_a_copy_reads_as_much_as_its_name_says(name, num_full):
    with kv_heavy.model_folder(name) as folder:
        shape, config = find_model(folder), AutoConfig.from_pretrained(folder)
    assert config.architectures == ["LlamaForCausalLM"]
    if name == kv_heavy.KV_HEAVY_GROUPED:
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
        assert shape.kv_bytes_per_token == 32 * 1024
    else:
        assert shape.num_layers - shape.num_window_layers == num_full
        assert shape.kv_bytes_per_token == 16 * 1024
