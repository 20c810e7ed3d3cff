# SPDX-License-Identifier: Apache-2.0
"""Learned probabilities, and the choice among sources by them; test_lookups.py has sources that learn."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_magicdec.lookup.calibration import Calibration, choose
from vllm_magicdec.lookup.context_index import Match
from vllm_magicdec.lookup.continuation import Continuation

NONE = Match(0, [], [])


def chance_of(calibration: Calibration, length: int, share: float) -> float:
    (chance,), _ = calibration.chances(length, [share], 0.0)
    return chance


@pytest.mark.parametrize("true_chance", [0.15, 0.6, 0.99])
def test_chances_become_those_seen(true_chance):
    calibration, rng = Calibration(), random.Random(5)
    for _ in range(4000):
        share = rng.choice([0.5, 1.0])
        calibration.observe(6, share, rng.random() < true_chance * share)
    assert chance_of(calibration, 6, 1.0) == pytest.approx(true_chance, abs=0.06)
    assert chance_of(calibration, 6, 0.5) == pytest.approx(true_chance / 2, abs=0.03)
    untouched = Calibration()
    assert all(chance_of(calibration, n, 1.0) == chance_of(untouched, n, 1.0) for n in range(2, 6))


def test_nothing_is_chosen_without_a_likely_match():
    unlikely = Match(2, [1, 2], [0.05, 1.0])
    for matches in ([NONE, NONE], [unlikely, NONE]):
        assert choose(matches, [Calibration(), Calibration()], 0.1) == (0, Continuation([], []))


shares = st.lists(st.floats(0.05, 1.0), max_size=6)


@given(st.lists(st.tuples(st.integers(2, 32), shares), min_size=1, max_size=3), st.floats(0.01, 0.9))
def test_no_other_source_has_more_expected_tokens(found, min_acceptance):
    matches = [Match(length, list(range(len(parts))), parts) for length, parts in found]
    calibration = Calibration()
    for step in range(100):
        calibration.observe(step % 40, 0.7, step % 3 > 0)

    def chances_of(match):
        chances, reached = [], 1.0
        for step, share in enumerate(match.shares):
            reached *= chance_of(calibration, match.length + step, share)
            if reached < min_acceptance:
                break
            chances.append(chance_of(calibration, match.length + step, share))
        return chances

    def expected(chances):
        return sum(math.prod(chances[: step + 1]) for step in range(len(chances)))

    source, choice = choose(matches, [calibration] * len(matches), min_acceptance)
    assert choice.chances == chances_of(matches[source])
    assert choice.tokens == matches[source].tokens[: len(choice.chances)]
    most = max(expected(chances_of(match)) for match in matches)
    assert expected(choice.chances) == pytest.approx(most)
    for match in matches:
        of_match = chances_of(match)
        found_chances = calibration.chances(match.length, match.shares, min_acceptance)
        assert found_chances == (of_match, pytest.approx(expected(of_match)))
