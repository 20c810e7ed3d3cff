# SPDX-License-Identifier: Apache-2.0
"""Compiled draft attention over token views of a served batch's size, against the torch reference."""

import pytest
import torch
from flashinfer_once import attend_with_flashinfer

from vllm_magicdec.attention import KVRows, torch_attention
from vllm_magicdec.attention.softmax import Softmax

pytestmark = pytest.mark.gpu

NUM_REQS, BUDGET, PAGE = 32, 512, 16
NUM_KV_HEADS, GROUP, HEAD_SIZE = 8, 4, 128  # Llama-3.1-8B, Qwen3-8B
# 35,000 tokens per request: the cache has more than 2**31 elements, and offsets need 64 bits.
NUM_PAGES = NUM_REQS * 35_000 // PAGE
TOLERANCE = 2**-6  # of the largest result; bfloat16 rounds softmax weights and results


@pytest.mark.parametrize("implementation", ["triton", "flashinfer"])
def test_attention_of_a_served_batch_equals_torchs(implementation):
    pytest.importorskip(implementation)
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)

    cache = normal(NUM_PAGES, PAGE, NUM_KV_HEADS, 2 * HEAD_SIZE).transpose(1, 2)
    assert cache.numel() > 2**31
    size = (NUM_REQS, NUM_KV_HEADS, BUDGET)
    slots = torch.randint(NUM_PAGES * PAGE, size, generator=generator, dtype=torch.int32, device="cuda")
    slots[-1, -1, 0] = NUM_PAGES * PAGE - 1
    lens = BUDGET - torch.arange(NUM_REQS, dtype=torch.int32, device="cuda")
    query = normal(NUM_REQS, NUM_KV_HEADS * GROUP, HEAD_SIZE)
    rows, scale = KVRows.of(cache, "FLASH_ATTN"), HEAD_SIZE**-0.5
    expected = torch_attention.attend(query, rows, slots, lens, Softmax(scale)).float()
    if implementation == "flashinfer":
        got = attend_with_flashinfer(query, rows, slots, lens, scale).float()
    else:
        from vllm_magicdec.attention import triton_attention

        got = triton_attention.attend(query, rows, slots, lens, Softmax(scale)).float()
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()
