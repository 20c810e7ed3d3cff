# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel for the bounds of pages' logits against the definition, in float64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

HERE = Path(__file__).parent


def check(
    seed: int,
    num_reqs: int,
    num_kv_heads: int,
    num_queries: int,
    head_size: int,
    num_pages: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    from vllm_magicdec import triton_bounds

    rng = torch.Generator().manual_seed(seed)
    num_blocks = num_reqs * num_pages + 3
    # A layer's part of a larger tensor.
    ends = torch.randn((2, 2, num_blocks, num_kv_heads, head_size), generator=rng).to(dtype)
    least, greatest = ends.amin(0)[1].to(device), ends.amax(0)[1].to(device)
    queries = torch.randn((num_reqs, num_kv_heads, num_queries, head_size), generator=rng).to(device)
    blocks = torch.randperm(num_blocks, generator=rng)[: num_reqs * num_pages].view(num_reqs, -1).to(device)
    found = triton_bounds.bounds(queries, least, greatest, blocks)
    # [num_reqs, num_kv_heads, 1, num_pages, head_size]
    low, high = (t[blocks].transpose(1, 2).unsqueeze(2).double() for t in (least, greatest))
    query = queries.double().unsqueeze(3)
    expected = torch.maximum(query * low, query * high).sum(-1)
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-5, f"relative error {error:.1e}"


cases = given(
    seed=st.integers(0, 2**31),
    num_reqs=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    num_queries=st.integers(1, 20),
    head_size=st.sampled_from([16, 64, 80, 128]),
    num_pages=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)


@settings(max_examples=25, deadline=None)
@cases
def check_in_the_interpreter(**case: object) -> None:
    check(**case)


def test_bounds_in_the_interpreter():
    # Triton decides at its import whether it interprets. `sitecustomize` mends its interpreter.
    path = [str(HERE / "triton_interpreter"), *sys.path]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)}
    child = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-4000:]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_bounds_compile_for_hopper_without_one():
    compiler = pytest.importorskip("triton.compiler")
    from triton.backends.compiler import GPUTarget

    from vllm_magicdec.triton_bounds import _bounds_kernel

    names = _bounds_kernel.arg_names
    constants = dict(NUM_QUERIES=20, HEAD_SIZE=128, QUERIES_PADDED=32, HEAD_PADDED=128, BLOCK=32)
    types = dict.fromkeys(names, "i32") | dict.fromkeys(constants, "constexpr")
    types |= dict(queries="*fp32", least="*bf16", greatest="*bf16", blocks="*i64", bounds="*fp32")
    positions = {(names.index(name),): value for name, value in constants.items()}
    source = compiler.ASTSource(_bounds_kernel, types, constexprs=positions)
    assert compiler.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


@pytest.mark.gpu
@settings(max_examples=25, deadline=None)
@cases
def test_bounds_compiled(**case: object) -> None:
    check(**case, device="cuda")


if __name__ == "__main__":
    check_in_the_interpreter()
