# SPDX-License-Identifier: Apache-2.0
"""Requests over caches in vLLM's layouts, and in float64 what the native kernel makes of them."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st

from vllm_magicdec.native.library import VARIANTS, Kernel, load, runs_here

# Largest error as a share of the largest result that there were if no two values cancelled. A bfloat16
# result is rounded (2^-8), and with AVX512_BF16 the weights of values are as well.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11 + 4e-6}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
GARBAGE = 2**31 - 1

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
    """Put keys and values [n, num_kv_heads, head_size] into `places` of `pages`, [n] each."""
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


def check(output: torch.Tensor, expected: torch.Tensor, size: float, soft_cap: float) -> None:
    """tanh is right to 2e-7, so a capped logit to that times the cap, and its weight relatively."""
    error = (output.double() - expected).abs().max().item()
    assert error <= (BOUND[output.dtype] + 2e-7 * soft_cap) * size, f"{error / size:.2e} of {size:.3f}"


def attend_pages(kernel: Kernel, query, cache, output, *, layout: str, **where) -> None:
    kernel.over(cache, layout).attend_pages(query, output, **where)


@pytest.fixture(autouse=True)
def two_threads():
    """Two, where a test does not say: the suite's processes have one each."""
    number = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(number)


def shared_batch(dtype: torch.dtype, *, cache=None, page=32, query_len=5, head_size=64):
    """Equal requests: query, cache of that or another dtype, block table, lengths."""
    torch.manual_seed(1)
    num_reqs, context, num_heads, num_kv_heads = 3, 700, 8, 2
    pages = -(-context // page)
    cache = torch.randn(num_reqs * pages, num_kv_heads, page, 2 * head_size).to(cache or dtype)
    table = torch.randperm(num_reqs * pages).view(num_reqs, pages).int()
    query = torch.randn(num_reqs * query_len, num_heads, head_size).to(dtype)
    starts = torch.arange(0, num_reqs * query_len + 1, query_len, dtype=torch.int32)
    lens = torch.full((num_reqs,), context, dtype=torch.int32)
    where = dict(query_starts=starts, block_table=table, context_lens=lens)
    return query, cache, dict(layout="vec", scale=head_size**-0.5, **where)
