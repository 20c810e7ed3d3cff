# SPDX-License-Identifier: Apache-2.0
"""What the controller with lookups tells the workers, on a simulated machine whose rounds differ.

Requests are in stretches of text that lookups foresee and in others. A worker knows what its lookups
promise and follows the plan, as `drafting.staged` does; each draft step makes one draft.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import pytest
from imagined_engine import Engine

from vllm_magicdec.adaptive.controller import PLAIN, Choice
from vllm_magicdec.adaptive.draft_plan import DraftPlan
from vllm_magicdec.adaptive.lookup_controller import LookupController, SeenRounds
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep

MAX_DRAFTS, BUDGET, CONTEXT, BATCH = 16, 512, 16_000, 4
CPU = Engine(verification=lambda queries: 1.0 if queries <= 1 else 1.0 + 0.1 * queries, hiccups=0.0)


@dataclass(frozen=True)
class Text:
    """How the requests' text is."""

    draft: float  # chance that a draft that was read stands
    lookup: float  # that a looked-up one does, in stretches that lookups foresee
    foreseen: float  # share of rounds in such stretches
    num_found: int = 12  # tokens that a lookup finds there


TEXTS = {
    "foreseen nowhere": Text(0.9, 0.0, 0.0),
    "foreseen everywhere": Text(0.9, 0.97, 1.0),
    "foreseen at times": Text(0.9, 0.97, 0.5),
    "nothing helps": Text(0.2, 0.0, 0.0),
    "only lookups help": Text(0.2, 0.95, 0.5),
    "wrongly foreseen": Text(0.9, 0.3, 0.8),
}


def draft(plan: DraftPlan, text: Text, is_foreseen: bool) -> tuple[int, int, float]:
    """Drafts of each request, draft steps, and the chance of each draft."""
    if not plan:
        return 0, 0, 0.0
    found = promise = 0
    reached = text.lookup
    while is_foreseen and found < text.num_found and reached >= max(plan.least_chance, 0.1):
        promise += reached - plan.least_chance
        found, reached = found + 1, reached * text.lookup
    if not plan.budget or BATCH * promise >= plan.least_promise:
        return found, 0, text.lookup
    num_steps, reached = 1, text.draft
    while num_steps < plan and reached >= plan.least_chance:
        if BATCH * (reached - plan.least_chance) < plan.least_gain:
            break
        num_steps, reached = num_steps + 1, reached * text.draft
    kept = num_steps
    while kept and text.draft**kept < plan.least_chance:
        kept -= 1
    return kept, num_steps, text.draft


def simulate(text: Text, seed: int, plan_of: Callable[[], DraftPlan], controller=None, steps=1500) -> float:
    """Tokens per second."""
    rng, seconds, tokens = random.Random(seed), 0.0, 0
    verified, chance, made, num_made, was_planned = 0, 0.0, PLAIN, 0, False
    is_foreseen = False
    for index in range(steps):
        if index % 10 == 0:
            is_foreseen = rng.random() < text.foreseen
        plan = plan_of()
        found, num_passes, next_chance = draft(plan, text, is_foreseen)
        drafted = Choice(int(plan), plan.budget if num_passes else 0) if plan else PLAIN
        if plan and not num_passes:
            drafted = Choice(MAX_DRAFTS, 0)
        step = Step(BATCH, BATCH * CONTEXT, verified, num_passes, plan.budget if num_passes else 0)
        took = CPU.seconds(step)
        accepted = [
            next((i for i in range(verified) if rng.random() >= chance), verified) for _ in range(BATCH)
        ]
        seconds += took
        tokens += BATCH + sum(accepted)
        if controller is not None:
            seen = step._replace(verified=max(verified, 1e-3) if made.drafts else 0)
            rounds = [(verified, stood) for stood in accepted] if made.drafts else []
            timed = TimedStep(seen, took * rng.lognormvariate(0, 0.03))
            controller.observe(rounds, made, timed, drafted, num_passes=num_made, was_planned=was_planned)
            was_planned = controller.is_planned
        verified, chance, made, num_made = found, next_chance, drafted, num_passes
    return tokens / seconds


def follow(controller: LookupController) -> Callable[[], DraftPlan]:
    return lambda: controller.plan(controller.choose(BATCH, BATCH * CONTEXT))


FIXED = {
    "plain": DraftPlan(0, 0),
    "looked up": DraftPlan(MAX_DRAFTS, 0, 0.3),
    **{
        f"{drafts} drafts, looked up at a promise of {promise}": DraftPlan(
            drafts, BUDGET, 0.2, 0.0, promise
        )
        for drafts in (2, 4, 8, 16)
        for promise in (2.0, 8.0, inf)
    },
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", TEXTS)
def test_close_to_the_best_fixed_plan_and_never_below_plain(name, seed):
    text, controller = TEXTS[name], LookupController(MAX_DRAFTS, [BUDGET], StepTimes())
    achieved = simulate(text, seed, follow(controller), controller)
    fixed = {kind: simulate(text, seed, lambda p=plan: p) for kind, plan in FIXED.items()}
    assert achieved > 0.93 * max(fixed.values()), fixed
    assert achieved > 0.97 * fixed["plain"]


def test_what_is_tried_is_tried_as_it_is():
    controller = LookupController(MAX_DRAFTS, [BUDGET], StepTimes())
    kinds = set()
    for _ in range(12):  # to learn times
        plan = controller.plan(controller.choose(BATCH, BATCH * CONTEXT))
        assert controller.is_planned and plan.least_promise == inf
        kinds.add((int(plan), plan.budget))
    assert kinds == {(0, 0), (MAX_DRAFTS, 0), (MAX_DRAFTS, BUDGET)}


def test_averages_follow_what_was_seen():
    seen = SeenRounds(1.0, 0.5, 0.0)
    assert (seen.verified, seen.tokens, seen.num_passes) == (1.0, 1.5, 0.0)
    for _ in range(600):
        seen.observe(verified=6, accepted=4, num_passes=3, count=4)
    assert seen.verified == pytest.approx(6, abs=0.1)
    assert seen.tokens == pytest.approx(5, abs=0.1)
    assert seen.num_passes == pytest.approx(3, abs=0.1)
    for _ in range(600):
        seen.observe(verified=0, accepted=0, num_passes=0, count=4)
    assert 0 < seen.verified < 0.1, "a step for which no draft was found is no plain one"
