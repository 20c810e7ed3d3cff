# SPDX-License-Identifier: Apache-2.0
"""Simulated step times, and the choices of a controller on the simulated machine."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from vllm_magicdec.adaptive.controller import Controller
from vllm_magicdec.adaptive.step_times import Step, StepTimes
from vllm_magicdec.adaptive.value import PLAIN, AcceptanceValue, Choice

MAX_TOKENS = 8
BUDGET = 512


def make_controller(times: StepTimes | None = None) -> Controller:
    return Controller(AcceptanceValue(range(MAX_TOKENS + 1), BUDGET), times or StepTimes())


def alike(num_reqs: int, context_tokens: int, choice: Choice) -> Step:
    budget = BUDGET if choice.drafts else 0
    return Step(num_reqs, context_tokens, choice.drafts, choice.drafts, budget)


def all_choices() -> list[Choice]:
    return [PLAIN, *map(Choice, range(1, MAX_TOKENS + 1))]


@dataclass
class Engine:
    """Simulated step times that the controller's own model cannot represent exactly."""

    pass_seconds: float = 4e-3
    seconds_per_context_token: float = 1e-6
    verification: Callable[[int], float] = lambda queries: 1.0 if queries == 1 else 1.2 + 0.05 * queries
    noise: float = 0.05
    hiccups: float = 0.005

    def seconds(self, step: Step) -> float:
        n, context = step.num_reqs, step.context_tokens
        queries = step.verified + 1
        target = self.pass_seconds * (1 + 0.04 * n * queries)
        target += self.seconds_per_context_token * context * self.verification(queries)
        read = min(context, n * step.budget)
        draft = self.pass_seconds * (0.7 + 0.04 * n) + self.seconds_per_context_token * read
        return target + step.drafted * draft

    def measure(self, step: Step, rng: random.Random) -> float:
        factor = rng.lognormvariate(0, self.noise)
        if rng.random() < self.hiccups:
            factor *= 10
        return self.seconds(step) * factor
