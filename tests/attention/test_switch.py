# SPDX-License-Identifier: Apache-2.0
"""Which draft attention reads the token views of an engine."""

import types
import weakref
from contextlib import nullcontext
from dataclasses import replace

import flashinfer_stand_in as stand_in
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from views_over_a_cache import (
    CACHE_NAMES,
    CPU,
    Case,
    as_vllm_keeps,
    cases,
    filled,
    filled_cache,
    layer_of,
    play_flashinfer,
)
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import get_kv_quant_mode
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_magicdec.attention import flashinfer_attention, plans, switch
from vllm_magicdec.attention.flashinfer_attention import Geometry
from vllm_magicdec.attention.metadata import ObservedMetadata, draft_metadata
from vllm_magicdec.errors import MagicDecConfigError
from vllm_magicdec.views.round import Queries, TokenMask, TokenView

flashinfer_stand_in = pytest.fixture(scope="module")(play_flashinfer)


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


def in_fp8(case: Case, dtype: torch.dtype = torch.float8_e4m3fn) -> Case:
    return replace(case, keys=case.keys.to(dtype), values=case.values.to(dtype))


def draft(
    layer: types.SimpleNamespace, case: Case, cache: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """One layer's part of a draft step. `dtype`: of the model, where queries are quantised."""
    lens = case.lens.tolist()
    common_len = lens[0] if len(set(lens)) == 1 else None
    view = TokenView(lens=case.lens, slots=case.slots.unsqueeze(0), common_len=common_len)
    return attend(layer, case.query, view, cache, dtype)


def attend(layer, tokens, view, cache, dtype=None) -> torch.Tensor:
    """The way vLLM calls it, padded by a token."""
    query = torch.cat([tokens, tokens[:1]])
    output = torch.full_like(query.flatten(1), torch.nan, dtype=dtype or query.dtype)
    metadata = draft_metadata(view, ["layer"], lambda pages: {})["layer"]
    layer.impl.forward(layer, query, None, None, as_vllm_keeps(cache), metadata, output)
    assert output[-1].isnan().all()
    return output[:-1].view_as(tokens)


SCALES = ("key_scale", "value_scale")


def make_plans(geometry: Geometry) -> plans.CommonLengthPlans | None:
    return switch.plan_with_flashinfer(geometry, max_num_reqs=4, max_graph_reqs=4, device=CPU)


def logged(monkeypatch, logger, level: str) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(logger, level, lambda line, *args: lines.append(line % args))
    return lines


def engine_config(case: Case) -> types.SimpleNamespace:
    return types.SimpleNamespace(model_config=types.SimpleNamespace(dtype=case.query.dtype))


@settings(max_examples=20, deadline=None)
@given(cases(dtypes=(torch.bfloat16,), head_sizes=(64, 128)))
def test_the_switch_reads_token_views_with_flashinfer(flashinfer_stand_in, case):
    cache = filled_cache(KVCacheLayout.LBNHC, case)
    layer = layer_of(case, cache, "FLASHINFER")
    installed = switch.Switch(0, layer, engine_config(case), CPU, None)
    assume(installed.geometry.refusal is None)
    full = filled(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(switch, "has_flashinfer", lambda: True)
        installed.plans = make_plans(installed.geometry)
        installed.plans.reserve(full.slots.shape[-1])
        case.check(draft(layer, case, cache))
        patch.setattr(switch.torch_attention, "attend", None)  # full views need no other attention
        full.check(draft(layer, full, filled_cache(KVCacheLayout.LBNHC, full)))


@settings(max_examples=40, deadline=None)
@given(cases(), st.booleans(), st.booleans(), st.booleans())
def test_the_switch_uses_a_layers_sinks_and_scales(case, quantises_queries, by_head, reads_by_head):
    """One scale for all heads or one per KV head; where backends read one for all, it is the greatest."""
    assert not CPUAttentionBackend.supports_per_head_quant_scales()
    dtype = case.query.dtype
    num_kv_heads = case.keys.shape[1]
    if case.keys.dtype in CACHE_NAMES and by_head:
        share = torch.linspace(1, 0.3, num_kv_heads).unsqueeze(1)
        case = replace(case, key_scale=case.key_scale * share, value_scale=case.value_scale * share.sqrt())
    cache = filled_cache(KVCacheLayout.LBNHC, case)
    layer = layer_of(case, cache, reads_scales_by_head=reads_by_head)
    if not reads_by_head:
        scales = {name: float(torch.as_tensor(getattr(case, name)).max()) for name in SCALES}
        case = replace(case, **scales)
    handed = case
    if case.keys.dtype in CACHE_NAMES and quantises_queries:
        layer.query_quant = "any"
        layer._q_scale = torch.full((num_kv_heads if by_head else 1,), 0.125)
        handed = replace(case, query=(case.query.float() / 0.125).to(torch.float8_e4m3fn))
        case = replace(case, query=(handed.query.float() * 0.125).to(dtype))
    switch.Switch(0, layer, engine_config(case), CPU, None)
    case.check(draft(layer, handed, cache, dtype))


@settings(max_examples=60, deadline=None)
@given(cases(), st.data())
def test_each_token_of_a_pass_attends_to_its_visible_slots(case, data):
    num_reqs, _, width = case.slots.shape
    lens = data.draw(st.lists(st.integers(1, 4), min_size=num_reqs, max_size=num_reqs))
    queries = Queries(np.arange(num_reqs), np.zeros(num_reqs, dtype=np.int64), np.array(lens))
    places = torch.from_numpy(queries.request_indices)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    in_list = torch.arange(width) < case.lens.unsqueeze(1)  # [num_reqs, width]
    is_seen = torch.rand((num_reqs, max(lens), width), generator=generator) < 0.5
    is_seen[..., 0] = True  # a token at least
    is_seen &= in_list.unsqueeze(1)
    tokens = torch.randn((len(places), *case.query.shape[1:]), generator=generator).to(case.query.dtype)
    table, cells = torch.from_numpy(queries.table), torch.from_numpy(queries.cells)
    slots = torch.where(in_list.unsqueeze(1), case.slots, case.slots[..., :1])
    full = torch.full((num_reqs,), width, dtype=torch.int32)
    view = TokenView(full, slots.unsqueeze(0), mask=TokenMask(is_seen, table, cells))
    cache = filled_cache(KVCacheLayout.LBNHC, case)
    layer = layer_of(case, cache)
    switch.Switch(0, layer, engine_config(case), CPU, None)
    output = attend(layer, tokens, view, cache)
    for query, own in enumerate(is_seen.flatten(0, 1)[cells]):
        place = int(places[query])
        alone = replace(
            case,
            query=tokens[query : query + 1],
            slots=case.slots[place : place + 1, :, own],
            lens=own.sum().reshape(1),
        )
        alone.check(output[query : query + 1])


def test_policies_get_the_targets_queries():
    """Queries and what brings them to the model's dtype, keys as stored, what makes weights of products."""
    sinks = torch.tensor([0.5, -1.0]).bfloat16()
    case = replace(in_fp8(small_case()), sinks=sinks, key_scale=0.5, soft_cap=7.0)
    cache = filled_cache(KVCacheLayout.LBNHC, case)
    layer = layer_of(case, cache)
    layer.query_quant, layer._q_scale = "any", torch.tensor(0.25)
    targets, seen = [], []
    layer.impl.forward = lambda layer, query, *args, **kwargs: targets.append(query)

    def record(index, query, scales, metadata, rows, softmax):
        assert metadata == "vLLM's" and query is quantised
        seen.append((index, scales.scale_query(query, case.query.dtype), rows, softmax))

    recorder = types.SimpleNamespace(record=record)
    switch.Switch(3, layer, engine_config(case), CPU, recorder)
    quantised = (case.query.float() / 0.25).to(torch.float8_e4m3fn)
    observed = ObservedMetadata("vLLM's", lambda *args: seen.append(args))
    for metadata in ("vLLM's", observed):
        layer.impl.forward(layer, quantised, None, None, as_vllm_keeps(cache), metadata, None)
    assert len(seen) == len(targets) == 2 and all(target is quantised for target in targets)
    for index, query, rows, softmax in seen:
        assert index == 3 and query.dtype == torch.bfloat16
        assert torch.equal(query.float(), quantised.float() * 0.25)
        assert torch.equal(rows.keys.gather(case.slots[0])[0], case.keys[case.slots[0, 0], 0].bfloat16())
        assert (softmax.scale, softmax.soft_cap) == (case.scale * 0.5, 7.0)
        assert torch.equal(softmax.sinks, case.sinks)


def test_a_second_switch_replaces_the_first(flashinfer_stand_in, monkeypatch):
    """vLLM lays out a small KV cache to measure memory, and then the real one."""
    case = small_case()
    small, real = (filled_cache(KVCacheLayout.LBNHC, case) for _ in range(2))
    layer = layer_of(case, small)
    own = layer.impl.forward = lambda *args, **kwargs: "the layer's own"
    monkeypatch.setattr(switch, "get_layers_from_vllm_config", lambda config, kind: {"layer": layer})
    switch.install_switches(engine_config(case), ["layer"], CPU)
    case.check(draft(layer, case, small))
    first = weakref.ref(layer.impl.forward.__self__)
    switch.install_switches(engine_config(case), ["layer"], CPU)
    case.check(draft(layer, case, real))
    assert layer.impl.forward.__self__._target_forward is own
    assert first() is None


def test_triton_reads_batch_sizes_that_flashinfer_cannot_plan(flashinfer_stand_in, monkeypatch):
    """The others keep their plans, and so their CUDA graphs."""
    monkeypatch.setattr(switch, "has_flashinfer", lambda: True)
    case = filled(replace(small_case(), lens=torch.tensor([3, 3], dtype=torch.int32)))
    case = replace(case, query=torch.randn(2, 8, 64).bfloat16(), slots=case.slots.expand(2, -1, -1))
    cache = filled_cache(KVCacheLayout.LBNHC, case)
    layer = layer_of(case, cache)
    installed = switch.Switch(0, layer, engine_config(case), CPU, None)
    installed.plans = make_plans(installed.geometry)
    installed.plans.reserve(3)
    plan = flashinfer_attention.FlashInferDecode.plan

    def plan_one_at_most(decode, lens):
        if len(lens) > 1:
            raise RuntimeError("Buffer overflow")
        plan(decode, lens)

    monkeypatch.setattr(flashinfer_attention.FlashInferDecode, "plan", plan_one_at_most)
    read, attend_to = [], switch.torch_attention.attend
    monkeypatch.setattr(
        switch.torch_attention, "attend", lambda *args: read.append(len(args[0])) or attend_to(*args)
    )
    warned = logged(monkeypatch, plans.logger, "warning")
    for num_reqs in (2, 1):
        installed.plans.prepare_capture(num_reqs, 3)
    for num_reqs in (1, 2, 1, 2):
        part = replace(
            case, query=case.query[:num_reqs], slots=case.slots[:num_reqs], lens=case.lens[:num_reqs]
        )
        part.check(draft(layer, part, cache))
    assert read == [2, 2]
    (line,) = warned
    assert line.startswith("FlashInfer cannot plan token views of 2 requests")


GEOMETRY = Geometry(8, 2, 128, torch.bfloat16, torch.bfloat16, scale=1.0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"head_size": 80}, "it has no kernel for heads of 80"),
        (
            {"query_dtype": torch.float32, "cache_dtype": torch.float32},
            "it has no kernel for torch.float32 queries and a torch.float32 cache",
        ),
        ({"query_dtype": torch.float16}, "torch.float16 queries and a torch.bfloat16 cache"),
        (
            {"head_size": 64, "cache_dtype": torch.float8_e4m3fn},
            "its kernels on tensor cores read no torch.float8_e4m3fn heads of 64",
        ),
        (None, "it is not installed"),
    ],
)
def test_shapes_without_a_flashinfer_kernel_go_to_triton(
    flashinfer_stand_in, monkeypatch, changes, sentence
):
    monkeypatch.setattr(switch, "has_flashinfer", lambda: changes is not None)
    warned = logged(monkeypatch, switch.logger, "warning_once")
    assert make_plans(replace(GEOMETRY, **(changes or {}))) is None
    (line,) = warned
    assert line.startswith("magicdec-self: FlashInfer unavailable (") and sentence in line


@pytest.mark.parametrize("part", ["plan", "run"])
def test_kernels_that_do_not_load_go_to_triton(flashinfer_stand_in, monkeypatch, part):
    """Some shapes FlashInfer refuses when it compiles or plans, others when it launches a kernel."""

    def fail(self, *args, **options):
        raise RuntimeError("Invalid configuration")

    monkeypatch.setattr(switch, "has_flashinfer", lambda: True)
    monkeypatch.setattr(stand_in.StandInWrapper, part, fail)
    warned = logged(monkeypatch, switch.logger, "warning_once")
    assert make_plans(GEOMETRY) is None
    assert "its kernels do not work: Invalid configuration" in warned[0]


def test_a_cache_that_flashinfer_cannot_read_goes_to_the_fallback(flashinfer_stand_in, monkeypatch):
    warned = logged(monkeypatch, switch.logger, "warning_once")
    case = small_case()
    # Tokens are 130 elements apart, which is no multiple of 16 bytes.
    cache = torch.nn.functional.pad(filled_cache(KVCacheLayout.LBNHC, case), (0, 2))[..., :-2]
    layer = layer_of(case, cache)
    installed = switch.Switch(0, layer, engine_config(case), CPU, None)
    installed.plans = plans.CommonLengthPlans(
        installed.geometry, max_num_reqs=1, max_graph_reqs=0, device=CPU
    )
    installed.plans.reserve(3)
    for _ in range(2):
        case.check(draft(layer, case, cache))
    (line,) = warned
    assert "rows are not aligned to 16 bytes" in line and installed.plans is None


# What is refused, and the sentence that says so.


def test_the_error_for_alibi_names_a_valid_policy():
    case = small_case()
    layer = layer_of(case, filled_cache(KVCacheLayout.LBNHC, case))
    layer.impl.alibi_slopes = torch.ones(2)
    with pytest.raises(MagicDecConfigError, match="ALiBi can draft with draft_kv_policy='streamingllm'"):
        switch.Switch(0, layer, engine_config(case), CPU, None)


@pytest.mark.parametrize(
    "name", ["fp8_per_token_head", "int8_per_token_head", "nvfp4", "turboquant_k8v4", "int4_per_token_head"]
)
def test_other_quantised_caches_are_refused(name):
    case = small_case()
    layer = layer_of(case, filled_cache(KVCacheLayout.LBNHC, case))
    spec = layer.get_kv_cache_spec(None)
    spec.dtype, spec.kv_quant_mode = STR_DTYPE_TO_TORCH_DTYPE[name], get_kv_quant_mode(name)
    layer.kv_cache_dtype = name
    with pytest.raises(MagicDecConfigError, match=f"not {spec.dtype} .*use --kv-cache-dtype fp8, or"):
        switch.Switch(0, layer, engine_config(case), CPU, None)


@pytest.mark.parametrize(
    ("dtype", "capability", "flash_reads_fp8", "options"),
    [
        (torch.bfloat16, 80, False, "--attention-backend FLASH_ATTN"),
        (torch.float8_e4m3fn, 100, True, "--attention-backend FLASH_ATTN --kv-cache-dtype fp8"),
        (torch.float8_e4m3fn, 89, False, "--attention-backend TRITON_ATTN --kv-cache-dtype fp8"),
        (torch.float8_e5m2, 120, False, "--attention-backend TRITON_ATTN --kv-cache-dtype fp8"),
        (torch.float8_e5m2, 86, False, "--kv-cache-dtype bfloat16 or float16, as the model's"),
    ],
)
def test_the_error_for_backends_without_block_tables_names_a_valid_one(
    monkeypatch, dtype, capability, flash_reads_fp8, options
):
    """vLLM gives FLASHINFER such caches where FLASH_ATTN does not take them."""
    monkeypatch.setattr(switch.current_platform, "has_device_capability", lambda least: least <= capability)
    monkeypatch.setattr(fa_utils, "flash_attn_supports_kv_cache_dtype", lambda: flash_reads_fp8)
    case = small_case() if dtype == torch.bfloat16 else in_fp8(small_case(), dtype)
    layer = layer_of(case, filled_cache(KVCacheLayout.LBNHC, case), "FLASHINFER")
    installed = switch.Switch(0, layer, engine_config(case), CPU, None)
    with pytest.raises(MagicDecConfigError, match=f"FLASHINFER; use {options}, or draft_kv_policy="):
        installed.require_block_tables()


def test_fp8_layers_of_unknown_backends_are_refused():
    """Some attention layers of vLLM have an fp8 cache, and no scales or quantised queries to speak of."""
    case = in_fp8(small_case())
    layer = layer_of(case, filled_cache(KVCacheLayout.LBNHC, case), "SPARSE_ATTN")
    for name in ("query_quant", "_k_scale", "_v_scale", "_k_scale_float", "_v_scale_float"):
        delattr(layer, name)
    with pytest.raises(MagicDecConfigError, match="attention backend SPARSE_ATTN; use one of"):
        switch.Switch(0, layer, engine_config(case), CPU, None)


@pytest.mark.parametrize(
    ("dtype", "is_old", "is_refused"),
    [
        (torch.float8_e4m3fn, True, True),
        (torch.float8_e4m3fn, False, False),
        (torch.float8_e5m2, True, False),
    ],
)
def test_the_error_for_gpus_without_e4m3_names_a_valid_dtype(monkeypatch, dtype, is_old, is_refused):
    case = in_fp8(small_case(), dtype)
    layer = layer_of(case, filled_cache(KVCacheLayout.LBNHC, case), "FLASHINFER")
    monkeypatch.setattr(
        switch.current_platform, "has_device_capability", lambda least: least <= (86 if is_old else 90)
    )
    refusal = pytest.raises(MagicDecConfigError, match=r"compute capability 8\.9 and newer; use --kv-cache")
    with refusal if is_refused else nullcontext():
        switch.Switch(0, layer, engine_config(case), torch.device("cuda"), None)
