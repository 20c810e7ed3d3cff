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
    cases,
    filled,
    filled_cache,
    geometry_of,
    layouts,
    play_flashinfer,
    run,
)

from vllm_magicdec.attention import KVRows, flashinfer_attention, plans

flashinfer_stand_in = pytest.fixture(scope="module")(play_flashinfer)


@settings(max_examples=60, deadline=None)
@given(cases(), layouts, st.integers(1, 2))
def test_flashinfer_is_told_to_read_the_view_and_nothing_else(
    flashinfer_stand_in, case, layout, page_stride
):
    rows = KVRows.of(filled_cache(layout, case, page_stride=page_stride), "FLASHINFER")
    case.check(run(case, rows, "flashinfer"))


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
