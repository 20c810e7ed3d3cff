# SPDX-License-Identifier: Apache-2.0
"""What the controller with lookups tells the workers, on a simulated machine whose rounds differ.

Requests are in stretches of text that lookups foresee and in others. A worker knows what its lookups and
its drafts promise, and follows the plan by the rules of `drafting.staged`; each draft step makes one draft.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from statistics import mean

import pytest
from imagined_engine import Engine

from vllm_magicdec.adaptive.controller import PLAIN, Choice, How
from vllm_magicdec.adaptive.draft_plan import DraftPlan, kind_of
from vllm_magicdec.adaptive.lookup_controller import LookupController
from vllm_magicdec.adaptive.places import SeenRounds
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.drafting.staged import _gain, _Making, _worth_going_on, _worth_verifying
from vllm_magicdec.lookup.continuation import LEAST_CHANCE, Continuation

MAX_DRAFTS, BUDGET, CONTEXT, BATCH = 16, 512, 16_000, 4
STRETCH = 60  # tokens of a request


def verification(queries: int) -> float:
    return 1.0 if queries <= 1 else 1.0 + 0.1 * queries


# By how dear a draft step is: it takes 0.08 or 0.33 of a plain step.
MACHINES = {
    "cheap": Engine(verification=verification, hiccups=0.0),
    "dear": Engine(pass_seconds=40e-3, verification=verification, hiccups=0.0),
}


@dataclass(frozen=True)
class Text:
    """How the requests' text is, and where it is made."""

    draft: float  # chance that a draft that was read stands
    lookup: float = 0.0  # that a looked-up one does, in stretches that lookups foresee
    foreseen: float = 0.0  # share of stretches that lookups foresee
    num_found: int = 12  # tokens that a lookup finds there
    machine: str = "cheap"
    later: float | None = None  # chance of a draft in every other 500 rounds
    read_ahead: int = 1  # drafts that a draft step makes in stretches that lookups foresee


TEXTS = {
    "foreseen nowhere": Text(0.9),
    "foreseen everywhere": Text(0.9, 0.97, 1.0),
    "foreseen at times": Text(0.9, 0.97, 0.5),
    "foreseen at times, poor drafts": Text(0.7, 0.97, 0.5),
    "foreseen at times, dear drafts": Text(0.9, 0.97, 0.5, machine="dear"),
    "nothing helps": Text(0.2),
    "only lookups help": Text(0.2, 0.95, 0.5),
    "wrongly foreseen": Text(0.9, 0.3, 0.8),
    "dear drafts at 0.85": Text(0.85, machine="dear"),
    "dear drafts at 0.9": Text(0.9, machine="dear"),
    "dear drafts, nothing helps": Text(0.5, machine="dear"),
    "read ahead": Text(0.95, 0.9, 0.7, num_found=4, read_ahead=4),
    "read ahead by dear drafts": Text(0.98, 0.9, 0.7, num_found=4, read_ahead=4, machine="dear"),
}


def job_after_job(tokens: int) -> int:
    """Requests of an offline job at a time: of eight, which in the end are done one after the other."""
    return min(8, 8 - (tokens % 1000 - 600) // 50)


def draft(
    plan: DraftPlan, text: Text, chance: float, is_foreseen: bool, num_reqs: int
) -> tuple[int, int, float, int]:
    """Drafts of each request, draft steps, the chance of each draft, and the kind of the round."""
    if not plan:
        return 0, 0, 0.0, 0
    found = (
        Continuation([0] * text.num_found, [text.lookup] * text.num_found)
        if is_foreseen
        else Continuation()
    )
    kind = kind_of(sum(reached for reached in found.reached if reached >= LEAST_CHANCE))
    plan = plan.of_kind(kind)
    likely = [reached for reached in found.reached if reached >= max(plan.least_chance, LEAST_CHANCE)]
    if plan.lookups_alone or num_reqs * sum(r - plan.least_chance for r in likely) >= plan.least_promise:
        return len(likely), 0, text.lookup, kind
    own, num_steps = _Making(int(plan)), 0
    while _worth_going_on({0: own}, plan):
        num_ahead = min(text.read_ahead - 1 if is_foreseen else 0, int(plan) - len(own.tokens) - 1)
        ahead = Continuation([0] * num_ahead, [text.lookup] * num_ahead)
        if num_steps and _gain([own.chance] * num_reqs, [ahead] * num_reqs, chance, plan) < plan.least_gain:
            break
        for _ in range(1 + num_ahead):
            own.tokens.append(0)
            own.reached.append(own.chance * chance)
        num_steps += 1
    return len(_worth_verifying(own, plan, are_drawn=False)), num_steps, chance, kind


def simulate(
    text: Text,
    seed: int,
    plan_of: Callable[[int, bool], DraftPlan],
    controller=None,
    steps=1000,
    num_reqs_at: Callable[[int], int] = lambda tokens: BATCH,
) -> float:
    """Tokens per second.

    The plan is made by the number of requests and whether the step's time says something; the number by
    the tokens made so far.
    """
    rng, seconds, tokens = random.Random(seed), 0.0, 0
    verified, chance, made, how, num_before = 0, 0.0, PLAIN, How(), 0
    for index in range(steps):
        num_reqs = num_reqs_at(tokens)
        is_timed = num_reqs <= num_before
        if not is_timed:  # it prefills new ones, which bring no drafts
            verified, made = 0, PLAIN
        stretch = tokens // (BATCH * STRETCH)
        # Evenly among the stretches, so that plans that get farther meet no other text.
        is_foreseen = int((stretch + 1) * text.foreseen) > int(stretch * text.foreseen)
        plan = plan_of(num_reqs, is_timed)
        own_chance = text.draft if text.later is None or index // 500 % 2 == 0 else text.later
        found, num_passes, next_chance, kind = draft(plan, text, own_chance, is_foreseen, num_reqs)
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
            rounds = [(verified, stood) for stood in accepted] if made.drafts else []
            timed = TimedStep(seen, took * rng.lognormvariate(0, 0.03)) if is_timed else None
            controller.observe(rounds, made, timed, drafted, how)
            how = How(num_passes, controller.is_planned, kind)
        verified, chance, made = found, next_chance, drafted
        num_before = num_reqs
    return tokens / seconds


def follow(controller: LookupController) -> Callable[[int, bool], DraftPlan]:
    return lambda num_reqs, is_timed: controller.plan(
        controller.choose(num_reqs, num_reqs * CONTEXT, is_timed=is_timed)
    )


def fixed_plans() -> list[DraftPlan]:
    drafts = (
        DraftPlan(number, 0.2, 0.0, promise) for number in (2, 3, 4, 6, 8, 16) for promise in (2.0, inf)
    )
    return [DraftPlan(0), DraftPlan(MAX_DRAFTS, lookups_alone=True, least_chance=0.3), *drafts]


@cache
def best_fixed(text: Text, **how) -> float:
    return max(simulate(text, 0, lambda *_, p=plan: p, **how) for plan in fixed_plans())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", TEXTS)
def test_close_to_the_best_fixed_plan_and_never_below_plain(name, seed):
    text, controller = TEXTS[name], LookupController(MAX_DRAFTS, BUDGET, StepTimes())
    achieved = simulate(text, seed, follow(controller), controller)
    assert achieved > 0.96 * best_fixed(text)  # of few steps, of which the first learn
    assert achieved > 0.97 * simulate(text, seed, lambda *_: DraftPlan(0))
    assert controller.num_switches < 20


@pytest.mark.parametrize(("name", "least"), [("foreseen everywhere", 0.81), ("foreseen at times", 0.865)])
def test_close_to_the_best_fixed_plan_in_the_first_jobs_of_an_engine(name, least):
    """Where rounds are long, steps made for their times alone are dear: of 100 they must be few."""
    shares, how = [], {"steps": 100, "num_reqs_at": job_after_job}
    for seed in range(16):
        controller = LookupController(MAX_DRAFTS, BUDGET, StepTimes())
        achieved = simulate(TEXTS[name], seed, follow(controller), controller, **how)
        shares.append(achieved / best_fixed(TEXTS[name], **how))
    assert mean(shares) > least


@pytest.mark.parametrize("seed", range(2))
def test_drafts_that_became_good_are_found_though_lookups_alone_were_best(seed):
    text, controller = Text(0.2, 0.95, 0.3, later=0.95), LookupController(MAX_DRAFTS, BUDGET, StepTimes())
    achieved = simulate(text, seed, follow(controller), controller, steps=2000)
    assert achieved > 0.97 * simulate(text, 0, lambda *_: DraftPlan(8, 0.2, 0.0, 2.0), steps=2000)


def test_lookups_that_help_seldom_are_found():
    """In some runs late: until a trial meets them they look as if they never helped."""
    text, shares = Text(0.3, 0.9, 0.2), []
    for seed in range(8):
        controller = LookupController(MAX_DRAFTS, BUDGET, StepTimes())
        shares.append(simulate(text, seed, follow(controller), controller) / best_fixed(text))
    assert mean(shares) > 0.93


def planned(kinds: Sequence[int], pass_seconds: float) -> list[Choice | None]:
    """What is planned in each round, where lookups foresee the text in kind 3, and reading gets it all."""
    controller, made, how, verified, found = (
        LookupController(MAX_DRAFTS, BUDGET, StepTimes()),
        PLAIN,
        How(),
        0,
        [],
    )
    for kind in kinds:
        choice = controller.choose(BATCH, BATCH * CONTEXT)
        plan = controller.plan(choice).of_kind(kind)
        found.append(choice if controller.is_planned else None)
        is_read = choice == Choice(MAX_DRAFTS) and (10.0 * BATCH if kind == 3 else 0.0) < plan.least_promise
        num_passes = (1 if kind == 3 else 4) if is_read else 0
        drafted = choice if is_read or not choice.drafts else controller.unread
        budget = controller.budget_of(drafted)
        step = Step(BATCH, BATCH * CONTEXT, verified or 1e-3 * bool(made.drafts), num_passes, budget)
        seconds = 0.02 + 0.001 * verified + pass_seconds * num_passes
        rounds = [(verified, verified)] * BATCH if made.drafts else []
        controller.observe(rounds, made, TimedStep(step, seconds), drafted, how)
        made, how = drafted, How(num_passes, controller.is_planned, kind)
        verified = 0 if drafted == PLAIN else 8 if is_read or kind == 3 else 0
    return found


def test_of_what_is_met_no_more_nothing_is_tried():
    kinds = [3 * (step < 500 and step // 20 % 4 == 0) for step in range(1500)]
    found = planned(kinds, 0.001)
    assert sum(choice is not None for choice in found[1000:]) < 50


def test_plain_decoding_is_not_tried_beside_itself():
    found = planned([0] * 1500, 0.1)
    assert PLAIN not in found[100:] and sum(choice is not None for choice in found[100:]) < 1400 / 6


def test_what_is_tried_under_plain_decoding_is_tried_at_its_prices():
    controller = LookupController(MAX_DRAFTS, BUDGET, StepTimes())
    simulate(Text(0.2, machine="dear"), 0, follow(controller), controller, steps=300)
    assert controller.forecast(BATCH, BATCH * CONTEXT).choice == PLAIN
    plain, passing = (
        MACHINES["dear"].seconds(Step(BATCH, BATCH * CONTEXT, 0, n, n * BUDGET)) for n in (0, 1)
    )
    expected = BATCH / plain * (passing - plain)  # by a fit of the times
    assert controller.plan(Choice(MAX_DRAFTS)).of_kind(0).least_gain == pytest.approx(expected, rel=0.3)


def test_what_is_tried_is_tried_as_it_is():
    controller = LookupController(MAX_DRAFTS, BUDGET, StepTimes())
    kinds = set()
    for _ in range(12):  # to learn times
        plan = controller.plan(controller.choose(BATCH, BATCH * CONTEXT))
        assert controller.is_planned and all(own.least_promise == inf for own in plan.by_kind)
        kinds.add((int(plan), plan.lookups_alone))
    assert kinds == {(0, False), (MAX_DRAFTS, True), (MAX_DRAFTS, False)}


def test_averages_follow_what_was_seen():
    seen = SeenRounds(1.0, 0.5, 0.0)
    assert (seen.verified, seen.tokens, seen.num_passes) == (1.0, 1.5, 0.0)
    for _ in range(600):
        seen.fade(4)
        seen.observe(verified=6, accepted=4, num_passes=3, count=4)
    assert seen.verified == pytest.approx(6, abs=0.1)
    assert seen.tokens == pytest.approx(5, abs=0.1)
    assert seen.num_passes == pytest.approx(3, abs=0.1)
    for _ in range(600):
        seen.fade(4)
        seen.observe(verified=0, accepted=0, num_passes=0, count=4)
    assert 0 < seen.verified < 0.1, "a step for which no draft was found is no plain one"
