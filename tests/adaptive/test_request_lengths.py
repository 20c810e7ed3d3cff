# SPDX-License-Identifier: Apache-2.0
"""Requests of one step that have different numbers of drafts verified, in a simulated engine."""

import random

import pytest
from imagined_engine import BUDGET, Engine, make_controller

from vllm_magicdec.adaptive.controller import Choice
from vllm_magicdec.adaptive.request_lengths import RequestLengths
from vllm_magicdec.adaptive.step_times import Step, TimedStep

CONTEXT = 16_000
# Verifying positions costs as much as on a CPU.
ENGINE = Engine(verification=lambda queries: 1.0 if queries == 1 else 1.0 + 0.1 * queries, hiccups=0.0)


def seconds(verified: list[int], drafted: int) -> float:
    """A step's time; requests hold as many tokens each."""
    n = len(verified)
    positions = sum(verified) + n
    target = ENGINE.pass_seconds * (1 + 0.04 * positions)
    target += sum(ENGINE.seconds_per_context_token * CONTEXT * ENGINE.verification(v + 1) for v in verified)
    plain = ENGINE.seconds(Step(n, n * CONTEXT, 0, 0))
    return target + ENGINE.seconds(Step(n, n * CONTEXT, 0, drafted, BUDGET)) - plain


def speed(acceptances: list[float], seed: int, *, cuts: bool, steps: int = 3000) -> float:
    """Tokens per second of the controller with or without `RequestLengths`, as the scheduler uses them."""
    rng, controller, lengths = random.Random(seed), make_controller(), RequestLengths()
    n, made, elapsed, drafts = len(acceptances), 0, 0.0, 0
    names = [f"request {i}" for i in range(n)]
    for index in range(steps):
        verified = [drafts] * n
        if cuts and index % 4:
            least_chance = 0.0 if controller.is_planned else controller.least_chance
            verified = [lengths.keep(name, drafts, least_chance) for name in names]
        choice = controller.choose(n, n * CONTEXT)
        took = seconds(verified, choice.drafts) * rng.lognormvariate(0, 0.03)
        rounds = []
        for name, length, acceptance in zip(names, verified, acceptances, strict=True):
            stood = next((i for i in range(length) if rng.random() >= acceptance), length)
            rounds.append((length, stood))
            lengths.observe(name, length, stood)
        made += n + sum(stood for _, stood in rounds)
        elapsed += took
        if verified == [drafts] * n:
            step = Step(n, n * CONTEXT, drafts, choice.drafts, BUDGET if choice.drafts else 0)
            chosen = Choice(drafts)
            controller.observe(rounds if drafts else [], chosen, TimedStep(step, took), choice)
        drafts = choice.drafts
    return made / elapsed


@pytest.mark.parametrize(
    ("acceptances", "least_gain"),
    [
        ([0.95] * 4 + [0.3] * 4, 1.05),
        ([0.95] * 7 + [0.2], 1.0),
        ([0.9] * 8, 0.985),
        ([0.5] * 8, 0.985),
    ],
)
def test_requests_that_differ_gain_and_others_lose_nothing(acceptances, least_gain):
    pairs = [[speed(acceptances, seed, cuts=cuts) for cuts in (True, False)] for seed in range(3)]
    gain = sum(cut for cut, _ in pairs) / sum(whole for _, whole in pairs)
    assert gain >= least_gain


def test_a_draft_is_kept_while_its_chance_is_above_the_least():
    lengths = RequestLengths()
    for _ in range(200):
        lengths.observe("good", 8, 8)
        lengths.observe("bad", 8, 0)
    assert lengths.keep("good", 8, 0.5) == 8
    assert lengths.keep("bad", 8, 0.5) == 1, "one is verified, so that the request can recover"
    assert lengths.keep("bad", 8, 0.0) == 8
    assert lengths.keep("new", 0, 0.5) == 0
    for _ in range(200):
        lengths.observe("half", 8, int(_ % 2))  # of two drafts tried one stood: about 0.4
    kept = lengths.keep("half", 8, 0.1)
    assert 2 <= kept <= 3
    lengths.forget(["bad", "unknown"])
    assert lengths.keep("bad", 8, 0.5) == lengths.keep("new", 8, 0.5)
