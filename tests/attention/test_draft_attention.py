# SPDX-License-Identifier: Apache-2.0
"""Draft attention over token-granular views against dense attention masked to the same tokens.

Run as a program, this checks the Triton kernel in Triton's interpreter (see the test that does so).
"""

import itertools
import sys
import types
from dataclasses import dataclass, replace

import pytest
import torch
import triton_tools
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.kv_cache_layout import KVCacheLayout

from benchmarks.gpu import stand_in
from vllm_magicdec.attention import KVRows, attend, flashinfer_attention, plans, switch
from vllm_magicdec.attention.flashinfer_attention import Geometry
from vllm_magicdec.views.base import TokenView

# Largest error as a share of the largest result. bfloat16 rounds the result (2**-9) and, in kernels that
# use tensor cores, the softmax weights as well.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
GARBAGE = torch.tensor([-1, 2**31 - 1, -(2**31), 12345678], dtype=torch.int32)
NUM_LAYERS = 2
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A batch of views over one layer's cache."""

    keys: torch.Tensor  # [num_slots, num_kv_heads, head_size]
    values: torch.Tensor  # [num_slots, num_kv_heads, head_size]
    page_size: int
    query: torch.Tensor  # [num_reqs, num_heads, head_size]
    slots: torch.Tensor  # [num_reqs, num_kv_heads, budget] int32, garbage after `lens`
    lens: torch.Tensor  # [num_reqs] int32
    scale: float
    soft_cap: float

    def only_views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values with NaN wherever no view looks."""
        seen = torch.zeros(self.keys.shape[:2], dtype=torch.bool)
        for req, length in enumerate(self.lens):
            for head in range(self.keys.shape[1]):
                seen[self.slots[req, head, :length].long(), head] = True
        return tuple(t.masked_fill(~seen.unsqueeze(2), torch.nan) for t in (self.keys, self.values))

    def expected(self) -> torch.Tensor:
        """Dense attention over all slots with a mask, request by request and head by head, in float64."""
        num_reqs, num_heads, _ = self.query.shape
        group = num_heads // self.keys.shape[1]
        result = torch.empty(self.query.shape, dtype=torch.float64)
        for req in range(num_reqs):
            for head in range(num_heads):
                view = self.slots[req, head // group, : self.lens[req]].long()
                hidden = torch.ones(self.keys.shape[0], dtype=torch.bool)
                hidden[view] = False
                logits = self.keys[:, head // group].double() @ self.query[req, head].double() * self.scale
                if self.soft_cap:
                    logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
                weights = logits.masked_fill(hidden, -torch.inf).softmax(0)
                result[req, head] = weights @ self.values[:, head // group].double()
        return result

    def check(self, result: torch.Tensor) -> None:
        assert result.dtype == self.query.dtype and result.shape == self.query.shape
        expected = self.expected()
        error = (result.cpu().double() - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE[self.query.dtype], f"relative error {error:.2e}"


@st.composite
def cases(
    draw,
    *,
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    page_sizes=(1, 2, 16, 32, 48),
    head_sizes=(16, 32, 64, 80, 128),
    max_budget=150,
):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(dtypes))
    page_size = draw(st.sampled_from(page_sizes))
    head_size = draw(st.sampled_from(head_sizes))
    num_kv_heads = draw(st.integers(1, 3))
    group = draw(st.sampled_from([1, 2, 3, 4, 8]))
    num_slots = page_size * draw(st.integers(1, -(-160 // page_size)))
    lens = draw(st.lists(st.integers(1, min(num_slots, max_budget)), min_size=1, max_size=3))
    budget = max(lens) + draw(st.integers(0, 5))

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    slots = GARBAGE[torch.randint(len(GARBAGE), (len(lens), num_kv_heads, budget), generator=generator)]
    for req, length in enumerate(lens):
        for head in range(num_kv_heads):
            slots[req, head, :length] = torch.randperm(num_slots, generator=generator)[:length]
    return Case(
        keys=normal(num_slots, num_kv_heads, head_size),
        values=normal(num_slots, num_kv_heads, head_size),
        page_size=page_size,
        query=normal(len(lens), num_kv_heads * group, head_size),
        slots=slots,
        lens=torch.tensor(lens, dtype=torch.int32),
        scale=head_size**-0.5,
        soft_cap=draw(st.sampled_from([0.0, 0.5, 30.0])),
    )


def empty_cache(layout: KVCacheLayout, case: Case, *, device: str = "cpu", page_stride: int = 1):
    """One layer of a cache as vLLM allocates it for this layout.

    With `page_stride`, only every `page_stride`-th block belongs to this cache.
    Returns [num_blocks, num_kv_heads, page_size, 2 * head_size], full of NaN.
    """
    num_slots, num_kv_heads, head_size = case.keys.shape
    num_blocks = num_slots // case.page_size
    logical = (NUM_LAYERS, num_blocks * page_stride, num_kv_heads, case.page_size, 2 * head_size)
    order = layout.stride_order
    physical = torch.full([logical[dim] for dim in order], torch.nan, dtype=case.keys.dtype, device=device)
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
    options = dict(scale=case.scale, soft_cap=case.soft_cap, implementation=implementation)
    return attend(query, rows, slots, lens, **options)


layouts = st.sampled_from(KVCacheLayout)


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
    for fill in (flashinfer_attention.fill_page_indices, triton_indices.fill_page_indices):
        indices = flashinfer_attention.make_page_indices(num_reqs * num_kv_heads, budget, CPU)
        fill(indices, rows, case.slots, case.lens, indptr)
        written.append(indices[: indptr[-1]])
        assert torch.all(indices[indptr[-1] : -1] == 0)
    assert torch.equal(*written)


def test_triton_kernels_read_and_write_what_they_should_in_the_interpreter():
    triton_tools.run_interpreted(__file__)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_triton_compiles_for_hopper_without_one(dtype):
    pytest.importorskip("triton")
    from vllm_magicdec.attention.triton_attention import _decode_kernel

    constants = dict(
        PAGE_SIZE=16, GROUP=5, HEAD_SIZE=80, GROUP_PADDED=16, HEAD_PADDED=128, BLOCK=64, SOFT_CAP=True
    )
    arguments = dict.fromkeys(["query", "keys", "values", "output"], f"*{dtype}")
    arguments |= dict(slots="*i32", lens="*i32", scale="fp32", soft_cap="fp32")
    triton_tools.check_compiles_for_hopper(_decode_kernel, arguments, constants)


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


# The CPU backend's packed caches, written by vLLM's own kernel.


@pytest.fixture(scope="module")
def ops():
    if current_platform.get_cpu_architecture() != CpuArchEnum.X86 or not current_platform.is_cpu():
        pytest.skip("needs vLLM's kernels for x86 CPUs")
    pytest.importorskip("vllm._C")
    return pytest.importorskip("vllm._custom_ops")


def halves_of(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as the CPU backend hands them to its kernels."""
    num_blocks, num_kv_heads, page_size, _ = cache.shape
    return cache.view(num_blocks, num_kv_heads, 2 * page_size, -1).chunk(2, dim=2)


def write_packed(ops, case: Case, isa: str, tokens: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Write the tokens in a random order."""
    cache = empty_cache(KVCacheLayout.LBHNC, case)
    order = torch.randperm(case.keys.shape[0])
    ops.cpu_attn_reshape_and_cache(
        *(half[order].contiguous() for half in tokens),
        *halves_of(cache),
        order,
        isa,
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype="auto",
    )
    return cache


packed_cases = {
    # float16 and float32 are never packed for AMX by vLLM, but its kernel can.
    "vec": cases(page_sizes=(32, 64, 128), head_sizes=(32, 64, 128)),
    "vec16": cases(page_sizes=(16, 48), head_sizes=(32, 64, 80, 112)),
    "amx": cases(page_sizes=(32, 64, 96), head_sizes=(32, 64, 80, 128)),
}


@pytest.mark.parametrize("isa", packed_cases)
def test_packed_caches_read_back_as_written(ops, isa):
    @settings(max_examples=25, deadline=None)
    @given(packed_cases[isa])
    def check(case):
        num_slots, num_kv_heads, _ = case.keys.shape
        cache = write_packed(ops, case, isa, (case.keys, case.values))
        rows = KVRows.of(cache, "CPU_ATTN", isa)
        everywhere = torch.arange(num_slots).expand(num_kv_heads, num_slots)
        for read, written in zip(rows.gather(everywhere), (case.keys, case.values), strict=True):
            assert torch.equal(read, written.transpose(0, 1))
        for table in (rows.keys, rows.values):
            assert table.rows.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()

    check()


@pytest.mark.parametrize("isa", packed_cases)
def test_torch_attends_to_views_of_packed_caches(ops, isa):
    @settings(max_examples=25, deadline=None)
    @given(packed_cases[isa])
    def check(case):
        rows = KVRows.of(write_packed(ops, case, isa, case.only_views()), "CPU_ATTN", isa)
        case.check(run(case, rows, "torch"))

    check()


@pytest.mark.parametrize("isa", ["vec", "vec16"])  # the AMX kernel needs an AMX machine
def test_a_view_of_everything_is_what_vllm_computes_on_a_cpu(ops, isa):
    # Only rows of whole pages can be compared: the kernel reads them by block table.
    @settings(max_examples=25, deadline=None)
    @given(packed_cases[isa])
    def check(case):
        num_slots, num_kv_heads, head_size = case.keys.shape
        num_blocks, num_heads = num_slots // case.page_size, case.query.shape[1]
        case = replace(case, query=case.query[:1], lens=torch.tensor([num_slots], dtype=torch.int32))
        blocks = torch.randperm(num_blocks)
        slots = blocks.unsqueeze(1) * case.page_size + torch.arange(case.page_size)
        case = replace(case, slots=slots.flatten().int().expand(1, num_kv_heads, num_slots))
        cache = write_packed(ops, case, isa, (case.keys, case.values))
        starts = torch.tensor([0, 1], dtype=torch.int32)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_size,
            seq_lens=case.lens,
            dtype=case.query.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=False,
        )
        output = torch.empty_like(case.query)
        key_cache, value_cache = halves_of(cache)
        ops.cpu_attention_with_kv_cache(
            query=case.query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=output,
            query_start_loc=starts,
            seq_lens=case.lens,
            scale=case.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=blocks.int().unsqueeze(0),
            softcap=case.soft_cap,
            scheduler_metadata=plan,
            s_aux=None,
        )
        ours = run(case, KVRows.of(cache, "CPU_ATTN", isa), "torch")
        assert (ours - output).abs().max() <= 2 * TOLERANCE[output.dtype] * ours.abs().max()

    check()


# FlashInfer, whose part is played by a stand-in that reads what it is told to read.


@pytest.fixture(scope="module")
def flashinfer_stand_in():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", stand_in.module())
        for reader in (flashinfer_attention, plans):
            patch.setattr(reader, "WORKSPACE_BYTES", 1)
        yield


@settings(max_examples=60, deadline=None)
@given(cases(), layouts, st.integers(1, 2))
def test_flashinfer_is_told_to_read_the_view_and_nothing_else(
    flashinfer_stand_in, case, layout, page_stride
):
    rows = KVRows.of(filled_cache(layout, case, page_stride=page_stride), "FLASHINFER")
    case.check(run(case, rows, "flashinfer"))


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


@settings(max_examples=30, deadline=None)
@given(st.data(), layouts, st.booleans())
def test_flashinfer_serves_all_layers_and_new_lengths_with_one_wrapper(
    flashinfer_stand_in, data, layout, cuda_graph
):
    first = data.draw(cases())
    num_reqs, num_kv_heads, budget = first.slots.shape
    decode = flashinfer_attention.FlashInferDecode(
        geometry_of(first),
        num_reqs=num_reqs,
        workspace=torch.zeros(1, dtype=torch.uint8),
        indices=flashinfer_attention.make_page_indices(num_reqs * num_kv_heads, budget, CPU),
        cuda_graph=cuda_graph,
    )
    shorter = torch.minimum(first.lens, torch.tensor(data.draw(st.integers(1, budget)), dtype=torch.int32))
    for lens in (first.lens, shorter):
        decode.plan(lens)
        for layer in range(2):
            # Each layer has its own cache and its own views of the same lengths.
            case = replace(first, lens=lens, slots=first.slots.flip(1), keys=first.keys + layer)
            rows = KVRows.of(filled_cache(layout, case), "FLASHINFER")
            case.check(decode.run(case.query, rows, case.slots))


def filled(case: Case) -> Case:
    """The case with lists as long as their buffers."""
    num_slots = len(case.keys)
    order = torch.rand((*case.slots.shape[:2], num_slots), generator=torch.Generator().manual_seed(0))
    slots = order.argsort(-1)[..., : case.slots.shape[-1]].to(torch.int32)
    return replace(case, slots=slots, lens=torch.full_like(case.lens, slots.shape[-1]))


@settings(max_examples=30, deadline=None)
@given(st.data(), layouts, st.booleans())
def test_full_views_are_planned_when_their_number_changes(flashinfer_stand_in, data, layout, captured):
    drawn = filled(data.draw(cases()))
    width = drawn.slots.shape[-1]
    made = plans.CommonLengthPlans(geometry_of(drawn), max_num_reqs=len(drawn.lens), device=CPU)
    made.load_kernels()
    planned = []
    with pytest.MonkeyPatch.context() as patch:
        plan = flashinfer_attention.FlashInferDecode.plan
        patch.setattr(
            flashinfer_attention.FlashInferDecode,
            "plan",
            lambda decode, lens: planned.append((len(lens), lens.tolist()[0])) or plan(decode, lens),
        )
        # What was captured is planned at once and then for good.
        smaller, all_reqs = max(1, width - 1), len(drawn.lens)  # as of a smaller budget
        steps = [(1, smaller), (all_reqs, width), (1, width), (1, smaller), (all_reqs, width)]
        if captured:
            for num_reqs, length in steps:
                made.prepare_capture(num_reqs, length, length)
        expected = (
            list(dict.fromkeys(steps)) if captured else [step for step, _ in itertools.groupby(steps)]
        )
        for num_reqs, length in steps:
            case = replace(
                drawn,
                query=drawn.query[:num_reqs],
                slots=drawn.slots[:num_reqs, :, :length],
                lens=torch.full((num_reqs,), length, dtype=torch.int32),
            )
            for layer in range(NUM_LAYERS):
                own = replace(case, keys=case.keys + layer)
                rows = KVRows.of(filled_cache(layout, own), "FLASHINFER")
                own.check(made.decode(num_reqs, length, length).run(own.query, rows, own.slots))
    assert planned == expected


@pytest.mark.gpu
@settings(max_examples=10, deadline=None)
@given(cases(dtypes=(torch.bfloat16, torch.float16), head_sizes=(64, 128)), layouts)
def test_flashinfer_on_a_gpu(case, layout):
    pytest.importorskip("flashinfer")
    rows = KVRows.of(filled_cache(layout, case, device="cuda"), "FLASHINFER")
    case.check(run(case, rows, "flashinfer", "cuda"))


# What is refused, and the sentence that says so.


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("cache", "backend", "isa", "sentence"),
    [
        (zeros(2, 1, 32, 64), "CPU_ATTN", "neon", "packs keys for neon; they know vec, vec16, amx"),
        (zeros(2, 1, 32, 64), "CPU_ATTN", None, "packs keys for None"),
        (
            zeros(2, 1, 32, 64),
            "FLEX_ATTENTION",
            None,
            "KV cache of attention backend FLEX_ATTENTION; use one",
        ),
        (
            zeros(2, 1, 32, 64, dtype=torch.uint8),
            "FLASH_ATTN",
            None,
            "not torch.uint8; use --kv-cache-dtype",
        ),
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
    rows = KVRows.of(zeros(2, 1, 32, 128), "CPU_ATTN", "amx")
    slots = torch.zeros((1, 1, 1), dtype=torch.int32)
    with pytest.raises(ValueError, match="reads no packed KV cache; use the torch one"):
        attend(zeros(1, 1, 64), rows, slots, slots[0, 0] + 1, scale=1.0, implementation="triton")


# Which of them reads the token views of an engine.


def layer_of(case: Case, cache: torch.Tensor) -> types.SimpleNamespace:
    """As much of vLLM's attention layer as a `Switch` looks at."""
    _, num_kv_heads, page_size, _ = cache.shape
    spec = types.SimpleNamespace(
        num_kv_heads=num_kv_heads,
        head_size=case.query.shape[2],
        block_size=page_size,
        dtype=cache.dtype,
    )
    return types.SimpleNamespace(
        impl=types.SimpleNamespace(
            forward=None, num_heads=case.query.shape[1], scale=case.scale, logits_soft_cap=case.soft_cap
        ),
        attn_backend=types.SimpleNamespace(get_name=lambda: "FLASH_ATTN"),
        get_kv_cache_spec=lambda config: spec,
    )


def small_case() -> Case:
    """One request that sees three tokens."""
    num_slots, head_size = 8, 64
    return Case(
        keys=torch.randn(num_slots, 1, head_size).bfloat16(),
        values=torch.randn(num_slots, 1, head_size).bfloat16(),
        page_size=4,
        query=torch.randn(1, 2, head_size).bfloat16(),
        slots=torch.tensor([[[6, 1, 3]]], dtype=torch.int32),
        lens=torch.tensor([3], dtype=torch.int32),
        scale=0.125,
        soft_cap=0.0,
    )


def draft(layer: types.SimpleNamespace, case: Case, cache: torch.Tensor) -> torch.Tensor:
    """One layer's part of a draft step, the way vLLM calls it, padded by a token."""
    query = torch.cat([case.query, case.query[:1]])
    lens = case.lens.tolist()
    common_len = lens[0] if len(set(lens)) == 1 else None
    view = TokenView(lens=case.lens, slots=case.slots.unsqueeze(0), common_len=common_len)
    output = torch.full_like(query.flatten(1), torch.nan)
    metadata = switch.token_metadata(["layer"], view)["layer"]
    layer.impl.forward(layer, query, None, None, cache, metadata, output)
    return output[: len(case.query)].view_as(case.query)


def engine_config(case: Case) -> types.SimpleNamespace:
    return types.SimpleNamespace(model_config=types.SimpleNamespace(dtype=case.query.dtype))


@settings(max_examples=20, deadline=None)
@given(cases(dtypes=(torch.bfloat16,), head_sizes=(64, 128)))
def test_the_switch_reads_token_views_with_flashinfer(flashinfer_stand_in, case):
    cache = filled_cache(KVCacheLayout.LBNHC, case)
    layer = layer_of(case, cache)
    installed = switch.Switch(0, layer, engine_config(case), CPU, None)
    full = filled(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(switch, "has_flashinfer", lambda: True)
        installed.plans = switch.plan_with_flashinfer(installed.geometry, 4, CPU)
        case.check(draft(layer, case, cache))
        patch.setattr(switch, "attend", None)  # nobody else reads full ones
        full.check(draft(layer, full, filled_cache(KVCacheLayout.LBNHC, full)))


def test_a_layer_is_switched_once(flashinfer_stand_in):
    """vLLM lays out a small KV cache to measure memory, and then the real one."""
    case = small_case()
    cache = filled_cache(KVCacheLayout.LBNHC, case)
    layer = layer_of(case, cache)
    own = layer.impl.forward = lambda *args, **kwargs: "the layer's own"
    for _ in range(2):
        switch.Switch(0, layer, engine_config(case), CPU, None)
    assert layer.impl.forward.__self__._target_forward is own


def reason_logged(monkeypatch, geometry: Geometry) -> str:
    logged = []
    monkeypatch.setattr(switch.logger, "warning_once", lambda line, *args: logged.append(line % args))
    assert switch.plan_with_flashinfer(geometry, 4, CPU) is None
    (line,) = logged
    return line


GEOMETRY = Geometry(8, 2, 128, torch.bfloat16, torch.bfloat16, scale=1.0)


@pytest.mark.parametrize(
    ("geometry", "sentence"),
    [
        (replace(GEOMETRY, head_size=80), "it has no kernel for heads of 80"),
        (
            replace(GEOMETRY, query_dtype=torch.float32, cache_dtype=torch.float32),
            "it has no kernel for torch.float32 queries and a torch.float32 cache",
        ),
        (replace(GEOMETRY, query_dtype=torch.float16), "torch.float16 queries and a torch.bfloat16 cache"),
    ],
)
def test_shapes_without_a_flashinfer_kernel_go_to_triton(
    flashinfer_stand_in, monkeypatch, geometry, sentence
):
    monkeypatch.setattr(switch, "has_flashinfer", lambda: True)
    line = reason_logged(monkeypatch, geometry)
    assert line.startswith("magicdec-self: Triton reads the token views, not FlashInfer: ")
    assert sentence in line


def test_without_flashinfer_token_views_go_to_triton(monkeypatch):
    monkeypatch.setattr(switch, "has_flashinfer", lambda: False)
    assert "it is not installed" in reason_logged(monkeypatch, GEOMETRY)


def test_kernels_that_do_not_load_go_to_triton(flashinfer_stand_in, monkeypatch):
    def fail(self, lens_cpu):
        raise RuntimeError("ninja exited with 1")

    monkeypatch.setattr(switch, "has_flashinfer", lambda: True)
    monkeypatch.setattr(flashinfer_attention.FlashInferDecode, "plan", fail)
    assert "its kernels do not load: ninja exited with 1" in reason_logged(monkeypatch, GEOMETRY)


def test_a_cache_that_flashinfer_cannot_read_goes_to_the_fallback(flashinfer_stand_in, monkeypatch):
    logged = []
    monkeypatch.setattr(switch.logger, "warning_once", lambda line, *args: logged.append(line % args))
    case = small_case()
    # Tokens are 130 elements apart, which is no multiple of 16 bytes.
    cache = torch.nn.functional.pad(filled_cache(KVCacheLayout.LBNHC, case), (0, 2))[..., :-2]
    layer = layer_of(case, cache)
    installed = switch.Switch(0, layer, engine_config(case), CPU, None)
    installed.plans = plans.CommonLengthPlans(installed.geometry, max_num_reqs=1, device=CPU)
    for _ in range(2):
        case.check(draft(layer, case, cache))
    (line,) = logged
    assert "rows are not aligned to 16 bytes" in line and installed.plans is None


def test_an_unknown_implementation_is_refused():
    rows = KVRows.of(zeros(2, 1, 32, 128), "FLASH_ATTN")
    slots = torch.zeros((1, 1, 1), dtype=torch.int32)
    with pytest.raises(
        ValueError, match="unknown draft attention 'eager'; use torch, triton or flashinfer"
    ):
        attend(zeros(1, 1, 64), rows, slots, slots[0, 0] + 1, scale=1.0, implementation="eager")


if __name__ == "__main__":
    check_triton()
    check_triton_indices()
