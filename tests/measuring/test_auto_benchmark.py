# SPDX-License-Identifier: Apache-2.0
"""The statistics of benchmarks/auto.py."""

import inspect
import math
import random
import sys
from contextlib import contextmanager
from statistics import mean, median
from types import SimpleNamespace

import engines
import pytest

sys.path.insert(0, str(engines.HERE.parent / "benchmarks"))
import auto

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


class ImaginedEngine:
    """An engine whose rounds take the contender's time; the machine's speed and the acceptance vary."""

    def __init__(self):
        self.seconds_per_round = 0.0
        self.now = 0.0
        self.made = {}
        self.most_at_once = 0

    @contextmanager
    def held(self, seconds_per_round):
        self.seconds_per_round = seconds_per_round
        yield
        self.seconds_per_round = 0.0

    def add_request(self, request_id, prompt, params):
        self.made[request_id] = 0
        self.most_at_once = max(self.most_at_once, len(self.made))

    def step(self):
        self.now += self.seconds_per_round * (1 + 0.4 * math.sin(self.now / 3))
        for request_id, made in self.made.items():
            self.made[request_id] += 1 if not made else 9 if made < 400 else 3
        return [
            SimpleNamespace(
                request_id=name, finished=False, outputs=[SimpleNamespace(token_ids=range(made))]
            )
            for name, made in self.made.items()
        ]

    def abort_request(self, request_ids):
        for request_id in request_ids:
            del self.made[request_id]

    def has_unfinished_requests(self):
        return bool(self.made)


def test_a_duel_compares_on_the_same_text_whatever_the_pace(monkeypatch):
    engine = ImaginedEngine()
    monkeypatch.setattr(auto.time, "perf_counter", lambda: engine.now)
    llm = SimpleNamespace(llm_engine=engine)
    rivals = {
        "8": auto.Contender(llm, lambda: engine.held(0.010)),
        "auto": auto.Contender(llm, lambda: engine.held(0.011)),
    }
    shares = []
    for _ in range(9):
        speeds = auto.duel(rivals, [[1]] * 4, 768 // auto.PIECE)
        shares.append(speeds["auto"] / speeds["8"])
    assert engine.most_at_once == 4
    assert median(shares) == pytest.approx(10 / 11, rel=0.01)
    assert max(shares) - min(shares) < 0.05
