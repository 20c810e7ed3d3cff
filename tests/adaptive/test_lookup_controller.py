# SPDX-License-Identifier: Apache-2.0
"""The thresholds of the controller with lookups, on a simulated machine whose rounds differ.

Requests alternate between stretches of text that lookups predict and others. A worker knows the acceptance
of its lookups and drafts, and applies the plan by the rules of `drafting.staged`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf
from statistics import mean

import pytest
from imagined_engine import Engine

from vllm_magicdec.adaptive.controller import Controller
from vllm_magicdec.adaptive.draft_plan import DraftPlan, bucket_of
from vllm_magicdec.adaptive.lookup_value import LookupValue
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.adaptive.value import PLAIN, Choice, RoundInfo
from vllm_magicdec.drafting.staged import _gain, _RequestDrafts, _unfinished, _worth_verifying
from vllm_magicdec.lookup.continuation import MIN_ACCEPTANCE, Continuation

MAX_DRAFTS, BUDGET, CONTEXT, BATCH = 16, 512, 16_000, 4
STRETCH = 60  # tokens of a request


def make_controller() -> Controller:
    return Controller(LookupValue(MAX_DRAFTS, BUDGET), StepTimes())


def verification(queries: int) -> float:
    return 1.0 if queries <= 1 else 1.0 + 0.1 * queries


# By the cost of a draft step: 0.08 or 0.33 of a plain step.
MACHINES = {
    "cheap": Engine(verification=verification, hiccups=0.0),
    "expensive": Engine(pass_seconds=40e-3, verification=verification, hiccups=0.0),
}


@dataclass(frozen=True)
class Text:
    draft: float  # acceptance of the draft's own tokens
    lookup: float = 0.0  # acceptance of lookups in predicted stretches
    predicted: float = 0.0  # share of stretches that lookups predict
    num_found: int = 12  # tokens per lookup there
    machine: str = "cheap"
    later: float | None = None  # acceptance of drafts in every other 500 rounds
    checked_ahead: int = 1  # drafts per draft step in predicted stretches


TEXTS = {
    "predicted nowhere": Text(0.9),
    "predicted everywhere": Text(0.9, 0.97, 1.0),
    "predicted at times": Text(0.9, 0.97, 0.5),
    "predicted at times, poor drafts": Text(0.7, 0.97, 0.5),
    "predicted at times, expensive drafts": Text(0.9, 0.97, 0.5, machine="expensive"),
    "nothing helps": Text(0.2),
    "only lookups help": Text(0.2, 0.95, 0.5),
    "wrongly predicted": Text(0.9, 0.3, 0.8),
    "expensive drafts at 0.85": Text(0.85, machine="expensive"),
    "expensive drafts at 0.9": Text(0.9, machine="expensive"),
    "expensive drafts, nothing helps": Text(0.5, machine="expensive"),
    "checked ahead": Text(0.95, 0.9, 0.7, num_found=4, checked_ahead=4),
    "checked ahead by expensive drafts": Text(
        0.98, 0.9, 0.7, num_found=4, checked_ahead=4, machine="expensive"
    ),
}


def job_after_job(tokens: int) -> int:
    """Running requests of an offline job of eight, which end one after the other."""
    return min(8, 8 - (tokens % 1000 - 600) // 50)


def draft(
    plan: DraftPlan, text: Text, chance: float, is_predicted: bool, num_reqs: int
) -> tuple[int, int, float, int]:
    """Return drafts per request, draft steps, the acceptance of a draft, and the round's bucket."""
    if not plan:
        return 0, 0, 0.0, 0
    num_found = text.num_found if is_predicted else 0
    found = Continuation([0] * num_found, [text.lookup] * num_found)
    bucket = bucket_of(sum(reached for reached in found.reached if reached >= MIN_ACCEPTANCE))
    plan = plan.for_bucket(bucket)
    likely = [reached for reached in found.reached if reached >= max(plan.min_acceptance, MIN_ACCEPTANCE)]
    expected = num_reqs * sum(reached - plan.min_acceptance for reached in likely)
    if plan.lookups_alone or expected >= plan.min_expected_accepted:
        return len(likely), 0, text.lookup, bucket
    own, num_steps = _RequestDrafts(int(plan)), 0
    while _unfinished({0: own}, plan):
        num_ahead = min(text.checked_ahead - 1 if is_predicted else 0, int(plan) - len(own.tokens) - 1)
        ahead = Continuation([0] * num_ahead, [text.lookup] * num_ahead)
        if num_steps and _gain([own.chance] * num_reqs, [ahead] * num_reqs, chance, plan) < plan.min_gain:
            break
        for _ in range(1 + num_ahead):
            own.tokens.append(0)
            own.reached.append(own.chance * chance)
        num_steps += 1
    return len(_worth_verifying(own, plan, is_probabilistic=False)), num_steps, chance, bucket


def simulate(
    text: Text,
    seed: int,
    plan_of: Callable[[int, bool], DraftPlan],
    controller=None,
    steps=1000,
    num_reqs_at: Callable[[int], int] = lambda tokens: BATCH,
) -> float:
    """Return tokens per second; `plan_of` gets the number of requests, and whether a step's time counts."""
    rng, seconds, tokens = random.Random(seed), 0.0, 0
    verified, chance, made, info, num_before = 0, 0.0, PLAIN, RoundInfo(), 0
    for index in range(steps):
        num_reqs = num_reqs_at(tokens)
        is_timed = num_reqs <= num_before
        if not is_timed:  # it prefills new requests, which have no drafts
            verified, made = 0, PLAIN
        stretch = tokens // (BATCH * STRETCH)
        # Spread evenly, so that faster plans meet the same text.
        is_predicted = int((stretch + 1) * text.predicted) > int(stretch * text.predicted)
        plan = plan_of(num_reqs, is_timed)
        own_chance = text.draft if text.later is None or index // 500 % 2 == 0 else text.later
        found, num_passes, next_chance, bucket = draft(plan, text, own_chance, is_predicted, num_reqs)
        drafted = Choice(int(plan)) if plan else PLAIN
        if plan and not num_passes:
            drafted = Choice(MAX_DRAFTS, lookups_alone=True)
        step = Step(num_reqs, num_reqs * CONTEXT, verified, num_passes, BUDGET if num_passes else 0)
        took = MACHINES[text.machine].seconds(step)
        accepted = [
            next((i for i in range(verified) if rng.random() >= chance), verified) for _ in range(num_reqs)
        ]
        seconds += took
        tokens += num_reqs + sum(accepted)
        if controller is not None:
            seen = step._replace(verified=max(verified, 1e-3) if made.drafts else 0)
            rounds = [(verified, num_accepted) for num_accepted in accepted] if made.drafts else []
            timed = TimedStep(seen, took * rng.lognormvariate(0, 0.03)) if is_timed else None
            controller.observe(rounds, made, timed, drafted, info)
            info = RoundInfo(num_passes, controller.is_planned, bucket)
        verified, chance, made = found, next_chance, drafted
        num_before = num_reqs
    return tokens / seconds


def follow(controller: Controller) -> Callable[[int, bool], DraftPlan]:
    return lambda num_reqs, is_timed: controller.plan(
        controller.choose(num_reqs, num_reqs * CONTEXT, is_timed=is_timed)
    )


def fixed_plans() -> list[DraftPlan]:
    drafts = (
        DraftPlan(number, 0.2, 0.0, promise) for number in (2, 3, 4, 6, 8, 16) for promise in (2.0, inf)
    )
    return [DraftPlan(0), DraftPlan(MAX_DRAFTS, lookups_alone=True, min_acceptance=0.3), *drafts]


@cache
def best_fixed(text: Text, **options) -> float:
    return max(simulate(text, 0, lambda *_, p=plan: p, **options) for plan in fixed_plans())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", TEXTS)
def test_close_to_the_best_fixed_plan_and_never_below_plain(name, seed):
    text, controller = TEXTS[name], make_controller()
    achieved = simulate(text, seed, follow(controller), controller)
    assert achieved > 0.96 * best_fixed(text)  # of few steps, of which the first learn
    assert achieved > 0.97 * simulate(text, seed, lambda *_: DraftPlan(0))
    assert controller.num_switches < 20


@pytest.mark.parametrize(("name", "least"), [("predicted everywhere", 0.81), ("predicted at times", 0.865)])
def test_close_to_the_best_fixed_plan_in_the_first_jobs_of_an_engine(name, least):
    """Calibration steps are expensive where rounds are long: of 100 steps they must be few."""
    shares, options = [], {"steps": 100, "num_reqs_at": job_after_job}
    for seed in range(16):
        controller = make_controller()
        achieved = simulate(TEXTS[name], seed, follow(controller), controller, **options)
        shares.append(achieved / best_fixed(TEXTS[name], **options))
    assert mean(shares) > least


@pytest.mark.parametrize("seed", range(2))
def test_drafts_that_became_good_are_found_though_lookups_alone_were_best(seed):
    text, controller = Text(0.2, 0.95, 0.3, later=0.95), make_controller()
    achieved = simulate(text, seed, follow(controller), controller, steps=2000)
    assert achieved > 0.97 * simulate(text, 0, lambda *_: DraftPlan(8, 0.2, 0.0, 2.0), steps=2000)


def test_lookups_that_help_rarely_are_found():
    """In some runs late, because only a trial in a predicted stretch shows that they help."""
    text, shares = Text(0.3, 0.9, 0.2), []
    for seed in range(8):
        controller = make_controller()
        shares.append(simulate(text, seed, follow(controller), controller) / best_fixed(text))
    assert mean(shares) > 0.93


def test_workers_do_not_replace_a_trial():
    controller = make_controller()
    tried = set()
    for _ in range(12):  # calibration
        plan = controller.plan(controller.choose(BATCH, BATCH * CONTEXT))
        assert controller.is_planned and all(own.min_expected_accepted == inf for own in plan.by_bucket)
        tried.add((int(plan), plan.lookups_alone))
    assert tried == {(0, False), (MAX_DRAFTS, True), (MAX_DRAFTS, False)}
