# SPDX-License-Identifier: Apache-2.0
"""Replayed draft steps draft what eager ones do; the graphs are recorded ones (recorded_graphs.py)."""

import subprocess
import sys
from pathlib import Path

import engines
import pytest
from conftest import GREEDY, first_tokens
from engines import MODEL_LEN, magicdec
from greedy import assert_same_tokens


@pytest.mark.parametrize(
    ("policy", "budget", "fields"),
    [
        ("streamingllm", 128, {}),
        ("snapkv", 128, {}),
        ("verify-topk", MODEL_LEN, {"draft_kv_granularity": "page"}),
    ],
)
def test_replayed_steps_draft_what_eager_ones_do(mixed_prompts, plain, policy, budget, fields):
    chosen = [i for i, prompt in enumerate(mixed_prompts) if len(prompt) < 1500][:6]
    batches = [{"prompts": [mixed_prompts[i] for i in chosen], "sampling": {**GREEDY, "max_tokens": 24}}]
    run = engines.run(
        [
            ("generate_and_count_drafts", {"batches": batches}),
            ("record_graphs", {"sizes": [2, 4]}),
            ("generate_and_count_drafts", {"batches": batches}),
            ("count_replays", {}),
        ],
        v2=True,
        max_num_seqs=4,
        num_gpu_blocks_override=257,
        enable_prefix_caching=False,
        async_scheduling=False,
        speculative_config=magicdec(4, draft_kv_policy=policy, draft_kv_budget=budget, **fields),
    )
    eager, _, replayed, replays = run.results
    expected = [first_tokens(plain[i], 24) for i in chosen]
    assert_same_tokens(expected, eager["batches"][0], f"{policy}, eager")
    assert_same_tokens(expected, replayed["batches"][0], f"{policy}, replayed")
    assert replayed["accepted"] == eager["accepted"] > 0
    assert replayed["drafted"] == eager["drafted"]
    # 4, 3, 2 and 1 requests at a time, each in the smallest graph that holds them.
    assert set(replays) == {"2", "4"} and all(count > 0 for count in replays.values())
    assert run.draft_failures == 0


def test_a_graph_serves_every_step_of_no_more_requests_than_it_was_captured_for():
    program = Path(__file__).with_name("recorded_graphs.py")
    ended = subprocess.run(
        [sys.executable, program], env=engines.environment(), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["streamingllm", "snapkv", "verify-topk"])
def test_greedy_output_is_unchanged_with_cuda_graphs(mixed_prompts, plain, policy):
    run = engines.generate(
        mixed_prompts,
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
