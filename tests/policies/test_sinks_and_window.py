# SPDX-License-Identifier: Apache-2.0
"""The view of a draft that was trained with sinks and a window: these tokens, and no others."""

import random
from types import SimpleNamespace

import pytest
import torch
from batches import make_batch, make_engine, steps_of_view

from vllm_magicdec.policies.sinks_and_window import SinksAndWindow

PAGE, MODEL_LEN, LAYERS, HEADS = 4, 60, 2, 3


@pytest.mark.parametrize(("sinks", "window"), [(4, 8), (0, 5), (3, 1), (1, 2), (5, 100)])
@pytest.mark.parametrize("num_steps", [1, 4, 9])
def test_a_step_sees_the_sinks_and_the_latest_tokens_its_own_among_them(sinks, window, num_steps):
    rng = random.Random(sinks * 100 + window)
    engine = make_engine(PAGE, MODEL_LEN, num_steps, 100, 8, num_layers=LAYERS, num_kv_heads=HEADS)
    fields = SimpleNamespace(draft_kv_sink=sinks)
    budget = SinksAndWindow.parse_budget(fields, engine.limits, sinks + window)
    views = SinksAndWindow.make_views(fields, engine, budget)
    for round_number in range(20):
        num_reqs = rng.randint(1, 8)
        # A window shorter than a round loses sinks that the round itself drafts; nobody trains one.
        shortest = max(1, sinks) if window < num_steps else 1
        lens = [rng.randint(shortest, MODEL_LEN - num_steps) for _ in range(num_reqs)]
        pages = rng.sample(range(100), 100)
        tables = [pages[i * 12 : i * 12 + 15] for i in range(num_reqs)]
        batch = make_batch(
            [f"{round_number}-{i}" for i in range(num_reqs)], torch.tensor(tables, dtype=torch.int32), lens
        )
        for index, step in enumerate(steps_of_view(views.prepare(batch, num_steps), num_steps)):
            for row, (table, length) in enumerate(zip(tables, lens, strict=True)):
                own = length + index
                seen = [p for p in range(own + 1) if p < sinks or p > own - window]
                slots = sorted(table[p // PAGE] * PAGE + p % PAGE for p in seen)
                assert step.slots[row] == table[own // PAGE] * PAGE + own % PAGE
                for layer in range(LAYERS):
                    for head in range(HEADS):
                        found = step.view.slots[layer, row, head, : step.view.lens[row]]
                        assert sorted(found.tolist()) == slots
