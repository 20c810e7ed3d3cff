# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/auto.py makes of its turns."""

import random
import sys
from statistics import mean, median

import engines
import pytest

sys.path.insert(0, str(engines.HERE.parent / "benchmarks"))
import auto


@pytest.mark.parametrize("count", [7, 9, 20])
def test_the_interval_holds_the_median_as_often_as_it_says(count):
    rng = random.Random(0)

    def holds() -> bool:
        low, high = auto.median_interval([rng.lognormvariate(0, 0.05) for _ in range(count)])
        return low <= 1.0 <= high

    assert mean(holds() for _ in range(4000)) > 0.9 - 0.015  # 3 standard errors


def test_turns_change_direction_so_that_a_drift_favours_nobody():
    clock = iter(range(100))
    turns = auto.take_turns({"best": lambda: next(clock), "auto": lambda: next(clock)}, 4)
    assert turns == {"best": [0, 3, 4, 7], "auto": [1, 2, 5, 6]}
    assert median(a - b for a, b in zip(turns["auto"], turns["best"], strict=True)) == 0
