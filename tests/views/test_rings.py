# SPDX-License-Identifier: Apache-2.0
"""Where a ring has a request's pages, and what views of it read, against a cache of everything."""

import random

import numpy as np
import pytest
import torch

from vllm_magicdec.policies.base import Limits
from vllm_magicdec.policies.streamingllm import StreamingLLM
from vllm_magicdec.views.pages import PageBudget
from vllm_magicdec.views.rings import Ring, RingTable

PAGE = 4


def budget(max_pages: int, sink_pages: int = 1) -> PageBudget:
    return PageBudget(PAGE, sink_pages, max_pages, max_pages)


@pytest.mark.parametrize(
    ("sinks", "gamma", "spare"), [(0, 1, 0), (1, 4, 1), (2, 5, 1), (1, 6, 2), (1, 17, 4)]
)
def test_a_ring_holds_the_budget_and_the_drafts(sinks, gamma, spare):
    ring = Ring.of(budget(9, sinks), gamma)
    assert ring == Ring(PAGE, sinks, 9 - sinks, spare) and ring.num_pages == 9 + spare


def test_sinks_are_fixed_and_other_pages_wrap_around():
    ring = Ring(PAGE, sink_pages=2, window_pages=3, spare_pages=1)
    assert ring.indices(np.arange(12)).tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 2, 3]
    without = Ring(PAGE, sink_pages=0, window_pages=2, spare_pages=1)
    assert without.indices(np.arange(5)).tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_rounds_show_no_overwritten_page(seed):
    """Tokens go into the ring one by one, drafts ahead of them, of which some stand."""
    rng = random.Random(seed)
    gamma, sinks = rng.randint(1, 9), rng.randint(0, 2)
    own = budget(sinks + rng.randint(-(-(gamma - 1) // PAGE) + 1, 6), sinks)
    limits = Limits(page_size=PAGE, max_model_len=400, num_speculative_tokens=gamma, device_type="cpu")
    policy, ring = StreamingLLM(None, own, torch.device("cpu")), StreamingLLM.ring(own, limits)
    cache = np.full(ring.num_pages * PAGE, -1)

    def slots(positions: np.ndarray) -> np.ndarray:
        return ring.indices(positions // PAGE) * PAGE + positions % PAGE

    length = rng.randint(1, 100)
    entries = ring.entries(length)
    cache[slots(entries)] = entries
    while length < 380:
        drafts = rng.randint(1, gamma)
        positions = np.arange(length, length + drafts)
        pages, number = policy.choose_pages(
            torch.tensor([length]), torch.tensor([(length + drafts - 1) // PAGE])
        )
        seen = pages[0, : number[0]].numpy().repeat(PAGE) * PAGE + np.tile(np.arange(PAGE), number[0])
        seen = seen[seen < length]
        assert (cache[slots(seen)] == seen).all()
        assert set(seen) <= set(ring.entries(length))
        cache[slots(positions)] = 10_000  # drafts
        assert ring.first_left(length + drafts) <= max(ring.first_seen(length + 1), sinks * PAGE)
        taken = np.arange(length, length + rng.randint(1, drafts + 1))
        cache[slots(taken)] = taken
        length = int(taken[-1]) + 1


@pytest.mark.parametrize("num_rows", [1, 3])
def test_block_tables_of_rings_become_tables_of_pages(num_rows):
    ring = Ring(PAGE, sink_pages=1, window_pages=5, spare_pages=1)
    rows, step = [0, 1, 100][:num_rows], 10
    table = RingTable.of(ring, 20, rows, step, torch.device("cpu"))
    blocks = torch.tensor([[7, 3, 9, 2, 8, 4, 6], [1, 2, 3, 4, 5, 6, 7]], dtype=torch.int32)
    indices = ring.indices(np.arange(20))
    expected = [[int(own[p // num_rows]) * step + rows[p % num_rows] for p in indices] for own in blocks]
    assert table.pages(blocks).tolist() == expected and table.pages(blocks).dtype == torch.int32


def test_a_policy_that_chooses_other_pages_has_no_ring():
    class Other(StreamingLLM):
        def choose_pages(self, context_lens, last_pages):
            return super().choose_pages(context_lens, last_pages)

    limits = Limits(page_size=PAGE, max_model_len=400, num_speculative_tokens=4, device_type="cpu")
    assert Other.ring(budget(5), limits) is None
