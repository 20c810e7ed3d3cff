# SPDX-License-Identifier: Apache-2.0
"""Policies of other packages in real engines."""

import engines
import example_policy
import pytest
import texts
from engines import magicdec
from greedy import GREEDY, assert_same_tokens

pytestmark = pytest.mark.extended


def test_the_examples_draft_losslessly(tmp_path, monkeypatch):
    example_policy.install(tmp_path, monkeypatch)
    prompts = texts.prompts(6, 200, 2000, seed=9)
    truth = engines.generate(prompts, GREEDY, max_num_seqs=4)
    for policy, budget in (("strided", 128), ("first-key", 192)):
        spec = magicdec(3, draft_kv_policy=policy, draft_kv_budget=budget)
        run = engines.generate(prompts, GREEDY, max_num_seqs=4, speculative_config=spec)
        assert_same_tokens(truth.results[0][0], run.results[0][0], policy)
        assert run.accepted > 0
        assert run.draft_failures == 0
