# SPDX-License-Identifier: Apache-2.0
"""The controller against simulated engines whose best choice is known."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from vllm_magicdec.controller import Acceptance, Controller
from vllm_magicdec.step_times import Step, StepTimes, TimedStep

MAX_TOKENS = 8
BUDGET = 512


@dataclass
class Engine:
    """Step times of an imagined machine, which the controller's own model does not contain."""

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
        read = min(context, n * BUDGET)
        draft = self.pass_seconds * (0.7 + 0.04 * n) + self.seconds_per_context_token * read
        return target + step.drafted * draft

    def measure(self, step: Step, rng: random.Random) -> float:
        factor = rng.lognormvariate(0, self.noise)
        if rng.random() < self.hiccups:
            factor *= 10
        return self.seconds(step) * factor


@dataclass
class Moment:
    """The load in one step of a trace."""

    num_reqs: int
    context_tokens: int
    acceptance: float


# The load by tokens made so far, so that every choice does the same work.
Trace = Callable[[float], Moment]


def steady(num_reqs: int, context: int, acceptance: float) -> Trace:
    return lambda tokens: Moment(num_reqs, num_reqs * context, acceptance)


def drifting(tokens: float) -> Moment:
    """Acceptance falls and rises again."""
    return Moment(8, 8 * 16_000, 0.55 + 0.4 * abs(tokens % 20_000 - 10_000) / 10_000)


def mixed(tokens: float) -> Moment:
    """Ever more long requests among short ones, then fewer again."""
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
    choose: Callable[[Moment], int],
    trace: Trace,
    seed: int,
    controller: Controller | None = None,
    num_tokens: int = 40_000,
    engine: Engine | None = None,
) -> float:
    """Expected tokens per second of a run over `num_tokens`; the controller sees noisy times."""
    rng, engine = random.Random(seed), engine or Engine()
    total_seconds = total_tokens = 0.0
    verified, previous_reqs = 0, 0
    while total_tokens < num_tokens:
        moment = trace(total_tokens)
        if moment.num_reqs != previous_reqs:
            verified = 0  # new requests bring no drafts
        drafted = choose(moment)
        step = Step(moment.num_reqs, moment.context_tokens, verified, drafted)
        rounds = [(verified, accepted(verified, moment.acceptance, rng)) for _ in range(moment.num_reqs)]
        total_seconds += engine.seconds(step)
        total_tokens += sum(1 + stood for _, stood in rounds)
        if controller is not None:
            controller.observe(rounds if verified else [], TimedStep(step, engine.measure(step, rng)))
        verified, previous_reqs = drafted, moment.num_reqs
    return total_tokens / total_seconds


def accepted(drafted: int, rate: float, rng: random.Random) -> int:
    stood = 0
    while stood < drafted and rng.random() < rate:
        stood += 1
    return stood


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", TRACES)
def test_close_to_the_best_fixed_choice_and_never_below_plain(name: str, seed: int) -> None:
    trace = TRACES[name]
    controller = Controller(MAX_TOKENS, StepTimes(BUDGET))
    achieved = simulate(lambda m: controller.choose(m.num_reqs, m.context_tokens), trace, seed, controller)
    fixed = [simulate(lambda m, k=k: k, trace, seed) for k in range(MAX_TOKENS + 1)]
    assert achieved > 0.95 * max(fixed)
    assert achieved > 0.98 * fixed[0]


def test_beats_every_fixed_choice_where_the_best_one_changes() -> None:
    controller = Controller(MAX_TOKENS, StepTimes(BUDGET))
    achieved = simulate(lambda m: controller.choose(m.num_reqs, m.context_tokens), drifting, 0, controller)
    assert achieved > max(simulate(lambda m, k=k: k, drifting, 0) for k in range(MAX_TOKENS + 1))


def test_does_not_flap_at_steady_load() -> None:
    controller = Controller(MAX_TOKENS, StepTimes(BUDGET))
    trace = steady(8, 8_000, 0.8)
    simulate(lambda m: controller.choose(m.num_reqs, m.context_tokens), trace, 0, controller)
    settled = controller.num_switches
    simulate(lambda m: controller.choose(m.num_reqs, m.context_tokens), trace, 1, controller)
    assert controller.num_switches - settled <= 4


def test_a_profile_spares_the_calibration() -> None:
    engine, contexts = Engine(), (100, 1_000, 4_000, 16_000)
    steps = [
        Step(n, n * context, length, length) for n in (1, 8) for context in contexts for length in range(9)
    ]
    times = StepTimes.of(BUDGET, [TimedStep(step, engine.seconds(step)) for step in steps])
    controller = Controller(MAX_TOKENS, times)
    for _ in range(100):
        controller.acceptance.observe(8, 8)
    assert controller.choose(1, 100) == 0 or engine_gains(engine, 1, 100)
    assert controller.choose(8, 8 * 16_000) >= 4


def engine_gains(engine: Engine, num_reqs: int, context: int) -> bool:
    plain = engine.seconds(Step(num_reqs, num_reqs * context, 0, 0))
    return any(
        engine.seconds(Step(num_reqs, num_reqs * context, k, k)) / (k + 1) < plain for k in range(1, 9)
    )


def test_least_context_is_where_the_engine_breaks_even() -> None:
    engine = Engine()
    contexts = [100 * 2**i for i in range(9)]
    steps = [Step(8, 8 * c, k, k) for c in contexts for k in range(9)]
    times = StepTimes.of(BUDGET, [TimedStep(step, engine.seconds(step)) for step in steps])
    controller = Controller(MAX_TOKENS, times)
    for index in range(1000):
        controller.acceptance.observe(8, 8 if index % 4 else 1)
    tokens = controller.acceptance.tokens_per_round()

    def gains(context: int) -> bool:
        rates = [tokens[k] / engine.seconds(Step(8, 8 * context, k, k)) for k in range(9)]
        return max(rates) > 1.02 * rates[0]

    least = controller.least_context(8, 25_600)
    assert least is not None
    assert gains(int(1.25 * least)) and not gains(int(0.8 * least))


def test_acceptance_recovers_the_rates_it_was_drawn_from() -> None:
    rng = random.Random(0)
    acceptance = Acceptance(4, memory=5_000)
    true_rates = [0.9, 0.8, 0.7, 0.6]
    for _ in range(20_000):
        stood = 0
        while stood < 4 and rng.random() < true_rates[stood]:
            stood += 1
        acceptance.observe(4, stood)
    # Standard error of a rate at the last place: sqrt(0.6 * 0.4 / (5000 * 0.5)) = 0.01.
    assert acceptance.rates() == pytest.approx(true_rates, abs=0.04)


def test_speedup_that_is_reported_is_the_one_achieved() -> None:
    controller = Controller(MAX_TOKENS, StepTimes(BUDGET))
    trace, engine = steady(8, 16_000, 0.9), Engine(hiccups=0.0)
    achieved = simulate(
        lambda m: controller.choose(m.num_reqs, m.context_tokens), trace, 0, controller, engine=engine
    )
    plain = simulate(lambda m: 0, trace, 0)
    assert controller.achieved_speedup == pytest.approx(achieved / plain, rel=0.1)
    forecast = controller.forecast(8, 8 * 16_000)
    assert forecast.speedup == pytest.approx(achieved / plain, rel=0.1)
    assert 0.0 < forecast.draft_share < 1.0


def test_profile_file_round_trip(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "profile.json"
    steps = [Step(n, n * 1000, k, k) for n in (1, 4) for k in (0, 2, 4)]
    times = StepTimes.of(BUDGET, [TimedStep(step, Engine().seconds(step)) for step in steps])
    times.save(path, {"model": "m"})
    loaded = StepTimes.load(path)
    for step in steps:
        assert loaded.predict(step) == pytest.approx(times.predict(step), rel=1e-6)
    path.write_text("{}")
    with pytest.raises(ValueError, match="magicdec profile"):
        StepTimes.load(path)
