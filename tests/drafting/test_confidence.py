# SPDX-License-Identifier: Apache-2.0
"""Chances of drafts against what is known of them: fixed rates of standing, and rounds written by hand."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import make_batch

from vllm_magicdec.adaptive.draft_plan import DraftPlan
from vllm_magicdec.adaptive.metrics import Counts, LookupCounters
from vllm_magicdec.drafting.confidence import Confidence, Drawn, Foreseen
from vllm_magicdec.drafting.staged import StagedDrafts, _Making
from vllm_magicdec.lookup.continuation import Continuation
from vllm_magicdec.lookup.history import History

TABLE = torch.arange(16, dtype=torch.int32).unsqueeze(0)


class Lookup:
    """Always the same tokens."""

    source_names = answered = ()

    def __init__(self, *tokens: int) -> None:
        self._tokens = tokens

    def begin_round(self, resting, on_failure) -> None: ...

    def follow(self, req_ids, histories) -> None: ...

    def look_up(self, req_id, drafted, most, least_chance) -> Continuation:
        tokens = self._tokens[len(drafted) : len(drafted) + most]
        return Continuation(tokens, [0.9] * len(tokens))


class Counting:
    """A draft that says 1, 2, 3, ... whatever it is given, with a probability of 0.7."""

    max_pass_tokens = 100

    def __init__(self, reads_ahead: bool) -> None:
        self.reads_ahead = reads_ahead

    def draft_pass(self, tokens, draft_pass):
        drawn = torch.from_numpy(draft_pass.queries.steps) + 1
        return drawn, torch.full((len(drawn),), 0.7)


def make_staged(runner, lookups) -> StagedDrafts:
    counters = LookupCounters(Counts())
    return StagedDrafts(runner, lookups, counters, max_num_reqs=2, max_drafts=4, max_model_len=60)


def batch_of(tokens: list[int]):
    """Of one request with these tokens."""
    history = History(np.array(tokens[:-1], dtype=np.int32), tokens[-1:])
    batch = make_batch(["a"], TABLE, [len(tokens) - 1])
    return replace(batch, tokens=torch.tensor(tokens[-1:], dtype=torch.int32), histories=[history])


@pytest.mark.parametrize("foreseen", Foreseen)
@pytest.mark.parametrize("true_chance", [0.2, 0.7, 0.97])
def test_confidence_becomes_the_acceptance_seen(true_chance, foreseen):
    confidence, rng = Confidence(), random.Random(1)
    for _ in range(3000):
        confidence.observe(Drawn(0.4, foreseen), rng.random() < true_chance)
    assert confidence.chance(Drawn(0.4, foreseen)) == pytest.approx(true_chance, abs=0.08)
    assert confidence.usual == pytest.approx(true_chance, abs=0.08)
    others = [Drawn(0.99, foreseen), *(Drawn(0.4, other) for other in Foreseen if other != foreseen)]
    for other in others:
        assert confidence.chance(other) == Confidence().chance(other)


@pytest.mark.parametrize("foreseen", Foreseen)
def test_a_surer_draft_is_likelier_to_stand_at_first(foreseen):
    probabilities = (float("nan"), 0.0, 1e-9, 0.05, 0.3, 0.5, 0.9, 0.999, 1.0)
    chances = [Confidence().chance(Drawn(p, foreseen)) for p in probabilities]
    assert chances == sorted(chances) and chances[0] < 0.3 and chances[-1] > 0.99


def test_at_first_a_draft_that_a_lookup_foresaw_is_the_likeliest_to_stand():
    for probability in (0.1, 0.3, 0.5, 0.9):
        chances = [Confidence().chance(Drawn(probability, foreseen)) for foreseen in Foreseen]
        assert chances[Foreseen.THE_SAME] == max(chances)
        assert chances[Foreseen.ANOTHER] == min(chances)


@pytest.mark.parametrize(
    ("looked_up", "reads_ahead", "foreseen"),
    [
        ((), True, [Foreseen.NOTHING] * 4),
        ((1, 2, 3, 4), True, [Foreseen.THE_SAME] * 4),
        ((1, 2, 3, 9), True, [*[Foreseen.THE_SAME] * 3, Foreseen.ANOTHER]),  # the last one is not read
        ((9, 2), True, [Foreseen.ANOTHER, Foreseen.THE_SAME, Foreseen.NOTHING, Foreseen.NOTHING]),
        ((1, 9, 3, 4), False, [Foreseen.THE_SAME, Foreseen.ANOTHER, Foreseen.THE_SAME, Foreseen.THE_SAME]),
    ],
)
def test_drafts_are_told_apart_by_what_was_looked_up_for_their_place(looked_up, reads_ahead, foreseen):
    staged = make_staged(Counting(reads_ahead), Lookup(*looked_up))
    seen: list[tuple[Drawn, bool]] = []
    staged._confidence.observe = lambda *args: seen.append(args)
    drafts = staged.draft(batch_of([7, 8]), DraftPlan(4, 512), lambda: ())
    assert drafts == [[1, 2, 3, 4]]
    staged._follow(batch_of([7, 8, 1, 2, 3, 4, 5]), [0])
    assert [drawn.foreseen for drawn, _ in seen] == foreseen
    assert all(stood and drawn.probability == pytest.approx(0.7) for drawn, stood in seen)


def test_confidence_is_learned_from_what_was_verified():
    """Also of drafts that were cut, by what the target drew at their places."""
    staged, seen = make_staged(None, Lookup()), []
    staged._confidence.observe = lambda *args: seen.append(args)
    drawn = [Drawn(0.9), Drawn(0.8, Foreseen.ANOTHER), Drawn(0.7)]
    for verified, stood in [
        ([9], [True]),
        ([5], [False]),
        ([9, 8, 4], [True, True, False]),
        ([9, 8, 7, 6], [True, True, True]),
        ([], []),
    ]:
        seen.clear()
        staged._propose(batch_of([1, 2]), 0, _Making(3, [9, 8, 7], list(drawn)), [9, 8, 7])
        staged._follow(batch_of([1, 2, *verified]), [0])
        assert seen == list(zip(drawn, stood, strict=False))
    assert staged._counters.totals["pass_accepted_tokens"] == 5  # of the third and the fourth
    staged._propose(batch_of([1, 2]), 0, _Making(3), [9, 8, 7])
    staged._follow(batch_of([1, 2, 9, 8, 1]), [0])
    counted = staged._counters.totals
    assert (counted["lookup_unread_tokens"], counted["lookup_unread_accepted_tokens"]) == (3, 2)
    assert counted["pass_accepted_tokens"] == 5
