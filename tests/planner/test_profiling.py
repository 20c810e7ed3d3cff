# SPDX-License-Identifier: Apache-2.0
"""The tour of `magicdec profile`, on an imagined machine."""

import pytest
from imagined_engine import BUDGETS, MAX_TOKENS, Engine, alike, all_choices

from vllm_magicdec.adaptive.controller import PLAIN, Choice
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.planner.profile import _Tour, tokens_to_grow

LENGTHS = range(MAX_TOKENS + 1)


def test_the_tour_meets_every_length_and_every_budget():
    tour = _Tour(LENGTHS, BUDGETS)
    choices = [tour.choose(1, 100) for _ in range(tour.num_steps)]
    lengths = {Choice(length, BUDGETS[-1]) for length in LENGTHS if length}
    budgets = {Choice(MAX_TOKENS, budget) for budget in BUDGETS}
    assert set(choices) == {PLAIN} | lengths | budgets
    # Were every draft accepted.
    assert sum(choice.drafts + 1 for choice in choices) <= tokens_to_grow(MAX_TOKENS, len(BUDGETS))


def test_times_of_lengths_and_budgets_that_did_not_meet_are_predicted():
    engine, times = Engine(), StepTimes()
    for num_reqs in (1, 8):
        for context in (256, 2_048, 16_000):
            tour, verified = _Tour(LENGTHS, BUDGETS), 0
            for _ in range(tour.num_steps):
                choice = tour.choose(num_reqs, num_reqs * context)
                step = Step(num_reqs, num_reqs * context, verified, *choice)
                times.add(TimedStep(step, engine.seconds(step)))
                verified = choice.drafts
    times.fit()
    for context in (256, 2_048, 16_000):
        for choice in all_choices(BUDGETS):
            step = alike(8, 8 * context, choice)
            assert times.predict(step) == pytest.approx(engine.seconds(step), rel=0.05)
