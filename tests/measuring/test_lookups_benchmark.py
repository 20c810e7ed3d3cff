# SPDX-License-Identifier: Apache-2.0
"""The statistics of benchmarks/lookups.py and confidence.py on known turns."""

from dataclasses import asdict

import confidence
import lookups as benchmark
import pytest
from common.tables import markdown

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
    plain, fixed, before, auto = benchmark.rows_of("stdlib", PROMPTS, turns)
    assert (plain.over_plain, fixed.over_plain, auto.over_plain) == (1.0, 2.0, 2.5)
    assert (before.over_before, auto.over_before) == (1.0, 1.5)
    assert (fixed.passes_per_round, auto.passes_per_round) == (2.0, None)
    assert (fixed.unread_share, auto.unread_share) == (0.0, 0.75)
    assert fixed.verified_per_accepted == 200 / 120
    assert (plain.batch, plain.context, plain.verified_per_accepted) == (2, 100, None)
    record = {"engine": {"model": "m", "dtype": "d"}, "rows": [asdict(row) for row in (plain, fixed, auto)]}
    assert markdown(benchmark.table_of([record])).count("| 2 | 100 |") == 3


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
    record = {"engine": {"model": "m"}, "rows": [asdict(uncut), asdict(cut)]}
    assert "| stdlib | 6,000 | 0.4 | 22 | 150 % |" in markdown(confidence.table_of([record]))
