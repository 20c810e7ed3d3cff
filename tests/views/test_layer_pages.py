# SPDX-License-Identifier: Apache-2.0
"""Page views of every layer's own against a naive reference: which tokens a step sees, by which pages."""

import torch
from batches import NoSelector, make_batch, make_selections, make_slots, steps_of_view
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import slot_of, slots_of_pages

from vllm_magicdec.views.layer_pages import LayerPageViews
from vllm_magicdec.views.pages import PageBudget

CPU = torch.device("cpu")
NUM_LAYERS, PAGE = 2, 4


@st.composite
def rounds(draw):
    model_len = draw(st.integers(40, 300))
    num_steps = draw(st.integers(1, 9))
    sinks = draw(st.integers(0, 2))
    drafted_pages = -(-(num_steps - 1) // PAGE) + 1
    recent = draw(st.integers(drafted_pages, 8))
    fraction = draw(st.sampled_from([0.0, 0.0, 0.5]))
    most = -(-model_len // PAGE)
    size = draw(st.integers(sinks + recent, sinks + recent + 12))
    budget = PageBudget(PAGE, sinks, size, max(size, most // 2) if fraction else size, fraction, recent)
    lens = st.integers(1, model_len)
    # Where each request is, and where it was when pages were selected for it: long ago, or further on.
    requests = draw(st.lists(st.tuples(lens, lens), min_size=1, max_size=4))
    return model_len, num_steps, budget, requests


def pages_in_view(budget: PageBudget, selected: list[int], end: int, total: int, allowed: int) -> set[int]:
    """Everything if it fits; else sinks, the best that were selected, and the latest pages."""
    if total <= allowed:
        return set(range(total))
    sinks = min(total, budget.num_sinks)
    since = max(min(end, total - budget.num_recent), sinks)
    best = selected[: max(0, allowed - sinks - budget.num_recent)]
    first_recent = max(since, total - (allowed - sinks - len(best)))
    return {*range(sinks), *best, *range(first_recent, total)}


@settings(max_examples=300, deadline=None)
@given(rounds(), st.integers(0, 2**31))
def test_every_step_sees_selected_sink_and_recent_pages(case, seed):
    model_len, num_steps, budget, requests = case
    generator = torch.Generator().manual_seed(seed)
    num_reqs, max_blocks = len(requests), -(-model_len // PAGE)
    block_table = torch.randperm(num_reqs * max_blocks, generator=generator)
    block_table = block_table.view(num_reqs, max_blocks).to(torch.int32)
    req_ids = [f"request {i}" for i in range(num_reqs)]
    selections = make_selections(NUM_LAYERS, 1, num_reqs + 1, budget.max_selected)
    selections.begin_round(req_ids)
    selected, ends = {}, []
    for index, (req_id, (_, selected_at)) in enumerate(zip(req_ids, requests, strict=True)):
        end = max(0, -(-selected_at // PAGE) - budget.num_recent)
        eligible = max(0, end - budget.num_sinks)
        count = min(eligible, budget.max_selected)
        for layer in range(NUM_LAYERS):
            order = torch.randperm(eligible, generator=generator)[:count] + budget.num_sinks
            selections.positions[selections.row(req_id), layer, 0, :count] = order.to(torch.int32)
            selected[index, layer] = order.tolist()
        selections.set([req_id], [selected_at], torch.tensor([count]), torch.tensor([end]))
        ends.append(end)

    slots = make_slots(PAGE, num_reqs + 1, num_steps, model_len)
    views = LayerPageViews(selections, NoSelector(), budget, slots)
    context_lens = [context_len for context_len, _ in requests]
    batch = make_batch(req_ids, block_table, context_lens)
    allowed = budget.entries(batch.context_lens).tolist()
    for step_index, step in enumerate(steps_of_view(views.prepare(batch, num_steps), num_steps)):
        for index, context_len in enumerate(context_lens):
            own = block_table[index].tolist()
            last = min(context_len + num_steps, model_len) - 1
            position = min(context_len + step_index, model_len - 1)
            assert int(step.positions[index]) == position
            length = int(step.view.lens[index])
            assert 1 <= length <= position + 1
            for layer in range(NUM_LAYERS):
                table = step.view.block_tables[layer, index].tolist()
                seen = [slot_of(p, table, PAGE) for p in range(length)]
                if context_len < requests[index][1]:
                    # It came back shorter than it was when pages were selected; its drafts will be dropped.
                    assert seen[-1] == slot_of(position, own, PAGE)
                    assert {slot // PAGE for slot in seen} <= set(own)
                    continue
                expected = pages_in_view(
                    budget, selected[index, layer], ends[index], last // PAGE + 1, allowed[index]
                )
                assert len(expected) <= budget.max_entries
                visible = slots_of_pages(expected, position, own, PAGE)
                assert len(seen) == len(visible) and set(seen) == visible
