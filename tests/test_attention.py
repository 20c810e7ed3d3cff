# SPDX-License-Identifier: Apache-2.0
"""Attention over a token view against dense attention masked to the same tokens."""

import os
import subprocess
import sys

import engines
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from vllm_magicdec.attention import IMPLEMENTATIONS, KVRows

# bfloat16 has 8 bits: inputs are exact, but the output is rounded, and in Triton the weights as well.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
RUNNABLE = ["torch", *(["triton"] if INTERPRETED or torch.cuda.is_available() else [])]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@st.composite
def views(draw):
    num_kv_heads, group = draw(st.sampled_from([(1, 4), (2, 2), (3, 1), (2, 5)]))
    return dict(
        num_reqs=draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        group=group,
        head_size=draw(st.sampled_from([8, 32, 80])),
        page_size=draw(st.sampled_from([1, 4, 16])),
        budget=draw(st.integers(1, 150)),
        layout=draw(st.sampled_from(["NHD", "HND"])),
        soft_cap=draw(st.sampled_from([0.0, 5.0])),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        seed=draw(st.integers(0, 2**31)),
    )


def dense_attention(query, keys, values, seen, scale, soft_cap):
    """One request: `query` [heads, size], `keys`, `values` [slots, kv_heads, size]; `seen` by KV head."""
    rows = []
    for head, own in enumerate(query.double()):
        kv_head = head * keys.shape[1] // len(query)
        logits = keys[:, kv_head].double() @ own * scale
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        mask = torch.full_like(logits, float("-inf"))
        mask[seen[kv_head]] = 0
        rows.append((logits + mask).softmax(0) @ values[:, kv_head].double())
    return torch.stack(rows)


@pytest.mark.parametrize("implementation", RUNNABLE)
@settings(max_examples=60, deadline=None)
@given(case=views())
def test_a_view_attends_to_its_tokens_and_no_others(implementation, case):
    generator = torch.Generator().manual_seed(case["seed"])
    heads, size, page = case["num_kv_heads"], case["head_size"], case["page_size"]
    num_blocks = -(-case["budget"] // page) + 3
    shape = (num_blocks, page, heads, 2 * size)
    cache = torch.randn(shape, generator=generator).to(case["dtype"])
    # As vLLM hands it over: [blocks, heads, page, 2 * size], in either physical order.
    cache = cache.transpose(1, 2) if case["layout"] == "NHD" else cache.transpose(1, 2).contiguous()
    keys = cache[..., :size].transpose(1, 2).reshape(-1, heads, size)
    values = cache[..., size:].transpose(1, 2).reshape(-1, heads, size)
    num_heads = heads * case["group"]
    query = torch.randn((case["num_reqs"], num_heads, size), generator=generator).to(case["dtype"])
    lens = torch.randint(1, case["budget"] + 1, (case["num_reqs"],), generator=generator)
    order = [
        [torch.randperm(num_blocks * page, generator=generator)[: case["budget"]] for _ in range(heads)]
        for _ in range(case["num_reqs"])
    ]
    slots = torch.stack([torch.stack(own) for own in order]).int()
    scale = size**-0.5
    got = IMPLEMENTATIONS[implementation](
        query.to(DEVICE),
        KVRows.of(cache.to(DEVICE), "FLASH_ATTN"),
        slots.to(DEVICE),
        lens.int().to(DEVICE),
        scale=scale,
        soft_cap=case["soft_cap"],
    ).cpu()
    for request in range(case["num_reqs"]):
        seen = [own[: lens[request]] for own in order[request]]
        expected = dense_attention(query[request], keys, values, seen, scale, case["soft_cap"])
        tolerance = TOLERANCE[case["dtype"]]
        torch.testing.assert_close(got[request].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's own run")
def test_the_triton_kernel_in_its_interpreter():
    if torch.cuda.is_available():
        pytest.skip("the kernel itself was tested")
    env = engines.environment(v2=True)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "triton"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    assert "1 passed" in result.stdout


@pytest.mark.parametrize(
    ("isa", "dtype"),
    [("vec", torch.float32), ("vec", torch.bfloat16), ("vec16", torch.float32), ("amx", torch.bfloat16)],
)
@pytest.mark.parametrize("page_size", [32, 64])
def test_rows_undo_the_packing_of_vllms_cpu_kernels(isa, dtype, page_size):
    if not current_platform.is_cpu():
        pytest.skip("needs vLLM's CPU build")
    current_platform.import_kernels()
    num_blocks, heads, size = 5, 2, 64
    cache = torch.zeros((num_blocks, heads, page_size, 2 * size), dtype=dtype)
    halves = cache.view(num_blocks, heads, 2 * page_size, size).chunk(2, dim=2)
    num_slots = num_blocks * page_size
    keys, values = (torch.randn(num_slots, heads, size).to(dtype) for _ in range(2))
    slots = torch.randperm(num_slots)
    ops.cpu_attn_reshape_and_cache(
        keys, values, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    rows = KVRows.of(cache, "CPU_ATTN", isa)
    wanted = slots.expand(3, heads, num_slots)
    got_keys, got_values = rows.gather(wanted)
    assert torch.equal(got_keys[1], keys.transpose(0, 1))
    assert torch.equal(got_values[2], values.transpose(0, 1))
    by_page = rows.keys_by_page(torch.arange(num_blocks)).transpose(0, 1).flatten(1, 2)
    assert torch.equal(by_page[:, slots], keys.transpose(0, 1))


def test_an_unknown_packing_is_refused():
    with pytest.raises(ValueError, match="use draft_kv_policy='streamingllm'"):
        KVRows.of(torch.zeros(1, 1, 32, 128), "CPU_ATTN", "neon")
