# SPDX-License-Identifier: Apache-2.0
"""What is broken is tried ever more seldom, and used again when it works."""

import itertools
import random

import pytest

from vllm_magicdec.drafting.pauses import (
    FAILURES_BEFORE_A_PAUSE,
    FIRST_PAUSE,
    GROWTH,
    LONGEST_PAUSE,
    Pauses,
    logger,
)


def tries(pauses: Pauses, num_rounds: int, works=lambda number: False) -> list[int]:
    """Return the rounds with a try; `works(round)` is its result."""
    tried = []
    for number in range(num_rounds):
        if pauses.is_over():
            tried.append(number)
            if works(number):
                pauses.note_success()
            else:
                pauses.note_failure()
    return tried


@pytest.fixture
def pauses() -> Pauses:
    return Pauses("Drafting", "steps go on without")


def test_pauses_grow_up_to_the_longest(pauses):
    tried = tries(pauses, 100_000)
    assert tried[:FAILURES_BEFORE_A_PAUSE] == list(range(FAILURES_BEFORE_A_PAUSE))
    rounds_off = [later - earlier - 1 for earlier, later in itertools.pairwise(tried)]
    expected = [min(FIRST_PAUSE * GROWTH**number, LONGEST_PAUSE) for number in range(len(tried))]
    assert rounds_off[FAILURES_BEFORE_A_PAUSE - 1 :] == expected[: len(tried) - FAILURES_BEFORE_A_PAUSE]
    assert rounds_off[-1] == LONGEST_PAUSE and len(tried) < 20


def test_single_failures_cause_no_pause(pauses):
    tried = tries(pauses, 10_000, works=lambda number: number % (FIRST_PAUSE + 1) > 0)
    assert tried == list(range(10_000))


@pytest.mark.parametrize("share_that_works", [0.3, 0.9])
def test_occasional_successes_do_not_prevent_pauses(pauses, share_that_works):
    rng = random.Random(1)
    tried = tries(pauses, 200_000, works=lambda number: rng.random() < share_that_works)
    assert len(tried) < 2_000


def test_a_fixed_component_is_used_again(pauses, monkeypatch):
    said = []
    for level in ("exception", "info"):
        monkeypatch.setattr(logger, level, lambda *args, level=level: said.append(level))
    tried = tries(pauses, 10_000, works=lambda number: number >= 200)
    back = min(number for number in tried if number >= 200)
    assert back < 200 + FIRST_PAUSE * GROWTH**2
    assert tried[tried.index(back) :] == list(range(back, 10_000))
    # By then it is forgiven: as many failures as at first cause as short a pause.
    assert tries(pauses, FIRST_PAUSE + FAILURES_BEFORE_A_PAUSE)[-1] == FAILURES_BEFORE_A_PAUSE - 1
    assert pauses.is_over()
    assert said == ["exception", "info"], "one trace, and that it works again"
