# SPDX-License-Identifier: Apache-2.0
"""Token views against a naive reference: what a step sees and by which slots, alone and in a pass."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import NoSelector, make_batch, make_selections, make_slots
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import slot_of, token_positions

from vllm_magicdec.views import tokens
from vllm_magicdec.views.round import Batch, Queries
from vllm_magicdec.views.selections import RequestRows
from vllm_magicdec.views.tensors import PAD_SLOT
from vllm_magicdec.views.tokens import TokenBudget, TokenRound, TokenViews

CPU = torch.device("cpu")
NUM_LAYERS, NUM_KV_HEADS = 2, 3


def make_budget(**fields) -> TokenBudget:
    usual = dict(min_budget=256, sink=16, window=32, num_speculative_tokens=4, max_model_len=4096)
    return TokenBudget.from_fields(**{**usual, **fields})


@st.composite
def rounds(draw):
    page_size = draw(st.sampled_from([1, 4, 16]))
    model_len = draw(st.integers(64, 400))
    num_steps = draw(st.integers(1, 9))
    sink = draw(st.integers(0, 20))
    window = draw(st.integers(1, 12))
    recent = draw(st.sampled_from([0.0, 0.375]))
    least = min(sink + max(window, num_steps) + 1, model_len)
    sizes = {"budget": draw(st.integers(least, model_len)), "recent": recent, "max_model_len": model_len}
    budget = make_budget(sink=sink, window=window, num_speculative_tokens=num_steps, **sizes)
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        context_len = draw(st.integers(1, model_len))
        selected_at = draw(st.integers(0, context_len))  # 0: nothing was selected
        requests.append((context_len, selected_at))
    return page_size, model_len, num_steps, budget, requests


@settings(max_examples=200, deadline=None)
@given(rounds(), st.integers(0, 2**31), st.data())
def test_every_step_sees_selection_sinks_and_recent_tokens_also_in_a_pass(case, seed, data):
    page_size, model_len, num_steps, budget, requests = case
    generator = torch.Generator().manual_seed(seed)
    num_reqs, max_blocks = len(requests), -(-model_len // page_size)
    blocks = torch.randperm(num_reqs * max_blocks, generator=generator)
    block_table = blocks.view(num_reqs, max_blocks).to(torch.int32)
    req_ids = [f"request {i}" for i in range(num_reqs)]
    selections = make_selections(NUM_LAYERS, NUM_KV_HEADS, num_reqs + 1, budget.max_selected)
    selections.begin_round(req_ids)
    chosen = {}
    for index, (req_id, (_, selected_at)) in enumerate(zip(req_ids, requests, strict=True)):
        end = max(0, selected_at - budget.num_recent)
        count = min(max(0, end - budget.num_sinks), budget.max_selected)
        row = selections.rows([req_id])
        for layer in range(NUM_LAYERS):
            for head in range(NUM_KV_HEADS):
                eligible = torch.randperm(max(0, end - budget.num_sinks), generator=generator)
                order = eligible[:count] + budget.num_sinks
                selections.positions[row, layer, head, :count] = order.to(torch.int32)
                chosen[index, layer, head] = order.tolist()
        selections.set([req_id], [selected_at], torch.tensor([count]), torch.tensor([end]))

    slots = make_slots(page_size, num_reqs + 1, num_steps, model_len)
    views = TokenViews(selections, NoSelector(), budget, slots)
    batch = make_batch(req_ids, block_table, [context_len for context_len, _ in requests])
    # Of what the host knows, all drafts of the last two rounds may have been rejected.
    rejected = data.draw(st.integers(0, 2 * num_steps))
    known_lens = [min(context_len + rejected, model_len) for context_len, _ in requests]
    steps = views.prepare(replace(batch, known_lens=known_lens), num_steps)
    passes = [
        seen_in_a_pass(steps, queries, batch, page_size)
        for queries in data.draw(st.lists(passes_within(model_len, num_steps, requests), max_size=3))
    ]
    for step_index in range(num_steps):
        step = steps.step(step_index)
        assert step.view.slots.shape[-1] == budget.max_tokens
        for index, (context_len, selected_at) in enumerate(requests):
            own = block_table[index].tolist()
            length = int(step.view.lens[index])
            assert length == min(context_len + step_index + 1, budget.max_tokens, model_len)
            assert step.view.common_len in (None, length)
            if all(context_len >= budget.max_tokens + 2 * num_steps for context_len, _ in requests):
                assert step.view.common_len == budget.max_tokens
            for layer in range(NUM_LAYERS):
                for head in range(NUM_KV_HEADS):
                    end = max(0, selected_at - budget.num_recent)
                    common = dict(context_len=context_len, sink=budget.num_sinks, model_len=model_len)
                    common["budget"] = budget.max_tokens
                    # As many of the best as fit beside sinks and window.
                    num_sinks = min(budget.num_sinks, context_len + 1, model_len)
                    room = max(0, budget.max_tokens - num_sinks - budget.num_recent)
                    own_chosen = chosen[index, layer, head][:room]
                    expected = token_positions(
                        chosen=own_chosen, chosen_until=end, step=step_index, **common
                    )
                    seen = step.view.slots[layer, index, head, :length].tolist()
                    slots_seen = sorted(slot_of(p, own, page_size) for p in expected)
                    assert sorted(seen) == slots_seen
                    for taken in passes:
                        if (index, step_index) in taken:
                            assert taken[index, step_index][layer][head] == slots_seen
            position = context_len + step_index
            is_inside = position < model_len
            assert int(step.slots[index]) == (slot_of(position, own, page_size) if is_inside else PAD_SLOT)


@st.composite
def passes_within(draw, model_len: int, num_steps: int, requests: list[tuple[int, int]]) -> Queries | None:
    """Of some of the requests some steps in a row, within the model's length; None: no request has any."""
    most = [min(num_steps, model_len - context_len) for context_len, _ in requests]
    running = [index for index, n in enumerate(most) if n and draw(st.integers(0, 3))]
    firsts = [draw(st.integers(0, most[index] - 1)) for index in running]
    lens = [draw(st.integers(1, most[index] - first)) for index, first in zip(running, firsts, strict=True)]
    return Queries(np.array(running), np.array(firsts), np.array(lens)) if running else None


CHANGES = ("nothing", "tokens", "pages", "selection", "requests", "order", "shorter")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(CHANGES), min_size=2, max_size=12), st.integers(0, 2**31))
def test_cached_lists_equal_new_ones(changes, seed):
    """Whatever changes from round to round; in between, steps write their own slots into the lists."""
    rng = random.Random(seed)
    page_size, model_len, num_steps, max_reqs, chosen = 16, 256, 3, 4, 28
    selections = make_selections(NUM_LAYERS, NUM_KV_HEADS, max_reqs, chosen)

    def make_views() -> TokenViews:
        slots = make_slots(page_size, max_reqs, num_steps, model_len)
        return TokenViews(selections, NoSelector(), TokenBudget(1, 2, 36, 36, num_recent=6), slots)

    def select(req_id: str) -> None:
        row, end = selections.row(req_id), lens[req_id] - 6
        count = min(chosen, end - 2)
        for layer in range(NUM_LAYERS):
            for head in range(NUM_KV_HEADS):
                order = torch.tensor(rng.sample(range(2, end), count), dtype=torch.int32)
                selections.positions[row, layer, head, :count] = order
        selections.set([req_id], [lens[req_id]], torch.tensor([count]), torch.tensor([end]))

    def new_pages() -> torch.Tensor:
        return torch.tensor(rng.sample(range(99), model_len // page_size), dtype=torch.int32)

    names, lens, pages, views = ["0", "1"], {}, {}, make_views()
    table = torch.zeros(max_reqs, model_len // page_size, dtype=torch.int32)
    for number, change in enumerate(["requests", *changes]):
        one = rng.choice(names)
        if change == "requests":
            names = rng.sample([f"{number}", *names, f"{number}'"], rng.randint(1, 3))
        elif change == "order":
            names = names[::-1]
        for name in names:
            lens.setdefault(name, rng.randint(60, 120))
            pages.setdefault(name, rng.choice([new_pages(), *pages.values()]))  # prefixes are shared
        selections.begin_round(names)
        for name in names:
            if selections.selected_at(name) is None and rng.random() < 0.8:
                select(name)
        if one in names and change == "tokens":
            lens[one] += rng.randint(1, 5)
        elif one in names and change == "pages":
            pages[one] = pages[one].clone()
            pages[one][rng.randrange(lens[one] // page_size)] = 99
        elif one in names and change == "selection":
            select(one)
        elif one in names and change == "shorter":
            lens[one] = rng.randint(30, lens[one])
        for index, name in enumerate(names):
            table[index] = pages[name]  # in place, as vLLM does
        batch = make_batch(names, table[: len(names)], [lens[name] for name in names])
        own_round, new_round = views.prepare(batch, num_steps), make_views().prepare(batch, num_steps)
        for step_index in range(num_steps):
            kept, anew = own_round.step(step_index), new_round.step(step_index)
            assert torch.equal(kept.view.lens, anew.view.lens)
            for index, length in enumerate(kept.view.lens.tolist()):
                own, fresh = (step.view.slots[:, index, :, :length] for step in (kept, anew))
                assert torch.equal(own, fresh)


def test_lists_of_an_unchanged_batch_are_cached(monkeypatch):
    """The point of keeping them: nothing is sorted again until something changes."""
    selections = make_selections(NUM_LAYERS, NUM_KV_HEADS, 1, 8)
    selections.begin_round(["a"])
    selections.positions[0, ..., :8] = torch.arange(10, 18, dtype=torch.int32)
    selections.set(["a"], [100], torch.tensor([8]), torch.tensor([90]))
    slots = make_slots(16, 1, 2, 256)
    views = TokenViews(selections, NoSelector(), TokenBudget(1, 2, 16, 16, num_recent=6), slots)
    table = torch.arange(16, dtype=torch.int32).unsqueeze(0)
    views.prepare(make_batch(["a"], table, [100]), 2)
    with monkeypatch.context() as patched:
        patched.setattr(tokens, "_sorted", None)
        views.prepare(make_batch(["a"], table, [103]), 2)
        with pytest.raises(TypeError):
            views.prepare(make_batch(["a"], table.flip(1), [104]), 2)


def seen_in_a_pass(
    round_view: TokenRound, queries: Queries | None, batch: Batch, page_size: int
) -> dict[tuple[int, int], list[list[list[int]]]]:
    """The slots that each token of a pass sees, by layer and KV head, by its request and step."""
    if queries is None:
        return {}
    taken = round_view.take(queries)
    seen = {}
    for row, (index, first, count) in enumerate(
        zip(queries.requests.tolist(), queries.firsts.tolist(), queries.lens.tolist(), strict=True)
    ):
        table, context_len = batch.block_table[index].tolist(), int(batch.context_lens[index])
        written = {slot_of(p, table, page_size) for p in range(context_len + first + count)}
        assert set(taken.view.slots[:, row].flatten().tolist()) <= written, (
            "what is read need not be a number"
        )
        for place in range(count):
            query = int(queries.starts[row]) + place
            assert taken.view.mask.table.flatten()[taken.view.mask.cells[query]] == query
            position = context_len + first + place
            assert taken.positions[query] == position
            assert taken.slots[query] == slot_of(position, table, page_size)
            columns = taken.view.mask.is_seen[row, place]
            seen[index, first + place] = [
                [sorted(own[columns].tolist()) for own in by_head] for by_head in taken.view.slots[:, row]
            ]
    return seen


def test_rows_of_finished_requests_are_reused():
    rows = RequestRows(3, CPU)
    first = rows.add(["a", "b", "c"])
    assert sorted(first) == [0, 1, 2]
    assert rows.add(["a", "b"]) == []
    kept = rows.of(["b"]).tolist()
    (taken,) = rows.add(["b", "d"])
    assert rows.of(["b"]).tolist() == kept
    assert taken not in kept
    assert "c" not in rows and "a" in rows, "the one that was asked for longest ago is gone"


@pytest.mark.parametrize(
    ("budget", "sentence"),
    [
        (48, "draft_kv_budget=48 cannot hold 16 sinks and a window of 32 tokens; use at least 49"),
        (0.1, "draft_kv_min_budget=40 cannot hold"),
    ],
)
def test_errors_for_small_budgets_name_a_valid_one(budget, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_budget(budget=budget, min_budget=40)


@pytest.mark.parametrize(
    ("tokens", "recent", "window"),
    [
        *((512, 0, 32), (512, 0.375, 192), (512, 100, 100), (512, 0.999, 512 - 16 - 1)),
        # Of a small budget it is more, but never for a number, or for SnapKV as published.
        *((512, 0.01, 48), (64, 0.375, 47), (96, 0.375, 48), (56, 0.375, 39), (64, 40, 40), (64, 0, 32)),
    ],
)
def test_recent_tokens_are_a_number_or_a_share_of_the_budget(tokens, recent, window):
    budget = make_budget(budget=tokens, recent=recent)
    assert budget.num_recent == window
    assert budget.max_selected == tokens - 16 - window
