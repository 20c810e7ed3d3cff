# SPDX-License-Identifier: Apache-2.0
"""The controller on simulated engines whose best choice is known."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from imagined_engine import BUDGET, Engine, alike, all_choices, make_controller

from vllm_magicdec.adaptive.controller import Controller
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.adaptive.value import PLAIN, Acceptance, AcceptanceValue, Choice


def follow(controller: Controller) -> Callable[["Moment"], Choice]:
    return lambda moment: controller.choose(moment.num_reqs, moment.context_tokens)


@dataclass
class Moment:
    num_reqs: int
    context_tokens: int
    acceptance: float  # of each draft


# The load by tokens so far, so that every choice does the same work.
Trace = Callable[[float], Moment]


def steady(num_reqs: int, context: int, acceptance: float) -> Trace:
    return lambda tokens: Moment(num_reqs, num_reqs * context, acceptance)


def drifting(tokens: float) -> Moment:
    """Acceptance falls and rises again."""
    return Moment(8, 8 * 16_000, 0.55 + 0.4 * abs(tokens % 20_000 - 10_000) / 10_000)


def mixed(tokens: float) -> Moment:
    long_ones = round(8 * abs(tokens % 15_000 - 7_500) / 7_500)
    return Moment(8, long_ones * 16_000 + (8 - long_ones) * 200, 0.85)


def bursts(tokens: float) -> Moment:
    """A few requests most of the time, then many."""
    num_reqs = 32 if tokens % 8_000 > 6_000 else 2
    return Moment(num_reqs, num_reqs * 4_000, 0.8)


TRACES = {
    "short": steady(4, 100, 0.85),
    "single": steady(1, 2_000, 0.8),
    "long": steady(8, 16_000, 0.9),
    "long-but-rejected": steady(8, 16_000, 0.2),
    "drifting": drifting,
    "mixed": mixed,
    "bursts": bursts,
}


def simulate(
    choose: Callable[[Moment], Choice],
    trace: Trace,
    seed: int,
    controller: Controller | None = None,
    num_tokens: int = 40_000,
    engine: Engine | None = None,
) -> float:
    """Return the expected tokens per second over `num_tokens`; the controller sees noisy times."""
    rng, engine = random.Random(seed), engine or Engine()
    total_seconds = total_tokens = 0.0
    previous, previous_reqs = PLAIN, 0
    while total_tokens < num_tokens:
        moment = trace(total_tokens)
        verified = previous.drafts if moment.num_reqs == previous_reqs else 0  # new requests have no drafts
        choice = choose(moment)
        budget = BUDGET if choice.drafts else 0
        step = Step(moment.num_reqs, moment.context_tokens, verified, choice.drafts, budget)
        rate = moment.acceptance if verified else 0.0
        rounds = [(verified, accepted(verified, rate, rng)) for _ in range(moment.num_reqs)]
        total_seconds += engine.seconds(step)
        total_tokens += sum(1 + num_accepted for _, num_accepted in rounds)
        if controller is not None:
            timed = TimedStep(step, engine.measure(step, rng))
            made = previous if verified else PLAIN
            controller.observe(rounds if verified else [], made, timed, choice)
        previous, previous_reqs = choice, moment.num_reqs
    return total_tokens / total_seconds


def accepted(drafted: int, rate: float, rng: random.Random) -> int:
    return next((i for i in range(drafted) if rng.random() >= rate), drafted)


@pytest.mark.parametrize("name", TRACES)
def test_close_to_the_best_fixed_choice_and_never_below_plain(name: str) -> None:
    trace, seed = TRACES[name], 0
    controller = make_controller()
    achieved = simulate(follow(controller), trace, seed, controller)
    fixed = [simulate(lambda m, c=c: c, trace, seed) for c in all_choices()]
    assert achieved > (1.0 if name == "drifting" else 0.95) * max(fixed)  # the best one changes
    assert achieved > 0.98 * fixed[0]


@dataclass
class EngineWithExpensiveChanges(Engine):
    """A step with other work than the previous one takes ten times as long."""

    latest: tuple[int, int] = (0, 0)

    def seconds(self, step: Step) -> float:
        return super().seconds(step) * (1 if self.latest == (step.verified, step.drafted) else 10)

    def measure(self, step: Step, rng: random.Random) -> float:
        measured = super().measure(step, rng)
        self.latest = step.verified, step.drafted
        return measured


@pytest.mark.parametrize("name", ["long", pytest.param("long-but-rejected", marks=pytest.mark.extended)])
def test_trials_cost_less_than_a_hundredth_of_the_time_as_measured(name: str) -> None:
    """Even if they take longer than predicted. The calibration in the first steps does not count."""
    controller, trace = make_controller(), TRACES[name]
    engine = EngineWithExpensiveChanges()
    simulate(follow(controller), trace, 0, controller, num_tokens=2_000, engine=engine)
    achieved = simulate(follow(controller), trace, 1, controller, num_tokens=200_000, engine=engine)
    chosen = controller.forecast(trace(0).num_reqs, trace(0).context_tokens).choice
    steady_rate = simulate(lambda moment: chosen, trace, 1, num_tokens=200_000)
    assert achieved > 0.99 * steady_rate


def test_a_slow_phase_of_the_machine_does_not_bias_what_it_ran() -> None:
    """One of two steps is measured mostly while everything takes 1.5 times as long."""
    rng = random.Random(0)
    engine = Engine(hiccups=0.0)
    usual, other = (alike(8, 8 * 16_000, Choice(drafts)) for drafts in (4, 6))
    times = StepTimes()

    def run(step: Step, count: int, pace: float = 1.0) -> None:
        for _ in range(count):
            times.add(TimedStep(step, pace * engine.measure(step, rng)))
            times.fit()

    run(other, 4)
    run(usual, 16)
    run(usual, 16, pace=1.5)
    assert times.pace == pytest.approx(1.4, abs=0.1)
    run(other, 8, pace=1.5)
    expected = engine.seconds(other) / engine.seconds(usual)
    assert times.predict(other) / times.predict(usual) == pytest.approx(expected, rel=0.1)


def test_an_error_of_the_fit_at_one_size_is_expected_at_the_next() -> None:
    """Six drafts take 1.2 times as long as any sum of costs explains."""
    engine = Engine()

    def seconds(step: Step) -> float:
        return engine.seconds(step) * (1.2 if step.verified == 6 else 1.0)

    def measure(*contexts: int) -> StepTimes:
        steps = [alike(4, 4 * context, choice) for context in contexts for choice in all_choices()]
        return StepTimes([TimedStep(step, seconds(step)) for step in steps for _ in range(20)])

    six = alike(4, 4 * 2_000, Choice(6))
    for contexts in ((1_000, 4_000), (1_000, 2_000, 4_000)):
        assert measure(*contexts).predict(six) == pytest.approx(seconds(six), rel=0.05)
    far = alike(4, 4 * 256_000, Choice(6))
    times = measure(1_000, 4_000)
    assert times.predict(far) / times.predict(alike(4, 4 * 256_000, Choice(5))) < 1.15


def test_does_not_flap_at_steady_load() -> None:
    controller = make_controller()
    trace = steady(8, 8_000, 0.8)
    simulate(follow(controller), trace, 0, controller)
    settled = controller.num_switches
    simulate(follow(controller), trace, 1, controller)
    assert controller.num_switches - settled <= 4


def test_the_rest_of_a_calibration_waits_for_a_batch_of_its_size():
    """After the first one, calibrations leave out far slower choices: many drafts, as all are rejected."""
    controller, engine, lessons = make_controller(), Engine(), []

    def is_planned(num_reqs: int, is_timed: bool = True) -> bool:
        choice = controller.choose(num_reqs, num_reqs * 4_000, is_timed=is_timed)
        was_planned = controller.is_planned
        while lessons:  # a step is learned after the next one was chosen
            controller.observe(*lessons.pop())
        step = alike(num_reqs, num_reqs * 4_000, choice)
        timed = TimedStep(step, engine.seconds(step)) if is_timed else None
        lessons.append(([(choice.drafts, 0)] * num_reqs if choice.drafts else [], choice, timed, choice))
        return was_planned

    assert not is_planned(8, is_timed=False), "a step that prefills has no usable time"
    first = 0
    while is_planned(8):
        first += 1
        assert not is_planned(8, is_timed=False)
    assert is_planned(1), "another size"
    second = 1
    assert not is_planned(8) and not is_planned(1, is_timed=False) and not is_planned(2, is_timed=False)
    while is_planned(1):
        second += 1
    assert (first, second) == (16, 8), "none is lost"
    assert controller.explorer.credit_seconds > 0, "it is not charged as trials are"


def test_a_profile_replaces_the_calibration() -> None:
    engine, contexts = Engine(), (100, 1_000, 4_000, 16_000)
    steps = [alike(n, n * context, c) for n in (1, 8) for context in contexts for c in all_choices()]
    times = StepTimes([TimedStep(step, engine.seconds(step)) for step in steps])
    controller = make_controller(times=times)
    for _ in range(100):
        controller.value.acceptance.observe(8, 8)
    assert controller.choose(8, 8 * 16_000).drafts >= 4


def test_acceptance_recovers_the_true_rates() -> None:
    rng = random.Random(0)
    acceptance = Acceptance(4, memory=5_000)
    true_rates = [0.9, 0.8, 0.7, 0.6]
    for _ in range(20_000):
        acceptance.observe(4, next((i for i in range(4) if rng.random() >= true_rates[i]), 4))
    # Standard error of the rate at the last position: sqrt(0.6 * 0.4 / (5000 * 0.5)) = 0.01.
    assert acceptance.rates() == pytest.approx(true_rates, abs=0.04)


def test_the_reported_speedup_is_the_achieved_one() -> None:
    controller = make_controller()
    trace, engine = steady(8, 16_000, 0.9), Engine(hiccups=0.0)
    achieved = simulate(follow(controller), trace, 0, controller, engine=engine)
    plain = simulate(lambda m: PLAIN, trace, 0)
    assert controller.achieved_speedup == pytest.approx(achieved / plain, rel=0.1)
    forecast = controller.forecast(8, 8 * 16_000)
    assert forecast.speedup == pytest.approx(achieved / plain, rel=0.1)
    assert 0.0 < forecast.draft_share < 1.0


def test_profile_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    work = ((0, 0), (2, 256), (4, 512))
    steps = [Step(n, n * 1000, drafts, drafts, budget) for n in (1, 4) for drafts, budget in work]
    times = StepTimes([TimedStep(step, Engine().seconds(step)) for step in steps for _ in range(5)])
    times.save(path, {"model": "m"})
    loaded = StepTimes.load(path)
    assert loaded.budgets == times.budgets == (256, 512)
    for step in steps:
        assert loaded.predict(step) == pytest.approx(times.predict(step), rel=1e-6)
    path.write_text("{}")
    with pytest.raises(ValueError, match="magicdec profile"):
        StepTimes.load(path)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [(range(9), {0, 2, 4, 8}), ((0, 1, 3, 7), {0, 1, 3, 7}), ((0, 7), {0, 7}), ((0, 3, 7), {0, 3, 7})],
)
def test_the_first_steps_try_few_drafts_and_many(lengths, expected):
    controller = Controller(AcceptanceValue(lengths, BUDGET), StepTimes())
    first = controller.choose(4, 64_000)
    plan = [first, *(controller.choose(4, 64_000) for _ in range(len(controller.explorer._first)))]
    assert {choice.drafts for choice in plan} == expected
