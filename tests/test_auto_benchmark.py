# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/auto.py makes of its turns."""

import random
import sys
from statistics import mean

import engines
import pytest

sys.path.insert(0, str(engines.HERE.parent / "benchmarks"))
import auto


def test_noise_alone_does_not_make_the_others_look_better():
    """Six contenders of the same speed: the mean share is 1, where the best median would give less."""
    rng = random.Random(0)
    names = ("plain", "1", "2", "4", "8", "auto")

    def turns() -> dict[str, list[float]]:
        return {name: [100 * rng.lognormvariate(0, 0.05) for _ in range(5)] for name in names}

    shares = [auto.share_of_best(turns()) for _ in range(2000)]
    assert mean(shares) == pytest.approx(1.0, abs=0.005)  # 4 standard errors


def test_the_share_is_of_the_contender_that_is_best_elsewhere():
    speeds = {
        "plain": [10.0, 10.0, 50.0, 10.0, 10.0],
        "8": [20.0, 20.0, 20.0, 20.0, 20.0],
        "auto": [19.0, 18.0, 20.0, 19.0, 19.0],
    }
    assert auto.share_of_best(speeds) == pytest.approx(0.95)
