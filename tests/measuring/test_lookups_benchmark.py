# SPDX-License-Identifier: Apache-2.0
"""The statistics of benchmarks/lookups.py, confidence.py and auto.py on known turns."""

import random
from statistics import mean

import auto
import confidence
import lookups as benchmark
import pytest

PROMPTS = [[0] * 100] * 2


def turn(tokens_per_s: float, *counts: int) -> benchmark.Counted:
    return benchmark.Counted(tokens_per_s, 10.0, 2.0, *(counts or (0,) * 5))


def test_ratios_are_of_turns_of_one_pass_and_counts_of_all_turns():
    turns = {
        "plain": [turn(10), turn(20), turn(10)],
        "fixed": [turn(20, 10, 30, 0, 80, 60), turn(40, 10, 10, 0, 80, 40), turn(30, 5, 10, 0, 40, 20)],
        "auto-off": [turn(20), turn(20), turn(20)],
        "auto": [turn(30, 0, 0, 50, 50, 25), turn(50, 0, 0, 25, 50, 25), turn(20)],
    }
    plain, fixed, before, chosen = benchmark.rows_of("stdlib", PROMPTS, turns)
    assert (plain.over_plain, fixed.over_plain, chosen.over_plain) == (1.0, 2.0, 2.5)
    assert (before.over_before, chosen.over_before) == (1.0, 1.5)
    assert (fixed.passes_per_round, chosen.passes_per_round) == (2.0, None)
    assert (fixed.unread_share, chosen.unread_share) == (0.0, 0.75)
    assert fixed.verified_per_accepted == 200 / 120
    assert (plain.batch, plain.context, plain.verified_per_accepted) == (2, 100, None)


def test_calibration_has_as_many_drafts_in_every_group_and_compares_means():
    seen = [(place / 100, place >= 30) for place in range(100)]
    points = confidence.calibration(seen[::-1])
    assert [point["drafts"] for point in points] == [10] * 10
    assert [point["seen"] for point in points] == [0.0] * 3 + [1.0] * 7
    assert points[0]["predicted"] == pytest.approx(0.045)
    assert confidence.calibration([]) == []


def test_ratios_of_thresholds_are_to_the_turn_that_verified_all():
    def of(tokens_per_s: float, tokens_per_round: float) -> confidence.Turn:
        return confidence.Turn(tokens_per_s, tokens_per_round, 1.2)

    turns = {0.0: [of(10, 4), of(20, 4)], 0.4: [of(15, 2), of(30, 3)]}
    uncut, cut = confidence.rows_of("stdlib", 6000, turns)
    assert (uncut.speed_of_uncut, cut.speed_of_uncut, cut.tokens_of_uncut) == (1.0, 1.5, 0.625)


@pytest.mark.parametrize("count", [7, 20])
def test_the_interval_contains_the_median_in_90_percent(count):
    rng = random.Random(0)

    def holds() -> bool:
        low, high = auto.median_interval([rng.lognormvariate(0, 0.05) for _ in range(count)])
        return low <= 1.0 <= high

    assert mean(holds() for _ in range(4000)) > 0.9 - 0.015  # 3 standard errors
