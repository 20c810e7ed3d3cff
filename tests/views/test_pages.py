# SPDX-License-Identifier: Apache-2.0
"""The view arithmetic against a naive reference."""

import pytest
import torch
from batches import make_batch, make_slots, steps_of_view
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference import budget_in_pages, slot_of, visible_positions

from vllm_magicdec.policies.streamingllm import StreamingLLM
from vllm_magicdec.views.pages import PageBudget, PageViews
from vllm_magicdec.views.tensors import PAD_SLOT

CPU = torch.device("cpu")


@st.composite
def rounds(draw):
    """A batch about to draft: budget, geometry and each request's verified length and pages."""
    page_size = draw(st.sampled_from([1, 2, 8, 16, 32, 128]))
    model_len = draw(st.integers(1, 40 * page_size))
    num_steps = draw(st.integers(1, 16))
    sink = draw(st.integers(0, 3 * page_size))
    if draw(st.booleans()):
        budget = draw(st.integers(1, model_len))
        min_budget = 256
    else:
        budget = draw(st.floats(0.01, 0.99))
        min_budget = draw(st.integers(1, model_len))
    context_lens = draw(st.lists(st.integers(1, model_len), min_size=1, max_size=5))
    geometry = dict(page_size=page_size, model_len=model_len, num_steps=num_steps)
    return dict(**geometry, sink=sink, budget=budget, min_budget=min_budget), context_lens


def make_budget(*, page_size, model_len, num_steps, sink, budget, min_budget=256):
    tokens = dict(budget=budget, min_budget=min_budget, sink=sink, page_size=page_size)
    return PageBudget.from_tokens(**tokens, num_speculative_tokens=num_steps, max_model_len=model_len)


@settings(max_examples=400, deadline=None)
@given(rounds())
def test_every_step_sees_sinks_and_window_and_writes_to_its_own_slot(case):
    case, context_lens = case
    try:
        page_budget = make_budget(**case)
    except ValueError:
        assume(False)
    page_size, model_len, num_steps = case["page_size"], case["model_len"], case["num_steps"]
    num_reqs = len(context_lens)
    max_blocks = -(-model_len // page_size)
    num_pages = [budget_in_pages(**case, context_len=context_len) for context_len in context_lens]
    assert page_budget.entries(torch.tensor(context_lens)).tolist() == num_pages
    assert page_budget.min_entries <= min(num_pages) and max(num_pages) <= page_budget.max_entries
    # Pages in an order that no arithmetic could guess, different for every request.
    blocks = torch.randperm(num_reqs * max_blocks, generator=torch.Generator().manual_seed(7))
    block_table = blocks.view(num_reqs, max_blocks).to(torch.int32)

    slots = make_slots(page_size, num_reqs + 2, num_steps, model_len)
    views = PageViews(StreamingLLM(None, page_budget, CPU), slots)
    batch = make_batch([str(i) for i in range(num_reqs)], block_table, context_lens)
    steps = steps_of_view(views.prepare(batch, num_steps), num_steps)

    for step_index, step in enumerate(steps):
        for req, context_len in enumerate(context_lens):
            own_blocks = block_table[req].tolist()
            position = context_len + step_index
            where = dict(context_len=context_len, step=step_index, num_pages=num_pages[req])
            sizes = dict(num_steps=num_steps, page_size=page_size, sink=case["sink"], model_len=model_len)
            expected = visible_positions(**where, **sizes)
            seq_len = int(step.view.lens[req])
            view_blocks = step.view.block_table[req].tolist()
            seen = [slot_of(p, view_blocks, page_size) for p in range(seq_len)]
            assert seen == [slot_of(p, own_blocks, page_size) for p in expected]
            assert seq_len <= step.view.max_len
            assert set(view_blocks[: page_budget.max_entries]) <= set(own_blocks)
            # Columns that make the table as wide as vLLM's own name its null block.
            assert not any(view_blocks[page_budget.max_entries :])
            assert int(step.positions[req]) == min(position, model_len - 1)
            if position < model_len:
                assert int(step.slots[req]) == slot_of(position, own_blocks, page_size)
                # Its own token and every token drafted before it in this round.
                assert set(range(context_len, position + 1)) <= set(expected)
            else:
                assert int(step.slots[req]) == PAD_SLOT


def test_a_budget_too_small_for_sinks_and_drafts_is_rounded_up_to_hold_them():
    budget = make_budget(page_size=32, model_len=8192, num_steps=8, sink=16, budget=64)
    assert (budget.num_sinks, budget.min_entries, budget.max_entries) == (1, 3, 3)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            dict(budget=64, page_size=128),
            "draft_kv_budget=64 is below one KV page of 128 tokens; use at least 128",
        ),
        (dict(budget=0.1, min_budget=8, page_size=16), "draft_kv_min_budget=8 is below one KV page of 16"),
    ],
)
def test_errors_for_budgets_below_one_page_name_a_valid_one(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_budget(**{"model_len": 4096, "num_steps": 4, "sink": 16, **fields})
