# SPDX-License-Identifier: Apache-2.0
"""A draft plan is vLLM's number of drafts, wherever vLLM computes with it or sends it."""

import copy
import pickle

import cloudpickle
import pytest

from vllm_magicdec.adaptive.draft_plan import DraftPlan

WAYS = {
    "pickle": lambda plan: pickle.loads(pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)),
    "cloudpickle": lambda plan: cloudpickle.loads(cloudpickle.dumps(plan)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_budget_travels_with_the_number(way):
    plan = WAYS[way](DraftPlan(3, 256))
    assert type(plan) is DraftPlan
    assert (plan, plan.budget) == (3, 256)


def test_it_is_a_number():
    plan = DraftPlan(3, 256)
    assert [-1] * plan == [-1, -1, -1]
    assert list(range(5))[plan:] == [3, 4]
    assert plan < 4 and not DraftPlan(0, 0)
