# SPDX-License-Identifier: Apache-2.0
"""Estimated acceptance: fixed acceptance rates, and rounds written by hand."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import make_batch

from vllm_magicdec.adaptive.draft_plan import DraftPlan
from vllm_magicdec.adaptive.metrics import Counts, LookupCounters
from vllm_magicdec.drafting.confidence import Confidence, Evidence, Predicted
from vllm_magicdec.drafting.staged import StagedDrafts, _RequestDrafts
from vllm_magicdec.lookup.continuation import Continuation
from vllm_magicdec.lookup.history import History
from vllm_magicdec.views.round import Part, Round, Sampled


class Lookup:
    """Always the same tokens, by request."""

    def __init__(self, **tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def follow(self, req_ids, histories) -> None: ...

    def look_up(self, req_id, drafted, most, min_acceptance) -> Continuation:
        tokens = self._tokens[req_id][len(drafted) : len(drafted) + most]
        return Continuation(tokens, [0.9] * len(tokens))


class Counting:
    """A draft that says 1, 2, 3, ... whatever it is given, with a probability of 0.7."""

    def __init__(self, reads_ahead: bool, max_pass_tokens: int = 100) -> None:
        self.reads_ahead = reads_ahead
        self.max_pass_tokens = max_pass_tokens

    def run(self, draft_pass):
        drawn = torch.from_numpy(draft_pass.queries.steps) + 1
        return Sampled(drawn, torch.full((len(drawn),), 0.7))


class NoView:
    def take(self, queries) -> Part:
        return Part(*[None] * 3)


def make_staged(runner, lookups) -> StagedDrafts:
    counters = LookupCounters(Counts())
    return StagedDrafts(runner, lookups, counters, max_num_reqs=2, max_drafts=4, max_model_len=60)


def batch_of(**texts: Sequence[int]):
    """Make a batch of requests with these tokens."""
    table = torch.arange(16 * len(texts), dtype=torch.int32).view(-1, 16)
    batch = make_batch(list(texts), table, [len(tokens) - 1 for tokens in texts.values()])
    return replace(
        batch,
        tokens=torch.tensor([tokens[-1] for tokens in texts.values()], dtype=torch.int32),
        histories=[
            History(np.array(tokens[:-1], dtype=np.int32), list(tokens[-1:])) for tokens in texts.values()
        ],
    )


SAME, ANOTHER, NOTHING = Predicted.THE_SAME, Predicted.ANOTHER, Predicted.NOTHING


@pytest.mark.parametrize("predicted", Predicted)
@pytest.mark.parametrize("true_chance", [0.2, 0.7, 0.97])
def test_confidence_converges_to_the_observed_acceptance(true_chance, predicted):
    confidence, rng = Confidence(), random.Random(1)
    for _ in range(3000):
        confidence.observe(Evidence(0.4, predicted), rng.random() < true_chance)
    assert confidence.chance(Evidence(0.4, predicted)) == pytest.approx(true_chance, abs=0.08)
    usual = Confidence().usual if predicted == SAME else true_chance
    assert confidence.usual == pytest.approx(usual, abs=0.08)
    for other in (
        Evidence(0.99, predicted),
        *(Evidence(0.4, other) for other in Predicted if other != predicted),
    ):
        assert confidence.chance(other) == Confidence().chance(other)


@pytest.mark.parametrize("probability", [0.0, 0.01, 0.1, 0.3, 0.5, 0.9, 0.99, 1.0])
def test_prior_acceptance_is_highest_with_an_agreeing_lookup(probability):
    chances = [
        Confidence().chance(Evidence(probability, predicted)) for predicted in (ANOTHER, NOTHING, SAME)
    ]
    assert chances == sorted(set(chances))


def learned_of(staged: StagedDrafts, batch, drafts: Sequence[int]) -> dict[str, list[Predicted]]:
    """Return the lookup of each draft by request, after a round in which all of `drafts` are accepted."""
    seen: list[tuple[Evidence, bool]] = []
    staged._confidence.observe = lambda *args: seen.append(args)
    drafting = [i for i, is_prefilling in enumerate(batch.is_prefilling) if not is_prefilling]
    drafted = staged.draft(batch, DraftPlan(len(drafts)), lambda: Round([NoView()]))
    assert drafted == [list(drafts) if i in drafting else [] for i in range(len(drafted))]
    texts = {
        req_id: [*history.after(0).tolist(), *drafts, 99]
        for req_id, history in zip(batch.req_ids, batch.histories, strict=True)
    }
    staged._follow(batch_of(**texts), drafting)
    assert all(is_accepted and evidence.probability == pytest.approx(0.7) for evidence, is_accepted in seen)
    kinds = iter(evidence.predicted for evidence, _ in seen)
    learned = {batch.req_ids[i]: [next(kinds) for _ in drafts] for i in drafting}
    assert next(kinds, None) is None
    return learned


@pytest.mark.parametrize(
    ("looked_up", "reads_ahead", "predicted"),
    [
        ((), True, [NOTHING] * 4),
        ((1, 2, 3, 4), True, [SAME] * 4),
        ((1, 2, 3, 9), True, [SAME, SAME, SAME, ANOTHER]),  # the last one is not read
        ((9, 2), True, [ANOTHER, SAME, NOTHING, NOTHING]),
        ((1, 9, 3, 4), False, [SAME, ANOTHER, SAME, SAME]),
    ],
)
def test_evidence_contains_the_lookup_of_the_position(looked_up, reads_ahead, predicted):
    staged = make_staged(Counting(reads_ahead), Lookup(a=looked_up))
    assert learned_of(staged, batch_of(a=[7, 8]), [1, 2, 3, 4]) == {"a": predicted}


def test_confidence_learns_from_verification():
    """Drafts that were cut count as well, by the tokens that the target sampled."""
    staged, seen = make_staged(None, Lookup(a=())), []
    staged._confidence.observe = lambda *args: seen.append(args)
    evidence = [Evidence(0.9, NOTHING), Evidence(0.8, ANOTHER), Evidence(0.7, SAME)]
    for verified, stood in [
        ([9], [True]),
        ([5], [False]),
        ([9, 8, 4], [True, True, False]),
        ([9, 8, 7, 6], [True, True, True]),
        ([], []),
    ]:
        seen.clear()
        staged._propose(batch_of(a=[1, 2]), 0, _RequestDrafts(3, [9, 8, 7], list(evidence)), [9, 8, 7])
        staged._follow(batch_of(a=[1, 2, *verified]), [0])
        assert seen == list(zip(evidence, stood, strict=False))
    assert staged._counters.totals["pass_accepted_tokens"] == 5  # of the third and the fourth
    staged._propose(batch_of(a=[1, 2]), 0, _RequestDrafts(3), [9, 8, 7])
    staged._follow(batch_of(a=[1, 2, 9, 8, 1]), [0])
    counted = staged._counters.totals
    assert (counted["lookup_unchecked_tokens"], counted["lookup_unchecked_accepted_tokens"]) == (3, 2)
    assert counted["pass_accepted_tokens"] == 5
