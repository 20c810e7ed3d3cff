# SPDX-License-Identifier: Apache-2.0
"""The native kernel over pages, in every variant that this machine runs: float64, vLLM's kernel, torch."""

import kernel_libraries
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (  # noqa: F401
    FP8,
    attend_pages,
    batches,
    check,
    kernel_of,
    readings,
    shared_batch,
    two_threads,
    variants,
    variants_and_layouts,
    write,
)
from reference import dense_attention
from vllm.platforms import current_platform

SOFT_CAP = 20.0  # of the comparison with vLLM's kernel


@variants_and_layouts
@settings(max_examples=120, deadline=None)
@given(st.data(), st.integers(1, 5))
def test_pages_are_attended_to_as_in_float64(variant, layout, data, threads):
    batch = data.draw(batches(layout))
    kernel = kernel_of(variant)
    torch.set_num_threads(threads)
    output = torch.full(batch.query.shape, torch.nan).to(batch.query.dtype)
    lens = torch.tensor(batch.context_lens, dtype=torch.int32)
    where = dict(query_starts=batch.starts, block_table=batch.block_table, context_lens=lens)
    attend_pages(kernel, batch.query, batch.cache, output, layout=layout, **where, **batch.options)
    window = batch.options.pop("window")
    group = batch.query.shape[1] // batch.keys.shape[2]
    for request, (context, length) in enumerate(zip(batch.context_lens, batch.query_lens, strict=True)):
        if not length:
            continue
        positions = torch.arange(context - length, context).unsqueeze(1)
        tokens = torch.arange(context)
        is_seen = (tokens <= positions) & (tokens > positions - (window or context))
        keys, values = (
            half[request, :context].double().repeat_interleave(group, 1)
            for half in (batch.keys, batch.values)
        )
        part = slice(*batch.starts[request : request + 2].tolist())
        expected = dense_attention(batch.query[part], keys, values, is_seen, **batch.options)
        check(output[part], *expected, batch.options["soft_cap"])


@variants
@pytest.mark.parametrize("query_len", [1, 2, 9])
def test_a_long_context_is_summed_as_well_as_a_short_one(variant, query_len):
    """Values that are all alike: no error cancels another. One sum over all tokens would be off by 6e-4."""
    kernel, context, page_size, head_size = kernel_of(variant), 2**16, 32, 64
    torch.set_num_threads(1)
    num_blocks = context // page_size
    cache = torch.zeros(num_blocks, 1, page_size, 2 * head_size)
    cache.view(num_blocks, 1, 2, -1)[:, :, 1] = 0.7  # all keys are zero
    query = torch.randn(query_len, 2, head_size)
    output = torch.full_like(query, torch.nan)
    where = dict(
        query_starts=torch.tensor([0, query_len], dtype=torch.int32),
        block_table=torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
        context_lens=torch.tensor([context], dtype=torch.int32),
    )
    attend_pages(kernel, query, cache, output, layout="vec", scale=head_size**-0.5, **where)
    value = cache[0, 0, -1, -1].item()
    assert (output.double() - value).abs().max().item() <= (2e-6 + 2e-10 * context) * value


def vllm_reads(layout: str, dtype: torch.dtype) -> bool:
    return layout != "amx" or (dtype == torch.bfloat16 and kernel_libraries.best() == "avx512_bf16")


@pytest.mark.skipif(
    not current_platform.is_cpu() or not kernel_libraries.best(), reason="needs vLLM's kernels for x86 CPUs"
)
@pytest.mark.parametrize(
    ("variant", "layout", "dtype"),
    [
        pytest.param(variant, layout, dtype, id=f"{variant.name}-{layout}-{dtype}")
        for variant, layout in readings
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        if vllm_reads(layout, dtype)
    ],
)
# vLLM's CPU attention has fp8 caches with AVX-512 only.
@pytest.mark.parametrize("fp8", [None] if kernel_libraries.best() == "avx2" else [None, *FP8])
@pytest.mark.parametrize("page", [32, 64])
def test_it_agrees_with_vllms_kernel(variant, layout, dtype, fp8, page):
    """The meaning of a window, of a soft cap, of scales and of sinks, and the layout, are vLLM's."""
    kernel = kernel_of(variant)
    current_platform.import_kernels()
    import vllm._custom_ops as ops

    key_scale, value_scale = (0.7, 1.3) if fp8 else (1.0, 1.0)
    name = {None: "auto", torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}[fp8]
    # Of both kernels' errors, of which a capped logit's is the larger one; see `check`.
    tolerance = {torch.float32: 2e-6 + 2e-7 * SOFT_CAP, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for window in (-1, 1, 33, 500):
        query, cache, where = shared_batch(dtype, cache=fp8, page=page)
        num_blocks, num_kv_heads, page_size, content = cache.shape
        ours, theirs = torch.empty_like(query), torch.empty_like(query)
        starts, lens, table, scale = (
            where[key] for key in ("query_starts", "context_lens", "block_table", "scale")
        )
        sinks = torch.randn(query.shape[1])
        common = dict(query_start_loc=starts, seq_lens=lens, causal=True, kv_cache_dtype=name)
        shape = dict(
            num_reqs=len(lens), num_heads=query.shape[1], num_kv_heads=num_kv_heads, head_dim=query.shape[2]
        )
        plan = ops.cpu_attn_get_scheduler_metadata(
            dtype=dtype, sliding_window_size=window, isa=layout, enable_kv_split=True, **shape, **common
        )
        stored = cache.view(torch.uint8) if fp8 else cache
        keys, values = stored.view(num_blocks, num_kv_heads, 2 * page_size, content // 2).chunk(2, dim=2)
        of_layer = dict(scale=scale, softcap=SOFT_CAP, s_aux=sinks, k_scale=key_scale, v_scale=value_scale)
        of_batch = dict(
            block_table=table, sliding_window=window, scheduler_metadata=plan, alibi_slopes=None
        )
        tensors = dict(query=query, key_cache=keys, value_cache=values, output=theirs)
        ops.cpu_attention_with_kv_cache(**tensors, **of_layer, **of_batch, **common)
        where |= dict(layout=layout, scale=scale * key_scale)
        options = dict(window=window, soft_cap=SOFT_CAP, sinks=sinks, value_scale=value_scale)
        attend_pages(kernel, query, cache, ours, **options, **where)
        atol = tolerance * theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=atol)


@variants_and_layouts
# A soft cap makes a number of infinity.
@pytest.mark.parametrize(("what", "soft_cap"), [(torch.nan, 0.0), (torch.nan, 20.0), (torch.inf, 0.0)])
def test_nan_and_infinity_propagate(variant, layout, what, soft_cap):
    """Else a broken cache would be answered as if it were a sound one."""
    kernel = kernel_of(variant)
    query, cache, where = shared_batch(torch.bfloat16 if layout == "amx" else torch.float32)
    where |= dict(soft_cap=soft_cap, layout=layout)
    clean, output = torch.empty_like(query), torch.empty_like(query)
    attend_pages(kernel, query, cache, clean, **where)
    query[0, 0, 0] = what
    attend_pages(kernel, query, cache, output, **where)
    assert output[0, 0].isnan().all()
    output[0, 0] = clean[0, 0]
    torch.testing.assert_close(output, clean, rtol=0, atol=1e-6)


@variants_and_layouts
@pytest.mark.parametrize("fp8", FP8)
def test_every_fp8_number_is_read_as_torch_reads_it(variant, layout, fp8):
    """A lone token's value is the output; the NaNs and infinities of both formats are among them."""
    kernel = kernel_of(variant)
    numbers = torch.arange(256, dtype=torch.uint8)
    cache = torch.zeros(1, 1, 32, 512, dtype=torch.uint8)
    first = torch.zeros(1, dtype=torch.int64)
    write(cache, layout, first, first, torch.zeros(1, 1, 256, dtype=torch.uint8), numbers.view(1, 1, 256))
    dtype = torch.bfloat16 if layout == "amx" else torch.float32  # which holds each of them
    query, output = torch.zeros(1, 1, 256, dtype=dtype), torch.zeros(1, 1, 256, dtype=dtype)
    where = dict(
        query_starts=torch.tensor([0, 1]), block_table=torch.zeros(1, 1), context_lens=torch.tensor([1])
    )
    attend_pages(kernel, query, cache.view(fp8), output, layout=layout, scale=1.0, **where)
    expected = numbers.view(fp8).to(dtype)
    torch.testing.assert_close(output[0, 0], expected, rtol=0, atol=0, equal_nan=True)
