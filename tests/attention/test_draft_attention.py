# SPDX-License-Identifier: Apache-2.0
"""Draft attention over token views against dense attention; as a program, the Triton kernel interpreted."""

import pytest
import torch
import triton_tools
from hypothesis import given, settings
from hypothesis import strategies as st
from views_over_a_cache import CPU, cases, empty_cache, fill_page_indices, filled_cache, layouts, run

from vllm_magicdec.attention import KVRows, flashinfer_attention
from vllm_magicdec.attention.softmax import Softmax


@settings(max_examples=120, deadline=None)
@given(cases(), layouts, st.integers(1, 2))
def test_torch_attends_to_the_view_and_nothing_else_in_every_layout(case, layout, page_stride):
    rows = KVRows.of(filled_cache(layout, case, page_stride=page_stride), "FLASH_ATTN")
    case.check(run(case, rows, "torch"))


@settings(max_examples=60, deadline=None)
@given(cases(), layouts, st.integers(1, 2))
def check_triton(case, layout, page_stride):
    rows = KVRows.of(filled_cache(layout, case, page_stride=page_stride), "TRITON_ATTN")
    case.check(run(case, rows, "triton"))


@settings(max_examples=60, deadline=None)
@given(cases(), layouts, st.integers(1, 2))
def check_triton_indices(case, layout, page_stride):
    from vllm_magicdec.attention import triton_indices

    rows = KVRows.of(empty_cache(layout, case, page_stride=page_stride), "FLASHINFER")
    num_reqs, num_kv_heads, budget = case.slots.shape
    indptr = flashinfer_attention.page_indptr(case.lens, num_kv_heads)
    written = []
    for fill in (fill_page_indices, triton_indices.fill_page_indices):
        indices = flashinfer_attention.make_page_indices(num_reqs * num_kv_heads, budget, CPU)
        fill(indices, rows, case.slots, case.lens, indptr)
        written.append(indices[: indptr[-1]])
        assert torch.all(indices[indptr[-1] :] == 0)
    assert torch.equal(*written)


def test_triton_kernels_in_the_interpreter():
    triton_tools.run_interpreted(__file__)


def pointers_of(dtype: str, cache: str) -> dict[str, str]:
    """The kernel's arguments for a query and a cache of Triton's types."""
    arguments = dict.fromkeys(["query", "output", "sinks"], f"*{dtype}")
    arguments |= dict.fromkeys(["keys", "values"], f"*{cache}")
    return arguments | dict(slots="*i32", lens="*i32", scale="fp32", soft_cap="fp32", value_scale="fp32")


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("dtype", "cache"),
    [("bf16", None), ("fp32", None), ("bf16", "fp8e4nv"), ("fp16", "fp8e5"), ("fp32", "fp8e4nv")],
)
def test_triton_compiles_for_hopper_without_one(dtype, cache):
    pytest.importorskip("triton")
    from vllm_magicdec.attention.triton_attention import _decode_kernel

    constants = dict(PAGE_SIZE=16, GROUP=5, HEAD_SIZE=80, GROUP_PADDED=16, HEAD_PADDED=128)
    constants |= dict(BLOCK=64, SOFT_CAP=True, SINKS=True)
    arguments = pointers_of(dtype, cache or dtype)
    triton_tools.check_compiles_for_hopper(_decode_kernel, arguments, constants)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize("cache", [None, "fp8e4nv"])
@pytest.mark.parametrize("head_size", [128, 256])
def test_the_triton_kernel_fits_the_shared_memory_of_smaller_gpus(dtype, size, cache, head_size):
    """Ada, and Ampere but for the A100, give a thread block 99 KB."""
    pytest.importorskip("triton")
    from vllm_magicdec.attention import triton_attention

    kernel = triton_attention._decode_kernel
    constants = dict(PAGE_SIZE=16, GROUP=8, HEAD_SIZE=head_size, GROUP_PADDED=16, HEAD_PADDED=head_size)
    constants |= dict(BLOCK=triton_attention.block_tokens(head_size, size), SOFT_CAP=False, SINKS=False)
    arguments = pointers_of(dtype, cache or dtype)
    # As a launch specialises it: elements of a row are neighbours, and rows are aligned.
    constants |= dict.fromkeys(["query_dim", "key_dim", "value_dim", "slots_column"], 1)
    aligned = set(kernel.arg_names) - set(constants) - {"scale", "soft_cap", "value_scale"}
    compiled = triton_tools.compile_for(89, kernel, arguments, constants, aligned)
    assert 0 < compiled.metadata.shared <= 99 * 1024


def test_triton_compiles_the_row_numbers_for_hopper_without_one():
    pytest.importorskip("triton")
    from vllm_magicdec.attention.triton_indices import _fill_kernel

    pointers = dict.fromkeys(["indices", "slots", "lens", "indptr"], "*i32")
    triton_tools.check_compiles_for_hopper(_fill_kernel, pointers, dict(PAGE_SIZE=16, BLOCK=256))


@pytest.mark.gpu
@settings(max_examples=40, deadline=None)
@given(cases(), layouts)
def test_triton_compiled(case, layout):
    rows = KVRows.of(filled_cache(layout, case, device="cuda"), "TRITON_ATTN")
    case.check(run(case, rows, "triton", "cuda"))


# What is refused, and the sentence that says so.


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("cache", "backend", "isa", "sentence"),
    [
        (zeros(2, 1, 32, 64), "CPU_ATTN", "neon", "layout for neon, only vec, vec16, amx; use"),
        (zeros(2, 1, 32, 64), "CPU_ATTN", None, "layout for None, only"),
        (zeros(2, 1, 32, 64), "FLEX_ATTENTION", None, "attention backend FLEX_ATTENTION; use one"),
        (zeros(2, 1, 32, 64, dtype=torch.uint8), "FLASH_ATTN", None, "; use --kv-cache-dtype fp8, or"),
    ],
)
def test_unknown_caches_are_refused(cache, backend, isa, sentence):
    with pytest.raises(ValueError, match=sentence):
        KVRows.of(cache, backend, isa)


@pytest.mark.parametrize(
    ("cache", "isa", "sentence"),
    [
        (zeros(2, 1, 32, 128), "amx", "a head's elements are not contiguous"),
        (zeros(2, 1, 32, 128), "vec", "a head's elements are not contiguous"),
        (zeros(2, 1, 32, 8), None, "rows are not aligned to 16 bytes"),
        (zeros(2, 1, 32, 130)[..., :128], None, "rows are not aligned to 16 bytes"),
    ],
)
def test_caches_that_flashinfer_cannot_read_row_by_row_are_refused(cache, isa, sentence):
    rows = KVRows.of(cache, "CPU_ATTN" if isa else "FLASHINFER", isa)
    with pytest.raises(ValueError, match=f"{sentence}.*use the Triton draft attention"):
        flashinfer_attention.row_pages(rows)


def test_triton_refuses_a_packed_cache():
    pytest.importorskip("triton")
    from vllm_magicdec.attention import triton_attention

    rows = KVRows.of(zeros(2, 1, 32, 128), "CPU_ATTN", "amx")
    slots = torch.zeros((1, 1, 1), dtype=torch.int32)
    with pytest.raises(ValueError, match="reads no packed KV cache; use the torch one"):
        triton_attention.attend(zeros(1, 1, 64), rows, slots, slots[0, 0] + 1, Softmax(1.0))


if __name__ == "__main__":
    check_triton()
    check_triton_indices()
