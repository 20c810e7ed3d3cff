# SPDX-License-Identifier: Apache-2.0
"""The CPU backend's caches as vLLM's kernel packs them; run for every library of kernels."""

import kernel_libraries
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from views_over_a_cache import CACHE_NAMES, Case, cases, empty_cache, run
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.rows import read_dtype


@pytest.fixture(scope="module")
def ops():
    if current_platform.get_cpu_architecture() != CpuArchEnum.X86 or not current_platform.is_cpu():
        pytest.skip("needs vLLM's kernels for x86 CPUs")
    current_platform.import_kernels()
    import vllm._custom_ops as ops

    assert kernel_libraries.loaded() == kernel_libraries.best()
    return ops


def halves_of(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as the CPU backend hands them to its kernels."""
    num_blocks, num_kv_heads, page_size, _ = cache.shape
    return cache.view(num_blocks, num_kv_heads, 2 * page_size, -1).chunk(2, dim=2)


def write_packed(
    ops, case: Case, isa: str, tokens: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0
) -> torch.Tensor:
    """Write the tokens in a random order; scales are powers of two, so that none is rounded."""
    cache = empty_cache(KVCacheLayout.LBHNC, case)
    if cache.dtype in CACHE_NAMES:
        cache = cache.view(torch.uint8)
    order = torch.randperm(case.keys.shape[0])
    scaled = [(half.float() * scale).to(case.query.dtype)[order].contiguous() for half in tokens]
    name = CACHE_NAMES.get(case.keys.dtype, "auto")
    scales = dict(k_scale=scale, v_scale=scale, kv_cache_dtype=name)
    ops.cpu_attn_reshape_and_cache(*scaled, *halves_of(cache), order, isa, **scales)
    return cache


def rows_of(case: Case, cache: torch.Tensor, isa: str) -> KVRows:
    return KVRows.of(cache, "CPU_ATTN", isa, case.keys.dtype)


@pytest.fixture
def ops_for(ops, isa):
    if isa == "amx" and kernel_libraries.loaded() != "avx512_bf16":
        pytest.skip("only the library for AVX512_BF16 packs for AMX")
    return ops


NO_FP8 = dict(fp8=()) if kernel_libraries.best() == "avx2" else {}  # vLLM's has no such kernels

packed_cases = {
    # float16 and float32 are never packed for AMX by vLLM, but its kernel can.
    "vec": cases(page_sizes=(32, 64, 128), head_sizes=(32, 64, 128), **NO_FP8),
    "vec16": cases(page_sizes=(16, 48), head_sizes=(32, 64, 80, 112), fp8=()),
    "amx": st.one_of(
        cases(page_sizes=(32, 64, 96), head_sizes=(32, 64, 80, 128), fp8=()),
        cases(page_sizes=(32, 64, 96), head_sizes=(32, 64, 128)),
    ),
}


@pytest.mark.parametrize("isa", packed_cases)
def test_packed_caches_read_back_as_written(ops_for, isa):
    @settings(max_examples=25, deadline=None)
    @given(packed_cases[isa], st.sampled_from([1.0, 0.25]))
    def check(case, scale):
        num_slots, num_kv_heads, _ = case.keys.shape
        scale = scale if case.keys.dtype in CACHE_NAMES else 1.0
        cache = write_packed(ops_for, case, isa, (case.keys, case.values), scale)
        rows = rows_of(case, cache, isa)
        everywhere = torch.arange(num_slots).expand(num_kv_heads, num_slots)
        for read, written in zip(rows.gather(everywhere), (case.keys, case.values), strict=True):
            assert read.dtype == read_dtype(written.dtype)
            assert torch.equal(read.float(), written.float().transpose(0, 1))
        for table in (rows.keys, rows.values):
            assert table.rows.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()

    check()


@pytest.mark.parametrize("isa", packed_cases)
def test_torch_attends_to_views_of_packed_caches(ops_for, isa):
    @settings(max_examples=25, deadline=None)
    @given(packed_cases[isa])
    def check(case):
        rows = rows_of(case, write_packed(ops_for, case, isa, case.only_views()), isa)
        case.check(run(case, rows, "torch"))

    check()
