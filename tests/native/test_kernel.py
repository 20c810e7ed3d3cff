# SPDX-License-Identifier: Apache-2.0
"""The native kernel, in every variant that this machine runs, against attention in float64."""

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace

import kernel_libraries
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.platforms import current_platform

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.metadata import TokenPassMetadata
from vllm_magicdec.attention.native_attention import native_of, takes_view
from vllm_magicdec.attention.torch_attention import attend_where
from vllm_magicdec.native.library import VARIANTS, Kernel, UnreadableError, load, runs_here
from vllm_magicdec.views.copies import LayerCopies

# Largest error as a share of the largest result that there were if no two values cancelled. A bfloat16
# result is rounded (2^-8), and with AVX512_BF16 the weights of values are as well.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11 + 4e-6}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
GARBAGE = 2**31 - 1
SOFT_CAP = 20.0  # of the comparison with vLLM's kernel

here = [variant for variant in VARIANTS if runs_here(variant)]
variants = pytest.mark.parametrize("variant", here, ids=[variant.name for variant in here])
# Every variant reads vLLM's layout for vectors, and AMX's its own as well.
readings = [(variant, "vec") for variant in here] + [(v, "amx") for v in here if v.name == "amx"]
variants_and_layouts = pytest.mark.parametrize(
    ("variant", "layout"), readings, ids=[f"{variant.name}-{layout}" for variant, layout in readings]
)


def kernel_of(variant) -> Kernel:
    if not variant.path.exists():
        pytest.skip(f"{variant.name} was not built: python setup.py build_ext --inplace")
    return load(variant)


@dataclass
class Batch:
    """Requests over one layer's cache; what none of them has is NaN."""

    query: torch.Tensor  # [num_tokens, num_heads, head_size]
    keys: torch.Tensor  # [num_reqs, max_context, num_kv_heads, head_size]
    values: torch.Tensor
    cache: torch.Tensor  # [num_blocks, num_kv_heads, page_size, 2 * head_size]
    block_table: torch.Tensor  # [num_reqs, n] int32, garbage behind a context's end
    context_lens: list[int]
    query_lens: list[int]
    options: dict

    @property
    def starts(self) -> torch.Tensor:
        return torch.tensor([0, *self.query_lens]).cumsum(0).to(torch.int32)

    def slots_of(self, request: int, positions: torch.Tensor) -> torch.Tensor:
        page_size = self.cache.shape[2]
        pages = self.block_table[request, positions // page_size].long()
        return (pages * page_size + positions % page_size).int()


def write(bits, layout, pages, places, keys, values) -> None:
    """Put tokens into a cache.

    Args:
        bits: [num_blocks, num_kv_heads, page_size, 2 * head_size], any strides of the first two.
        layout: of a page, by vLLM's name.
        pages: [n], and `places` in them.
        places: [n].
        keys: [n, num_kv_heads, head_size], and `values`.
        values: as `keys`.
    """
    *outer, page_size, content = bits.shape
    count, num_kv_heads, head_size = keys.shape
    all_keys, all_values = bits.view(*outer, 2, page_size * content // 2).unbind(2)
    if layout == "vec":
        all_keys.view(*outer, head_size, page_size)[pages, :, :, places] = keys
        all_values.view(*outer, page_size, head_size)[pages, :, places] = values
        return
    key_pairs = keys.reshape(count, num_kv_heads, head_size // 2, 2)
    key_tiles = all_keys.view(*outer, page_size // 16, head_size // 2, 16, 2)
    key_tiles[pages, :, places // 16, :, places % 16] = key_pairs
    value_parts = values.reshape(count, num_kv_heads, head_size // 16, 16)
    value_tiles = all_values.view(*outer, head_size // 16, page_size // 2, 16, 2)
    value_tiles[pages, :, :, places // 2, :, places % 2] = value_parts


@st.composite
def batches(draw, layout, max_query_len=32, windows=(0, 1, 7, 33, 100)) -> Batch:
    torch.manual_seed(draw(st.integers(0, 2**16)))
    is_amx = layout == "amx"  # vLLM has it for models in bfloat16 and heads of whole tiles
    dtype = torch.bfloat16 if is_amx else draw(st.sampled_from(list(BOUND)))
    cache_dtype = draw(st.sampled_from([dtype, *FP8]))
    others = [160] if is_amx else [80, 112]
    head_size = draw(st.sampled_from([32, 64, 96, 128, *others, 256, 512]))
    page_size = draw(st.sampled_from([32, 64, 96]))
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 7, 8]))
    query_lens = draw(st.lists(st.integers(0, max_query_len), min_size=1, max_size=4))
    context_lens = [length + draw(st.integers(0, 300)) for length in query_lens]
    widest = max(1, -(-max(context_lens) // page_size))
    num_blocks = len(query_lens) * widest + 1
    # Pages and heads at any distance, as where layers or groups share memory.
    gaps = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    memory = torch.full((num_blocks * gaps[0], num_kv_heads * gaps[1], page_size, 2 * head_size), torch.nan)
    cache = memory.to(cache_dtype)[:: gaps[0], :: gaps[1]]
    table = torch.randperm(num_blocks)[: len(query_lens) * widest].view(-1, widest).int()
    shape = (len(query_lens), max(context_lens), num_kv_heads, head_size)
    # Of an fp8 cache some are subnormal.
    keys, values = (torch.randn(shape).to(cache_dtype) for _ in range(2))
    bits = cache.view(torch.uint8) if cache_dtype in FP8 else cache  # torch writes no chosen fp8 numbers
    for request, context in enumerate(context_lens):
        positions = torch.arange(context)
        pages, places = table[request, positions // page_size].long(), positions % page_size
        tokens = (half[request, :context].view(bits.dtype) for half in (keys, values))
        write(bits, layout, pages, places, *tokens)
        table[request, -(-context // page_size) :] = GARBAGE
    num_heads = num_kv_heads * group
    # Of a wider tensor, as a layer's queries are.
    query = torch.randn(sum(query_lens), num_heads + 2 * num_kv_heads, head_size).to(dtype)[:, :num_heads]
    options = dict(
        scale=head_size**-0.5,
        soft_cap=draw(st.sampled_from([0.0, 0.5, 30.0])),
        sinks=3 * torch.randn(num_heads) if draw(st.booleans()) else None,
        value_scale=draw(st.sampled_from([0.3, 2.0])) if cache_dtype in FP8 else 1.0,
    )
    if windows:
        options["window"] = draw(st.sampled_from(windows))
    return Batch(query, keys, values, cache, table, context_lens, query_lens, options)


def truth(
    query, keys, values, is_seen, *, scale, value_scale=1.0, soft_cap=0.0, sinks=None
) -> tuple[torch.Tensor, float]:
    """In float64, of one request; and the largest result there were if no two values cancelled.

    `keys`, `values` [n, num_heads, head_size]; `is_seen` [num_queries, n] or [num_heads, num_queries, n].
    """
    logits = torch.einsum("qhd,khd->hqk", query.double(), keys.double()) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)], dim=-1)
    weights = logits.softmax(-1)[..., : len(keys)]
    values = values.double() * value_scale
    result = torch.einsum("hqk,khd->qhd", weights, values)
    return result, torch.einsum("hqk,khd->qhd", weights, values.abs()).amax().item()


def check(output: torch.Tensor, expected: torch.Tensor, size: float, soft_cap: float) -> None:
    """tanh is right to 2e-7, so a capped logit to that times the cap, and its weight relatively."""
    error = (output.double() - expected).abs().max().item()
    assert error <= (BOUND[output.dtype] + 2e-7 * soft_cap) * size, f"{error / size:.2e} of {size:.3f}"


def attend_pages(kernel: Kernel, query, cache, output, *, layout: str, **where) -> None:
    kernel.over(cache, layout).attend_pages(query, output, **where)


def with_threads(number: int) -> None:
    torch.set_num_threads(number)


@pytest.fixture(autouse=True)
def threads():
    """Two, where a test does not say: the suite's processes have one each."""
    number = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(number)


@variants_and_layouts
@settings(max_examples=120, deadline=None)
@given(st.data(), st.integers(1, 5))
def test_pages_are_attended_to_as_in_float64(variant, layout, data, threads):
    batch = data.draw(batches(layout))
    kernel = kernel_of(variant)
    with_threads(threads)
    output = torch.full(batch.query.shape, torch.nan).to(batch.query.dtype)
    attend_pages(
        kernel,
        batch.query,
        batch.cache,
        output,
        layout=layout,
        query_starts=batch.starts,
        block_table=batch.block_table,
        context_lens=torch.tensor(batch.context_lens, dtype=torch.int32),
        **batch.options,
    )
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
        expected = truth(batch.query[part], keys, values, is_seen, **batch.options)
        check(output[part], *expected, batch.options["soft_cap"])


@variants
@pytest.mark.parametrize("query_len", [1, 2, 9])
def test_a_long_context_is_summed_as_well_as_a_short_one(variant, query_len):
    """Values that are all alike: no error cancels another. One sum over all tokens would be off by 6e-4."""
    kernel, context, page_size, head_size = kernel_of(variant), 2**16, 32, 64
    with_threads(1)
    num_blocks = context // page_size
    cache = torch.zeros(num_blocks, 1, page_size, 2 * head_size)
    cache.view(num_blocks, 1, 2, -1)[:, :, 1] = 0.7  # all keys are zero
    query = torch.randn(query_len, 2, head_size)
    output = torch.full_like(query, torch.nan)
    attend_pages(
        kernel,
        query,
        cache,
        output,
        layout="vec",
        query_starts=torch.tensor([0, query_len], dtype=torch.int32),
        block_table=torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
        context_lens=torch.tensor([context], dtype=torch.int32),
        scale=head_size**-0.5,
        soft_cap=0.0,
        sinks=None,
        value_scale=1.0,
        window=0,
    )
    value = cache[0, 0, -1, -1].item()
    assert (output.double() - value).abs().max().item() <= (2e-6 + 2e-10 * context) * value


@variants_and_layouts
@settings(max_examples=120, deadline=None)
@given(st.data(), st.integers(1, 5))
def test_tokens_are_weighed_as_in_float64(variant, layout, data, threads):
    batch = data.draw(batches(layout, windows=None))
    kernel = kernel_of(variant)
    with_threads(threads)
    group = batch.query.shape[1] // batch.keys.shape[2]
    del batch.options["value_scale"]
    for request, (context, length) in enumerate(zip(batch.context_lens, batch.query_lens, strict=True)):
        part = slice(*batch.starts[request : request + 2].tolist())
        weights = kernel.over(batch.cache, layout).weigh_tokens(
            batch.query[part],
            pages=batch.block_table[request],
            context_len=context,
            **batch.options,
        )
        if not length:
            assert weights.shape == (batch.keys.shape[2], context) and not weights.any()
            continue
        is_seen = torch.arange(context) <= torch.arange(context - length, context).unsqueeze(1)
        keys = batch.keys[request, :context].double().repeat_interleave(group, 1)
        # Of values that are 1 for one token each: its weights. [num_queries, num_heads, context].
        ones = torch.eye(context).unsqueeze(1).expand(-1, keys.shape[1], -1)
        of_queries, _ = truth(batch.query[part], keys, ones, is_seen, **batch.options)
        expected = of_queries.unflatten(1, (-1, group)).sum((0, 2))
        bound = (2e-6 + 4e-7 * batch.options["soft_cap"]) * max(1, length * group)
        torch.testing.assert_close(weights.double(), expected, rtol=0, atol=bound)


@variants_and_layouts
def test_tokens_of_a_long_context_are_weighed_in_several_turns(variant, layout):
    """128 rows over 20,000 tokens are more logits than a thread keeps."""
    torch.manual_seed(0)
    query_len, group, head_size, page_size, context = 32, 4, 32, 32, 20_000
    dtype = torch.bfloat16 if layout == "amx" else torch.float32
    pages = -(-context // page_size)
    keys = torch.randn(context, 1, head_size).to(dtype)
    cache = torch.zeros(pages, 1, page_size, 2 * head_size, dtype=dtype)
    positions = torch.arange(context)
    write(cache, layout, positions // page_size, positions % page_size, keys, keys)
    query = 3 * torch.randn(query_len, group, head_size).to(dtype)
    weights = (
        kernel_of(variant)
        .over(cache, layout)
        .weigh_tokens(query, pages=torch.arange(pages), context_len=context, scale=head_size**-0.5)
    )
    logits = torch.einsum("qhd,kd->qhk", query.double(), keys[:, 0].double()) * head_size**-0.5
    is_seen = positions <= torch.arange(context - query_len, context).unsqueeze(1)
    expected = logits.masked_fill(~is_seen.unsqueeze(1), -torch.inf).softmax(-1).sum((0, 1))
    bound = (2e-6 + 2e-10 * context) * query_len * group
    torch.testing.assert_close(weights[0].double(), expected, rtol=0, atol=bound)


class Copied:
    """Pages of their own for the first tokens of some requests' lists; what none has is NaN."""

    def __init__(self, batch: Batch, layout: str, counts: list[int]) -> None:
        _, num_kv_heads, page_size, content = batch.cache.shape
        pages_each = max(1, *(-(-count // page_size) for count in counts)) if counts else 1
        shape = (len(counts) * pages_each + 1, num_kv_heads, page_size, content)
        self.copies = LayerCopies(
            torch.full(shape, torch.nan).to(batch.cache.dtype),
            firsts=(torch.randperm(len(counts)) * pages_each + 1).int(),
            counts=torch.tensor(counts, dtype=torch.int32),
        )
        self._batch, self._layout = batch, layout

    def take(self, request: int, chosen: torch.Tensor) -> None:
        """`chosen` [num_kv_heads, n] int64, positions of the request."""
        page_size = self.copies.pages.shape[2]
        chosen = chosen[:, : int(self.copies.counts[request])]
        heads, places = torch.arange(len(chosen)), torch.arange(chosen.shape[1])
        dtype = self.copies.pages.dtype
        bits = self.copies.pages.view(torch.uint8) if dtype in FP8 else self.copies.pages
        write(
            bits,
            self._layout,
            self.copies.firsts[request].long() + places // page_size,
            places % page_size,
            *(
                half[request].view(bits.dtype)[chosen.T, heads]
                for half in (self._batch.keys, self._batch.values)
            ),
        )


@variants_and_layouts
@settings(max_examples=160, deadline=None)
@given(
    st.data(),
    st.integers(1, 5),
    st.sampled_from(["in order", "runs", "as it comes"]),
    st.booleans(),
    st.booleans(),
)
def test_chosen_tokens_are_attended_to_as_in_float64(
    variant, layout, data, threads, order, sees_all, are_copied
):
    batch = data.draw(batches(layout, max_query_len=12, windows=()))
    kernel = kernel_of(variant)
    with_threads(threads)
    num_reqs, _, num_kv_heads, _ = batch.keys.shape
    group = batch.query.shape[1] // num_kv_heads
    lens = [int(torch.randint(1, context + 1, ())) if context else 0 for context in batch.context_lens]
    width = max(1, *lens) + 2 if lens else 1
    slots = torch.full((num_reqs, num_kv_heads, width), GARBAGE, dtype=torch.int32)
    is_seen = torch.rand(num_reqs, max(1, *batch.query_lens, 1), width) < 0.7
    is_seen[..., 0] = True
    copied = Copied(
        batch, layout, [int(torch.randint(0, count + 1, ())) if are_copied else 0 for count in lens]
    )
    expected = []
    for request, (context, count) in enumerate(zip(batch.context_lens, lens, strict=True)):
        positions = torch.zeros(num_kv_heads, count, dtype=torch.int64)
        part = slice(*batch.starts[request : request + 2].tolist())
        for head in range(num_kv_heads):
            chosen = torch.randperm(context)[:count]
            if order != "as it comes":
                chosen = chosen.sort().values
            if order == "runs":  # as sinks and a window are, of which whole blocks are read in place
                first = int(torch.randint(0, context - count + 1, ())) // 32 * 32
                chosen = torch.arange(first, first + count)
            positions[head] = chosen
            slots[request, head, :count] = batch.slots_of(request, chosen)
            slots[request, head, : copied.copies.counts[request]] = GARBAGE
            heads = slice(head * group, (head + 1) * group)
            if not batch.query_lens[request]:
                continue
            seen = is_seen[request, : batch.query_lens[request], :count]
            options = dict(batch.options)
            if options["sinks"] is not None:
                options["sinks"] = options["sinks"][heads]
            keys, values = (
                half[request].double()[chosen, head].unsqueeze(1).expand(-1, group, -1)
                for half in (batch.keys, batch.values)
            )
            seen = torch.ones_like(seen) if sees_all else seen
            expected.append((part, heads, *truth(batch.query[part, heads], keys, values, seen, **options)))
        copied.take(request, positions)
    output = torch.full(batch.query.shape, torch.nan).to(batch.query.dtype)
    kernel.over(batch.cache, layout).attend_slots(
        batch.query,
        output,
        query_starts=batch.starts,
        slots=slots,
        slot_lens=torch.tensor(lens, dtype=torch.int32),
        is_seen=None if sees_all else is_seen,
        copies=copied.copies if are_copied else None,
        **batch.options,
    )
    for part, heads, result, size in expected:
        check(output[part, heads], result, size, batch.options["soft_cap"])


def shared_batch(
    dtype: torch.dtype,
    *,
    cache=None,
    page=32,
    num_reqs=3,
    context=700,
    query_len=5,
    heads=(8, 2),
    head_size=64,
):
    """Equal requests: query, cache of that or another dtype, block table, lengths."""
    torch.manual_seed(1)
    num_heads, num_kv_heads = heads
    pages = -(-context // page)
    cache = torch.randn(num_reqs * pages, num_kv_heads, page, 2 * head_size).to(cache or dtype)
    table = torch.randperm(num_reqs * pages).view(num_reqs, pages).int()
    query = torch.randn(num_reqs * query_len, num_heads, head_size).to(dtype)
    starts = torch.arange(0, num_reqs * query_len + 1, query_len, dtype=torch.int32)
    lens = torch.full((num_reqs,), context, dtype=torch.int32)
    return (
        query,
        cache,
        dict(
            layout="vec", query_starts=starts, block_table=table, context_lens=lens, scale=head_size**-0.5
        ),
    )


@variants
@pytest.mark.parametrize("threads", [2, 3, 7, 16])
def test_threads_change_no_more_than_the_order_of_sums(variant, threads):
    kernel = kernel_of(variant)
    query, cache, where = shared_batch(torch.float32)
    alone, together = torch.empty_like(query), torch.empty_like(query)
    with_threads(1)
    attend_pages(kernel, query, cache, alone, **where)
    with_threads(threads)
    attend_pages(kernel, query, cache, together, **where)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


@variants_and_layouts
@pytest.mark.parametrize("window", [-1, 1, 33, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [None, *FP8])
@pytest.mark.parametrize("page", [32, 64])
def test_it_agrees_with_vllms_kernel(variant, layout, window, dtype, fp8, page):
    """The meaning of a window, of a soft cap, of scales and of sinks, and the layout, are vLLM's."""
    if not current_platform.is_cpu() or not kernel_libraries.best():
        pytest.skip("needs vLLM's kernels for x86 CPUs")
    if fp8 and kernel_libraries.best() == "avx2":
        pytest.skip("vLLM's CPU attention has fp8 caches with AVX-512 only")
    if layout == "amx" and (dtype != torch.bfloat16 or kernel_libraries.best() != "avx512_bf16"):
        pytest.skip("vLLM has it for models in bfloat16, in one of its libraries")
    kernel = kernel_of(variant)
    current_platform.import_kernels()
    import vllm._custom_ops as ops

    query, cache, where = shared_batch(dtype, cache=fp8, page=page)
    num_blocks, num_kv_heads, page_size, content = cache.shape
    key_scale, value_scale = (0.7, 1.3) if fp8 else (1.0, 1.0)
    name = {None: "auto", torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}[fp8]
    ours, theirs = torch.empty_like(query), torch.empty_like(query)
    sinks = torch.randn(query.shape[1])
    common = dict(
        query_start_loc=where["query_starts"],
        seq_lens=where["context_lens"],
        causal=True,
        kv_cache_dtype=name,
    )
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(where["context_lens"]),
        num_heads=query.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=query.shape[2],
        dtype=dtype,
        sliding_window_size=window,
        isa=layout,
        enable_kv_split=True,
        **common,
    )
    stored = cache.view(torch.uint8) if fp8 else cache
    keys, values = stored.view(num_blocks, num_kv_heads, 2 * page_size, content // 2).chunk(2, dim=2)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=theirs,
        scale=where["scale"],
        alibi_slopes=None,
        sliding_window=window,
        block_table=where["block_table"],
        softcap=SOFT_CAP,
        scheduler_metadata=plan,
        s_aux=sinks,
        k_scale=key_scale,
        v_scale=value_scale,
        **common,
    )
    where |= dict(layout=layout, scale=where["scale"] * key_scale)
    options = dict(window=window, soft_cap=SOFT_CAP, sinks=sinks, value_scale=value_scale)
    attend_pages(kernel, query, cache, ours, **options, **where)
    # Of both kernels' errors, of which a capped logit's is the larger one; see `check`.
    tolerance = {torch.float32: 2e-6 + 2e-7 * SOFT_CAP, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())


@variants_and_layouts
def test_it_agrees_with_plain_torch_over_token_views(variant, layout):
    kernel = kernel_of(variant)
    query, cache, where = shared_batch(torch.bfloat16, query_len=1)
    num_slots = cache.shape[0] * cache.shape[2]
    slots = torch.stack([torch.randperm(num_slots)[:100] for _ in range(3 * 2)]).view(3, 2, 100).int()
    output = torch.empty_like(query)
    lens = torch.full((3,), 100, dtype=torch.int32)
    kernel.over(cache, layout).attend_slots(
        query,
        output,
        query_starts=where["query_starts"],
        slots=slots,
        slot_lens=lens,
        scale=0.125,
    )
    rows = KVRows.of(cache, "CPU_ATTN", layout)
    expected = attend_where(
        query.unsqueeze(1), rows, slots, torch.ones(3, 1, 100, dtype=torch.bool), scale=0.125
    )
    torch.testing.assert_close(output, expected.squeeze(1), rtol=2**-7, atol=2**-8)


@variants_and_layouts
@pytest.mark.parametrize("soft_cap", [0.0, 20.0])
@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(variant, layout, what, soft_cap):
    """Else a broken cache would be answered as if it were a sound one."""
    if soft_cap and what == torch.inf:
        pytest.skip("a cap makes a number of it")
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


@pytest.mark.parametrize("most", [1, 32, 33])
def test_passes_of_more_tokens_are_left_to_torch(most):
    metadata = TokenPassMetadata(
        slots=torch.zeros(2, 1, 64, dtype=torch.int32),
        is_seen=torch.ones(2, most, 64, dtype=torch.bool),
        table=torch.arange(2 * most).view(2, most),
        cells=torch.arange(2 * most),
    )
    assert takes_view(metadata) == (most <= 32)


def test_layers_without_one_forward_are_left_alone():
    assert native_of(SimpleNamespace(forward_mha=None)) is None


@pytest.mark.parametrize("size", [None, 4])
def test_a_library_of_other_sources_is_not_called(monkeypatch, size):
    functions = {} if size is None else {"magicdec_call_end": lambda: size}
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(**functions))
    with pytest.raises(OSError, match="of other sources; run"):
        Kernel(VARIANTS[0])


@variants
def test_shapes_that_it_has_not_are_refused(variant):
    kernel = kernel_of(variant)
    query, cache, where = shared_batch(torch.float32, query_len=33)
    with pytest.raises(UnreadableError, match="at most 32 query tokens"):
        attend_pages(kernel, query, cache, torch.empty_like(query), **where)
    few = shared_batch(torch.float32)
    with pytest.raises(UnreadableError, match="neighbouring numbers"):
        attend_pages(kernel, few[0].mT.contiguous().mT, few[1], torch.empty_like(few[0]), **few[2])
    with pytest.raises(UnreadableError, match="neighbouring numbers"):
        kernel.over(few[1].mT.contiguous().mT, "vec")
    with pytest.raises(UnreadableError, match=r"queries are \[15, 8, 48\], .* of its cache 64"):
        attend_pages(kernel, few[0][..., :48], few[1], few[0][..., :48], **few[2])
    with pytest.raises(UnreadableError, match=r"the output \[15, 4, 64\]"):
        attend_pages(kernel, few[0], few[1], few[0][:, :4], **few[2])
    with pytest.raises(UnreadableError, match="float64"):
        attend_pages(kernel, query.double(), cache.double(), query.double(), **where)
    with pytest.raises(UnreadableError, match="queries are"):
        attend_pages(kernel, query.bfloat16(), cache, query.bfloat16(), **where)
    fp8 = cache.to(torch.float8_e4m3fn)
    with pytest.raises(UnreadableError, match="queries are"):
        attend_pages(kernel, query.double(), fp8, query.double(), **where)
    with pytest.raises(UnreadableError, match="queries are"):
        attend_pages(kernel, query.bfloat16(), fp8, torch.empty_like(query), **where)
    with pytest.raises(UnreadableError, match="not neon"):
        attend_pages(kernel, query, cache, query, **{**where, "layout": "neon"})
    where["layout"] = "amx"
    of_amx = (
        "bfloat16 and fp8, not torch.float32" if variant.name == "amx" else "own kernel for AMX was not"
    )
    with pytest.raises(UnreadableError, match=of_amx):
        attend_pages(kernel, query, cache, query, **where)
    if variant.name == "amx":
        with pytest.raises(UnreadableError, match="queries are"):
            attend_pages(kernel, query, fp8, query, **where)
        with pytest.raises(UnreadableError, match="multiple of 32"):
            few = shared_batch(torch.bfloat16, head_size=48)
            attend_pages(kernel, few[0], few[1], few[0], **{**few[2], "layout": "amx"})
    where["layout"] = "vec"
    with pytest.raises(UnreadableError, match="multiple of 16"):
        attend_pages(kernel, query[..., :24], cache[..., :48].contiguous(), query[..., :24], **where)
