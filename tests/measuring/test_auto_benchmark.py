# SPDX-License-Identifier: Apache-2.0
"""The statistics of benchmarks/auto.py."""

import inspect
import random
from statistics import mean, median

import auto
import pytest

from vllm_magicdec.adaptive.controller import Controller
from vllm_magicdec.adaptive.step_times import StepTimes
from vllm_magicdec.adaptive.value import AcceptanceValue, Choice


@pytest.mark.parametrize("count", [7, 20])
def test_the_interval_contains_the_median_in_90_percent(count):
    rng = random.Random(0)

    def holds() -> bool:
        low, high = auto.median_interval([rng.lognormvariate(0, 0.05) for _ in range(count)])
        return low <= 1.0 <= high

    assert mean(holds() for _ in range(4000)) > 0.9 - 0.015  # 3 standard errors


def test_a_pinned_controller_takes_every_lesson_and_learns_nothing():
    controller = Controller(AcceptanceValue(range(5), 256), StepTimes())
    before = vars(controller).copy()
    lesson = dict.fromkeys(inspect.signature(controller.observe).parameters)
    with auto.pinned(controller, Choice(3)):
        controller.observe(**lesson)
        assert controller.choose(8, 64_000) == Choice(3)
    assert vars(controller) == before


def test_turns_change_direction_so_that_a_drift_favours_nobody():
    clock = iter(range(100))
    turns = auto.take_turns({"best": lambda: next(clock), "auto": lambda: next(clock)}, 4)
    assert turns == {"best": [0, 3, 4, 7], "auto": [1, 2, 5, 6]}
    assert median(a - b for a, b in zip(turns["auto"], turns["best"], strict=True)) == 0
