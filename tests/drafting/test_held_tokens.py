# SPDX-License-Identifier: Apache-2.0
"""What a draft's cache holds, against a record of every slot, while pages go from request to request."""

import random

import numpy as np
import pytest

from vllm_magicdec.drafting.held_tokens import HeldTokens

PAGE = 4
NUM_PAGES = 24


@pytest.mark.parametrize("seed", range(20))
def test_first_lacking_token(seed):
    """A slot holds a token of the target (a number that is new at every write) and one of the draft."""
    rng = random.Random(seed)
    held = HeldTokens(NUM_PAGES, PAGE)
    target, draft = np.zeros(NUM_PAGES * PAGE, dtype=int), np.full(NUM_PAGES * PAGE, -1)
    requests: dict[int, dict] = {}
    written = 0

    def slots(pages: np.ndarray, first: int, end: int) -> np.ndarray:
        places = np.arange(first, end)
        return pages[places // PAGE] * PAGE + places % PAGE

    for step in range(300):
        free = [page for page in range(NUM_PAGES) if all(page not in r["pages"] for r in requests.values())]
        if len(free) >= 6 and (not requests or rng.random() < 0.3):
            # Some begin with whole pages of another request, as from the prefix cache.
            donor = rng.choice([*requests.values()]) if requests and rng.random() < 0.5 else None
            shared = donor["end"] // PAGE if donor else 0
            pages = np.array([*(donor["pages"][:shared] if donor else []), *rng.sample(free, 6)])
            requests[step] = {"pages": pages, "end": shared * PAGE}
        name = rng.choice(list(requests))
        request = requests[name]
        pages, start = request["pages"], request["end"]
        end = min(start + rng.randint(1, 6), len(pages) * PAGE)
        if end == start or rng.random() < 0.05:
            del requests[name]  # it ends, or is preempted
            continue
        held.forget(pages, start, end)
        for slot in slots(pages, start, end):
            written += 1
            target[slot] = written
        # Of what was written some is rejected, and written again by the next step.
        request["end"] = end = rng.randint(start + 1, end)
        truth = slots(pages, 0, end)
        lacking = np.flatnonzero(target[truth] != draft[truth])
        expected = int(lacking[0]) if len(lacking) else end
        assert held.first_lacking(pages, end) == expected
        if rng.random() < 0.6:  # the draft catches up, not always with all
            reach = rng.randint(expected, end)
            held.add(pages, expected, reach)
            caught_up = slots(pages, expected, reach)
            draft[caught_up] = target[caught_up]
