# SPDX-License-Identifier: Apache-2.0
"""The tour of `magicdec profile`, on an imagined machine."""

import argparse
from types import SimpleNamespace

import pytest
import vllm
from imagined_engine import BUDGETS, MAX_TOKENS, Engine, alike, all_choices

from vllm_magicdec.adaptive.controller import PLAIN, Choice
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.planner import profile
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


@pytest.mark.parametrize(("is_cpu", "executor"), [(True, "mp"), (False, None)])
def test_on_a_cpu_the_worker_has_a_servers_threads(monkeypatch, tmp_path, is_cpu, executor):
    """vLLM binds those of a worker that has a process; one in the engine's process takes all cores."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # it is changed

    class Made(Exception):
        """An engine, with these arguments."""

    def make(**arguments):
        raise Made(arguments)

    monkeypatch.setattr(vllm, "LLM", make)
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    parser = argparse.ArgumentParser()
    profile.add_command(parser.add_subparsers())
    options = parser.parse_args(["profile", "--model", "m", "--out", str(tmp_path / "profile.json")])
    with pytest.raises(Made) as made:
        options.run(options)
    assert made.value.args[0].get("distributed_executor_backend") == executor
