# SPDX-License-Identifier: Apache-2.0
"""FlashInfer is told to read the view and nothing else; its part is played by a stand-in."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from views_over_a_cache import (
    CPU,
    NUM_LAYERS,
    Case,
    cases,
    filled,
    filled_cache,
    geometry_of,
    layouts,
    moved,
    play_flashinfer,
    run,
)

from vllm_magicdec.attention import KVRows, flashinfer_attention, plans
from vllm_magicdec.attention.flashinfer_attention import Geometry

flashinfer_stand_in = pytest.fixture(scope="module")(play_flashinfer)


# What layers may differ in beside their caches.
OTHERS = [{}, dict(key_scale=0.5, value_scale=3.0, sinks=None)]


def options_of(case: Case) -> dict[str, object]:
    return dict(sinks=case.sinks, key_scale=case.key_scale, value_scale=case.value_scale)


@settings(max_examples=60, deadline=None)
@given(st.data(), layouts, st.integers(1, 2), st.booleans())
def test_flashinfer_reads_the_views_of_all_layers_and_new_lengths_with_one_wrapper(
    flashinfer_stand_in, data, layout, page_stride, cuda_graph
):
    first = data.draw(cases())
    num_reqs, num_kv_heads, budget = first.slots.shape
    decode = flashinfer_attention.FlashInferDecode(
        geometry_of(first),
        num_reqs=num_reqs,
        workspace=flashinfer_attention.make_workspace(geometry_of(first), num_reqs, CPU),
        indices=flashinfer_attention.make_page_indices(num_reqs * num_kv_heads, budget, CPU),
        cuda_graph=cuda_graph,
    )
    shorter = torch.minimum(first.lens, torch.tensor(data.draw(st.integers(1, budget)), dtype=torch.int32))
    for lens in (first.lens, shorter):
        decode.plan(lens)
        for layer in range(2):
            # Each layer has its own cache and its own views of the same lengths.
            case = replace(moved(first, layer), lens=lens, slots=first.slots.flip(1), **OTHERS[layer])
            rows = KVRows.of(filled_cache(layout, case, page_stride=page_stride), "FLASHINFER")
            case.check(decode.run(case.query, rows, case.slots, **options_of(case)))


@settings(max_examples=30, deadline=None)
@given(st.data(), layouts, st.booleans())
def test_full_views_are_planned_once_for_every_number_of_them(flashinfer_stand_in, data, layout, captured):
    drawn = filled(data.draw(cases()))
    width = drawn.slots.shape[-1]
    made = plans.CommonLengthPlans(
        geometry_of(drawn), max_num_reqs=len(drawn.lens), max_graph_reqs=len(drawn.lens), device=CPU
    )
    made.load_kernels()
    made.reserve(width)
    planned = []
    with pytest.MonkeyPatch.context() as patch:
        plan = flashinfer_attention.FlashInferDecode.plan
        patch.setattr(
            flashinfer_attention.FlashInferDecode,
            "plan",
            lambda decode, lens: planned.append((len(lens), lens.tolist()[0])) or plan(decode, lens),
        )
        smaller, all_reqs = max(1, width - 1), len(drawn.lens)  # as of a smaller budget
        steps = [(1, smaller), (all_reqs, width), (1, width), (1, smaller), (all_reqs, width)]
        if captured:
            for num_reqs, length in steps:
                made.prepare_capture(num_reqs, length)
        for num_reqs, length in steps:
            case = replace(
                drawn,
                query=drawn.query[:num_reqs],
                slots=drawn.slots[:num_reqs, :, :length],
                lens=torch.full((num_reqs,), length, dtype=torch.int32),
            )
            for layer in range(NUM_LAYERS):
                own = moved(case, layer)
                rows = KVRows.of(filled_cache(layout, own), "FLASHINFER")
                decode = made.decode(num_reqs, length)
                own.check(decode.run(own.query, rows, own.slots, **options_of(own)))
    assert planned == list(dict.fromkeys(steps))


def test_the_latest_plans_are_cached(flashinfer_stand_in, monkeypatch):
    geometry = Geometry(8, 1, 64, torch.bfloat16, torch.bfloat16, scale=1.0)
    made = plans.CommonLengthPlans(geometry, max_num_reqs=4, max_graph_reqs=0, device=CPU)
    made.reserve(8)
    monkeypatch.setattr(plans, "MAX_RECENT", 2)
    first, second = made.decode(1, 8), made.decode(2, 8)
    assert made.decode(1, 8) is first
    made.decode(3, 8)  # takes the place of what was not asked for since
    assert made.decode(1, 8) is first
    assert made.decode(2, 8) is not second


def heads(num_heads: int, num_kv_heads: int, head_size: int = 128) -> Geometry:
    return Geometry(num_heads, num_kv_heads, head_size, torch.bfloat16, torch.bfloat16, scale=1.0)


SHAPES = {
    "Llama-3.1-8B, Qwen3-8B": heads(32, 8),
    "Qwen3-14B": heads(40, 8),
    "64/8 heads": heads(64, 8),
    "64/8 heads on 8 devices": heads(8, 1),
    "Gemma's head size": heads(16, 8, 256),
    "multi-head": heads(32, 32),
    "multi-query": heads(71, 1, 64),
    "a group of 32": heads(64, 2, 64),
}


@pytest.mark.parametrize(
    ("shape", "mebibytes"), [("Llama-3.1-8B, Qwen3-8B", 161), ("Qwen3-14B", 212), ("64/8 heads", 387)]
)
def test_the_workspace_of_the_largest_graph_is_small(shape, mebibytes):
    """vLLM captures no more than 512 requests; a plan that does not fit goes to Triton (test_switch.py)."""
    num_bytes, _ = flashinfer_attention.plan_bytes(SHAPES[shape], 512)
    assert round(num_bytes / 2**20) == mebibytes


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_workspaces_fit_flashinfers_own_estimate(shape, cuda_graph):
    """Of the installed FlashInfer, whose `workspace_size` needs its compiled kernels."""
    flashinfer = pytest.importorskip("flashinfer")
    geometry, device = SHAPES[shape], torch.device("cuda")
    if geometry.refusal or geometry.group not in (1, 2, 4, 8):
        pytest.skip("not every group has a kernel that comes with FlashInfer")
    for num_reqs, length in itertools.product((1, 40, 512), (1, 200)):
        num_lists = num_reqs * geometry.num_kv_heads
        indptr = torch.arange(num_lists + 1, dtype=torch.int32) * length
        ones = torch.ones(num_lists, dtype=torch.int32)
        indices = torch.zeros(num_lists * length, dtype=torch.int32, device=device)
        buffers = dict(
            paged_kv_indptr_buffer=indptr.to(device),
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=ones.to(device),
        )
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(1024, dtype=torch.uint8, device=device),
            "NHD",
            use_cuda_graph=cuda_graph,
            use_tensor_cores=geometry.use_tensor_cores,
            **(buffers if cuda_graph else {}),
        )
        required = wrapper.workspace_size(indptr, indices, ones, **geometry.plan_arguments())
        has = flashinfer_attention.plan_bytes(geometry, num_reqs)
        assert all(a >= b for a, b in zip(has, required, strict=True)), (num_reqs, length)


@pytest.mark.gpu
@settings(max_examples=10, deadline=None)
@given(cases(dtypes=(torch.bfloat16, torch.float16), head_sizes=(64, 128)), layouts)
def test_flashinfer_on_a_gpu(case, layout):
    pytest.importorskip("flashinfer")
    rows = KVRows.of(filled_cache(layout, case, device="cuda"), "FLASHINFER")
    case.check(run(case, rows, "flashinfer", "cuda"))
