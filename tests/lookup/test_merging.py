# SPDX-License-Identifier: Apache-2.0
"""The choice among sources, and what all of them learn."""

import math

import pytest
from calibrated import chance_of
from hypothesis import given
from hypothesis import strategies as st

from vllm_magicdec.lookup.calibration import Calibration, choose, learn
from vllm_magicdec.lookup.context_index import Match

NONE = Match(0, [], [])


def test_nothing_is_chosen_without_a_likely_match():
    unlikely = Match(2, [1, 2], [0.05, 1.0])
    for matches in ([NONE, NONE], [unlikely, NONE]):
        choice = choose(matches, [Calibration(), Calibration()], 0.1)
        assert (choice.source, choice.tokens, choice.chances) == (0, [], [])


shares = st.lists(st.floats(0.05, 1.0), max_size=6)


@given(st.lists(st.tuples(st.integers(2, 32), shares), min_size=1, max_size=3), st.floats(0.01, 0.9))
def test_no_other_source_has_more_expected_tokens(found, min_acceptance):
    matches = [Match(length, list(range(len(parts))), parts) for length, parts in found]
    calibration = Calibration()

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

    choice = choose(matches, [calibration] * len(matches), min_acceptance)
    assert choice.chances == chances_of(matches[choice.source])
    assert choice.tokens == matches[choice.source].tokens[: len(choice.chances)]
    most = max(expected(chances_of(match)) for match in matches)
    assert expected(choice.chances) == pytest.approx(most)


def test_a_source_that_was_wrong_is_chosen_again_once_it_is_right():
    """The source that is not chosen learns as well."""
    calibrations = [Calibration(), Calibration()]
    matches = [Match(8, [1, 2], [1.0, 1.0]), Match(8, [3, 4], [1.0, 1.0])]
    for truth, source in (([3, 4], 1), ([1, 2], 0), ([3, 4], 1)):
        for _ in range(2000):
            learn(matches, calibrations, truth)
        assert choose(matches, calibrations, 0.1).source == source
