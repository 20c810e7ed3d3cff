# SPDX-License-Identifier: Apache-2.0
"""Views over one layer's cache in each of vLLM's layouts, and dense attention masked to the same tokens."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace

import flashinfer_stand_in as stand_in
import pytest
import torch
from flashinfer_once import attend_with_flashinfer
from hypothesis import strategies as st
from reference import dense_attention
from vllm.v1.kv_cache_interface import get_kv_quant_mode
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.flashinfer_attention import Geometry
from vllm_magicdec.attention.rows import FP8_DTYPES
from vllm_magicdec.attention.softmax import Softmax

# Largest error as a share of the largest result that there were if no two values cancelled. bfloat16 rounds
# the result (2**-9) and, in kernels that use tensor cores, the softmax weights as well.
# Triton's interpreter cuts bfloat16 where devices round it: weights, products and results by 2^-8 each.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-6}
GARBAGE = torch.tensor([-1, 2**31 - 1, -(2**31), 12345678], dtype=torch.int32)
NUM_LAYERS = 2
CPU = torch.device("cpu")

layouts = st.sampled_from(KVCacheLayout)


@dataclass(frozen=True)
class Case:
    keys: torch.Tensor  # [num_slots, num_kv_heads, head_size], as they are stored
    values: torch.Tensor  # [num_slots, num_kv_heads, head_size], as they are stored
    page_size: int
    query: torch.Tensor  # [num_reqs, num_heads, head_size]
    slots: torch.Tensor  # [num_reqs, num_kv_heads, budget] int32, garbage after `lens`
    lens: torch.Tensor  # [num_reqs] int32
    scale: float
    soft_cap: float
    sinks: torch.Tensor | None = None  # [num_heads]
    key_scale: float | torch.Tensor = 1.0  # or [num_kv_heads, 1]
    value_scale: float | torch.Tensor = 1.0  # likewise

    def only_views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values with NaN wherever no view looks."""
        seen = torch.zeros(self.keys.shape[:2], dtype=torch.bool)
        for req, length in enumerate(self.lens):
            for head in range(self.keys.shape[1]):
                seen[self.slots[req, head, :length].long(), head] = True
        nan = torch.tensor(torch.nan)
        return tuple(
            torch.where(seen.unsqueeze(2), half.float(), nan).to(half.dtype)
            for half in (self.keys, self.values)
        )

    def expected(self) -> Iterator[tuple[torch.Tensor, float]]:
        """Dense attention over all slots with a mask, request by request; see `dense_attention`."""
        num_heads, num_slots = self.query.shape[1], len(self.keys)
        group = num_heads // self.keys.shape[1]
        scaled = self.keys.double() * self.key_scale, self.values.double() * self.value_scale
        keys, values = (half.repeat_interleave(group, 1) for half in scaled)
        options = {"scale": self.scale, "soft_cap": self.soft_cap, "sinks": self.sinks}
        for query, slots, length in zip(self.query, self.slots, self.lens, strict=True):
            is_seen = torch.zeros((num_heads, 1, num_slots), dtype=torch.bool)
            views = slots[:, :length].long().repeat_interleave(group, 0).unsqueeze(1)
            is_seen.scatter_(2, views, True)
            yield dense_attention(query.unsqueeze(0), keys, values, is_seen, **options)

    def check(self, result: torch.Tensor) -> None:
        assert result.dtype == self.query.dtype and result.shape == self.query.shape
        expected, sizes = zip(*self.expected(), strict=True)
        error = (result.cpu().double() - torch.cat(expected)).abs().max() / max(sizes)
        assert error <= TOLERANCE[self.query.dtype], f"relative error {error:.2e}"


@st.composite
def cases(
    draw,
    *,
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    page_sizes=(1, 2, 16, 32, 48),
    head_sizes=(16, 32, 64, 80, 128),
    max_budget=150,
    fp8=FP8_DTYPES,
):
    """Views over caches in the query's dtype, or in one of `fp8`."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(dtypes))
    page_size = draw(st.sampled_from(page_sizes))
    head_size = draw(st.sampled_from(head_sizes))
    num_kv_heads = draw(st.integers(1, 3))
    group = draw(st.sampled_from([1, 2, 3, 4, 8]))
    num_slots = page_size * draw(st.integers(1, -(-160 // page_size)))
    lens = draw(st.lists(st.integers(1, min(num_slots, max_budget)), min_size=1, max_size=3))
    budget = max(lens) + draw(st.integers(0, 5))

    cache_dtype = draw(st.sampled_from([dtype, *fp8]))
    scales = st.sampled_from([1.0, 0.037, 2.5]) if cache_dtype in fp8 else st.just(1.0)

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    slots = GARBAGE[torch.randint(len(GARBAGE), (len(lens), num_kv_heads, budget), generator=generator)]
    for req, length in enumerate(lens):
        for head in range(num_kv_heads):
            slots[req, head, :length] = torch.randperm(num_slots, generator=generator)[:length]
    return Case(
        keys=normal(num_slots, num_kv_heads, head_size, dtype=cache_dtype),
        values=normal(num_slots, num_kv_heads, head_size, dtype=cache_dtype),
        page_size=page_size,
        query=normal(len(lens), num_kv_heads * group, head_size),
        slots=slots,
        lens=torch.tensor(lens, dtype=torch.int32),
        scale=head_size**-0.5,
        soft_cap=draw(st.sampled_from([0.0, 0.5, 30.0])),
        sinks=3 * normal(num_kv_heads * group) if draw(st.booleans()) else None,
        key_scale=draw(scales),
        value_scale=draw(scales),
    )


def empty_cache(layout: KVCacheLayout, case: Case, *, device: str = "cpu", page_stride: int = 1):
    """NaN, [num_blocks, num_kv_heads, page_size, 2 * head_size]; `page_stride`: of the cache's blocks."""
    num_slots, num_kv_heads, head_size = case.keys.shape
    num_blocks = num_slots // case.page_size
    logical = (NUM_LAYERS, num_blocks * page_stride, num_kv_heads, case.page_size, 2 * head_size)
    order = layout.stride_order
    physical = torch.full([logical[dim] for dim in order], torch.nan, device=device).to(case.keys.dtype)
    return physical.permute([order.index(dim) for dim in range(5)])[1, ::page_stride]


def by_token(cache: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[num_slots, num_kv_heads, head_size] as [num_blocks, num_kv_heads, page_size, head_size]."""
    return tokens.to(cache.device).unflatten(0, (-1, cache.shape[2])).transpose(1, 2)


def filled_cache(layout: KVCacheLayout, case: Case, **where) -> torch.Tensor:
    cache = empty_cache(layout, case, **where)
    cache.copy_(torch.cat([by_token(cache, half) for half in case.only_views()], dim=-1))
    return cache


def run(case: Case, rows: KVRows, implementation: str, device: str = "cpu") -> torch.Tensor:
    query, slots, lens = (t.to(device) for t in (case.query, case.slots, case.lens))
    sinks = None if case.sinks is None else case.sinks.to(device)
    softmax = Softmax(case.scale * case.key_scale, case.soft_cap, sinks)
    if implementation == "flashinfer":
        options = {**vars(softmax), "value_scale": case.value_scale}
        return attend_with_flashinfer(query, rows, slots, lens, **options)
    module = import_module(f"vllm_magicdec.attention.{implementation}_attention")
    return module.attend(query, rows, slots, lens, softmax, case.value_scale)


def moved(case: Case, distance: float) -> Case:
    return replace(case, keys=(case.keys.float() + distance).to(case.keys.dtype))


def filled(case: Case) -> Case:
    """The case with lists as long as their buffers."""
    num_slots = len(case.keys)
    order = torch.rand((*case.slots.shape[:2], num_slots), generator=torch.Generator().manual_seed(0))
    slots = order.argsort(-1)[..., : case.slots.shape[-1]].to(torch.int32)
    return replace(case, slots=slots, lens=torch.full_like(case.lens, slots.shape[-1]))


def geometry_of(case: Case) -> Geometry:
    return Geometry(
        num_heads=case.query.shape[1],
        num_kv_heads=case.keys.shape[1],
        head_size=case.query.shape[2],
        query_dtype=case.query.dtype,
        cache_dtype=case.keys.dtype,
        scale=case.scale,
        soft_cap=case.soft_cap,
    )


def play_flashinfer() -> Iterator[None]:
    """A fixture: FlashInfer's part is played by a stand-in that reads what it is told to read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", stand_in.module())
        own = SimpleNamespace(fill_page_indices=fill_page_indices)
        patch.setitem(sys.modules, "vllm_magicdec.attention.triton_indices", own)
        yield


def fill_page_indices(indices, rows, slots, lens, indptr) -> None:
    """What the kernel of triton_indices.py does, in torch."""
    columns = torch.arange(slots.shape[-1])
    in_view = (columns < lens.view(-1, 1, 1)).expand(slots.shape)
    cells = indptr[:-1].view(*slots.shape[:2], 1) + columns
    indices[cells[in_view].long()] = rows.keys.numbers(slots)[in_view].to(indices.dtype)


CACHE_NAMES = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2"}


def as_vllm_keeps(cache: torch.Tensor) -> torch.Tensor:
    """An fp8 cache is a tensor of bytes."""
    return cache.view(torch.uint8) if cache.dtype in CACHE_NAMES else cache


def layer_of(
    case: Case,
    cache: torch.Tensor,
    backend: str = "FLASH_ATTN",
    *,
    impl: object | None = None,
    name: str | None = None,
    reads_scales_by_head: bool = True,
) -> SimpleNamespace:
    """As much of vLLM's attention layer as is looked at; `name` is that of the cache's dtype."""
    _, num_kv_heads, page_size, _ = cache.shape
    name = name or CACHE_NAMES.get(cache.dtype, "auto")
    spec = SimpleNamespace(
        num_kv_heads=num_kv_heads,
        head_size=case.query.shape[2],
        block_size=page_size,
        dtype=as_vllm_keeps(cache).dtype,
        kv_quant_mode=get_kv_quant_mode(name),
    )
    key_scale, value_scale = (torch.as_tensor(s).squeeze() for s in (case.key_scale, case.value_scale))
    impl = impl or SimpleNamespace(forward=None)
    own = {"num_heads": case.query.shape[1], "scale": case.scale, "logits_soft_cap": case.soft_cap}
    vars(impl).update(own, sinks=case.sinks)
    return SimpleNamespace(
        impl=impl,
        attn_backend=SimpleNamespace(
            get_name=lambda: backend, supports_per_head_quant_scales=lambda: reads_scales_by_head
        ),
        get_kv_cache_spec=lambda config: spec,
        kv_cache_dtype=name,
        query_quant=None,
        _k_scale=key_scale,
        _v_scale=value_scale,
        _k_scale_float=float(key_scale.max()),
        _v_scale_float=float(value_scale.max()),
    )
