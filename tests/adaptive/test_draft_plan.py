# SPDX-License-Identifier: Apache-2.0
"""A draft plan is vLLM's number of drafts, wherever vLLM computes with it or sends it."""

import copy
import pickle

import cloudpickle
import pytest

from vllm_magicdec.adaptive.draft_plan import KIND_BORDERS, NUM_KINDS, DraftPlan, kind_of

WAYS = {
    "pickle": lambda plan: pickle.loads(pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)),
    "cloudpickle": lambda plan: cloudpickle.loads(cloudpickle.dumps(plan)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_drafts_travels_with_the_number(way):
    plan = WAYS[way](DraftPlan(3, lookups_alone=True))
    assert type(plan) is DraftPlan
    assert (plan, plan.lookups_alone) == (3, True)


@pytest.mark.parametrize("way", WAYS)
def test_prices_travel_with_it(way):
    prices = [(0.1 * kind, 0.2 * kind, 4.0 * kind) for kind in range(NUM_KINDS)]
    plan = WAYS[way](DraftPlan(3, by_kind=[DraftPlan(3, *own) for own in prices]))
    plans = [plan.of_kind(kind) for kind in range(NUM_KINDS)]
    assert [(own.least_chance, own.least_gain, own.least_promise) for own in plans] == prices
    alone = WAYS[way](DraftPlan(3))
    assert alone.of_kind(1) is alone


@pytest.mark.parametrize(
    ("plan", "looks_first"),
    [
        (DraftPlan(3), False),
        (DraftPlan(3, lookups_alone=True), True),
        (DraftPlan(3, least_promise=2.0), True),
        (DraftPlan(3, by_kind=[DraftPlan(3)] * NUM_KINDS), True),
    ],
)
def test_what_lookups_promise_is_asked_where_it_matters(plan, looks_first):
    assert plan.looks_first is looks_first


def test_kinds_are_in_the_order_of_what_lookups_promise():
    assert kind_of(0.0) == 0 and kind_of(1e9) == NUM_KINDS - 1
    assert [kind_of(border) for border in KIND_BORDERS] == list(range(1, NUM_KINDS))


def test_it_is_a_number():
    plan = DraftPlan(3)
    assert [-1] * plan == [-1, -1, -1]
    assert list(range(5))[plan:] == [3, 4]
    assert plan < 4 and not DraftPlan(0)
