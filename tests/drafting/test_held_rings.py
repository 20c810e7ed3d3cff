# SPDX-License-Identifier: Apache-2.0
"""What rings hold, against a record of every slot, while requests come, wait and are preempted."""

import random

import numpy as np
import pytest

from vllm_magicdec.drafting.held_rings import HeldRings
from vllm_magicdec.views.rings import Ring

PAGE = 4
NUM_BLOCKS = 40
GAMMA = 6


@pytest.mark.parametrize("seed", range(30))
def test_lacking_positions_are_those_without_a_slot(seed):
    """A slot holds a token of its request, or a leftover of another request or draft."""
    rng = random.Random(seed)
    ring = Ring(PAGE, sink_pages=1, window_pages=rng.randint(3, 5), spare_pages=2)
    held, slots = HeldRings(ring), {}
    requests: dict[str, dict] = {}

    def slot(request: dict, position: int) -> tuple[int, int]:
        block = request["blocks"][int(ring.indices(np.array(position // PAGE)))]
        return int(block), position % PAGE

    for step in range(200):
        used = {int(block) for request in requests.values() for block in request["blocks"]}
        free = [block for block in range(NUM_BLOCKS) if block not in used]
        if len(free) >= ring.num_pages and rng.random() < 0.3:
            requests[str(step)] = {"blocks": np.array(free[: ring.num_pages]), "end": 0, "tokens": {}}
        for name in [name for name in requests if rng.random() < 0.03]:
            del requests[name]  # it ends
        for request in requests.values():
            if rng.random() < 0.05:  # preempted; in its blocks is another's K/V before it comes back
                slots |= {(int(block), place): None for block in request["blocks"] for place in range(PAGE)}
                others = {
                    int(block) for own in requests.values() if own is not request for block in own["blocks"]
                }
                free = [block for block in range(NUM_BLOCKS) if block not in others]
                request["blocks"] = np.array(rng.sample(free, ring.num_pages))
                request |= {"end": 0, "is_away": True, "drafted": []}
        batch = [name for name in requests if not requests[name].pop("is_away", False)]
        batch = [name for name in batch if rng.random() < 0.9]
        rng.shuffle(batch)
        held.begin_step(batch, [requests[name]["blocks"] for name in batch])
        for index, name in enumerate(batch):
            request = requests[name]
            start = request["end"]
            held.forget(index, start)
            end = start + (rng.randint(1, 60) if rng.random() < 0.1 else rng.randint(1, GAMMA))
            for position in range(start, end):  # new tokens of the target's
                request["tokens"][position] = rng.random()
            drafted = request.pop("drafted", [])
            if start and len(drafted) <= end - start and rng.random() < 0.8:
                for position, token in drafted:  # which stood
                    request["tokens"][position] = token
                held.add(index, start, start + len(drafted))
            request["end"] = end
            lacking = held.lacking(index, end)
            entries = ring.entries(end)
            assert (entries[len(entries) - len(lacking) :] == lacking).all()
            for position in entries[: len(entries) - len(lacking)].tolist():
                assert slots.get(slot(request, position)) == request["tokens"][position]
            if rng.random() < 0.2:
                continue  # a plain step
            if len(lacking):
                for position in lacking.tolist():
                    slots[slot(request, position)] = request["tokens"][position]
                held.add_entries(index, end, end)
                assert not len(held.lacking(index, end))
            held.write_over(index, end + GAMMA)
            request["drafted"] = [(position, rng.random()) for position in range(end, end + GAMMA - 1)]
            for position, token in request["drafted"]:
                slots[slot(request, position)] = token


def test_what_stays_in_the_batch_is_not_read_again():
    ring = Ring(PAGE, sink_pages=1, window_pages=3, spare_pages=1)
    held, blocks = HeldRings(ring), np.arange(5)
    held.begin_step(["a"], [blocks[:2]])
    held.add_entries(0, 8, 8)
    for end in range(9, 60):  # its ring grows, and turns
        held.begin_step(["a"], [blocks[: max(2, min(5, -(-end // PAGE)))]])
        assert held.lacking(0, end).tolist() == [end - 1]
        held.add_entries(0, end, end)
        held.write_over(0, end + 4)
    held.begin_step(["b"], [blocks])
    held.begin_step(["a"], [blocks])  # it was not there
    assert held.lacking(0, 60).tolist() == ring.entries(60).tolist()
