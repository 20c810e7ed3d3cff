# SPDX-License-Identifier: Apache-2.0
"""A policy of another package in a real engine."""

import engines
import example_policy
import pytest
import texts
from conftest import GREEDY
from engines import magicdec
from greedy import assert_same_tokens


@pytest.fixture
def installed(tmp_path, monkeypatch):
    example_policy.install(tmp_path, monkeypatch)


def test_the_example_drafts_losslessly(installed):
    prompts = texts.prompts(6, 200, 2000, seed=9)
    truth = engines.generate(prompts, GREEDY, max_num_seqs=4)
    spec = magicdec(3, draft_kv_policy="strided", draft_kv_budget=128)
    run = engines.generate(prompts, GREEDY, max_num_seqs=4, speculative_config=spec)
    assert_same_tokens(truth.results[0][0], run.results[0][0], "strided policy")
    assert run.accepted > 0
    assert run.draft_failures == 0
