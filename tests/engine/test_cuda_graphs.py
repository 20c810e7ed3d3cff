# SPDX-License-Identifier: Apache-2.0
"""Real CUDA graphs of draft steps in a real engine."""

import engines
import pytest
from engines import magicdec
from greedy import GREEDY, assert_same_tokens


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["streamingllm", "snapkv", "verify-topk"])
def test_greedy_output_is_unchanged_with_cuda_graphs(prompts, plain, policy):
    run = engines.generate(
        prompts,
        GREEDY,
        v2=True,
        enforce_eager=False,
        max_num_seqs=16,
        speculative_config=magicdec(4, draft_kv_policy=policy, draft_kv_budget=256),
    )
    assert run.v2_runner
    assert_same_tokens(plain, run.results[0][0], f"{policy}, CUDA graphs")
    assert "Capturing draft CUDA graphs" in run.log
    assert run.draft_failures == 0 and run.accepted > 0
