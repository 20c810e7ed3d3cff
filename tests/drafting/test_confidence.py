# SPDX-License-Identifier: Apache-2.0
"""Estimated acceptance: fixed acceptance rates, and rounds written by hand."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import make_batch

from vllm_magicdec.adaptive.metrics import Counts, LookupCounters
from vllm_magicdec.drafting.confidence import Confidence, Evidence, Predicted
from vllm_magicdec.drafting.staged import StagedDrafts, _RequestDrafts
from vllm_magicdec.lookup.history import History


def batch_of(tokens: list[int]):
    batch = make_batch(["a"], torch.arange(16, dtype=torch.int32).view(1, -1), [len(tokens) - 1])
    history = History(np.array(tokens[:-1], dtype=np.int32), tokens[-1:])
    return replace(batch, tokens=torch.tensor(tokens[-1:], dtype=torch.int32), histories=[history])


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


def test_confidence_learns_from_verification():
    """Drafts that were cut count as well, by the tokens that the target sampled."""
    sizes = {"max_num_reqs": 2, "max_drafts": 4, "max_model_len": 60}
    lookups = SimpleNamespace(follow=lambda req_ids, histories: None)
    staged, seen = StagedDrafts(None, lookups, LookupCounters(Counts()), **sizes), []
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
        staged._propose(batch_of([1, 2]), 0, _RequestDrafts(3, [9, 8, 7], list(evidence)), [9, 8, 7])
        staged._follow(batch_of([1, 2, *verified]), [0])
        assert seen == list(zip(evidence, stood, strict=False))
    assert staged._counters.totals["pass_accepted_tokens"] == 5  # of the third and the fourth
    staged._propose(batch_of([1, 2]), 0, _RequestDrafts(3), [9, 8, 7])
    staged._follow(batch_of([1, 2, 9, 8, 1]), [0])
    counted = staged._counters.totals
    assert (counted["lookup_unchecked_tokens"], counted["lookup_unchecked_accepted_tokens"]) == (3, 2)
    assert counted["pass_accepted_tokens"] == 5
