# SPDX-License-Identifier: Apache-2.0
"""A draft plan keeps its thresholds when it is serialised, and says when lookups come first."""

import copy
import pickle

import cloudpickle
import pytest

from vllm_magicdec.adaptive.draft_plan import NUM_BUCKETS, DraftPlan

WAYS = {
    "pickle": lambda plan: pickle.loads(pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)),
    "cloudpickle": lambda plan: cloudpickle.loads(cloudpickle.dumps(plan)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
def test_thresholds_are_copied_with_the_number(way):
    thresholds = [(0.1 * bucket, 0.2 * bucket, 4.0 * bucket) for bucket in range(NUM_BUCKETS)]
    by_bucket = [DraftPlan(3, *own) for own in thresholds]
    plan = WAYS[way](DraftPlan(3, by_bucket=by_bucket, lookups_alone=True))
    assert type(plan) is DraftPlan and (plan, plan.lookups_alone) == (3, True)
    plans = [plan.for_bucket(bucket) for bucket in range(NUM_BUCKETS)]
    assert [(own.min_acceptance, own.min_gain, own.min_expected_accepted) for own in plans] == thresholds
    alone = WAYS[way](DraftPlan(3))
    assert alone.for_bucket(1) is alone


@pytest.mark.parametrize(
    ("plan", "looks_first"),
    [
        (DraftPlan(3), False),
        (DraftPlan(3, lookups_alone=True), True),
        (DraftPlan(3, min_expected_accepted=2.0), True),
        (DraftPlan(3, by_bucket=[DraftPlan(3)] * NUM_BUCKETS), True),
    ],
)
def test_lookups_are_evaluated_first_only_where_a_threshold_needs_it(plan, looks_first):
    assert plan.looks_first is looks_first
