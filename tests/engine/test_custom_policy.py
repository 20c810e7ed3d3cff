# SPDX-License-Identifier: Apache-2.0
"""Policies of other packages in real engines."""

import engines
import example_policy
import pytest
import texts
from draft_engines import drafting_with
from engines import magicdec
from greedy import GREEDY, assert_same_tokens
from test_draft_model import TINY_DRAFT

pytestmark = pytest.mark.extended


@pytest.fixture
def installed(tmp_path, monkeypatch):
    example_policy.install(tmp_path, monkeypatch)


def test_the_examples_draft_losslessly(installed):
    prompts = texts.prompts(6, 200, 2000, seed=9)
    truth = engines.generate(prompts, GREEDY, max_num_seqs=4)
    for policy, budget in (("strided", 128), ("first-key", 192)):
        spec = magicdec(3, draft_kv_policy=policy, draft_kv_budget=budget)
        run = engines.generate(prompts, GREEDY, max_num_seqs=4, speculative_config=spec)
        assert_same_tokens(truth.results[0][0], run.results[0][0], policy)
        assert run.accepted > 0
        assert run.draft_failures == 0


@pytest.mark.parametrize("policy", ["strided", "first-key"])
def test_a_draft_model_refuses_policies_that_observe_the_targets_attention(installed, policy):
    spec = drafting_with(TINY_DRAFT, draft_kv_policy=policy)
    with pytest.raises(engines.RefusedError, match="use draft_kv_policy='streamingllm'"):
        engines.generate([[1, 2, 3]], GREEDY, speculative_config=spec)
