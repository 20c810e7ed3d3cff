# SPDX-License-Identifier: Apache-2.0
"""`num_speculative_tokens: auto` in real engines: whatever it chooses, the output stays."""

import json
import re

import engines
import pytest
from conftest import GREEDY, first_tokens
from greedy import assert_same_tokens

IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def auto(**fields: object) -> dict[str, object]:
    return {"method": "magicdec-self", "num_speculative_tokens": "auto", **fields}


@pytest.mark.parametrize("policy", ["streamingllm", "snapkv", "verify-topk"])
def test_output_is_unchanged_when_the_length_changes_every_step(mixed_prompts, plain, policy):
    chosen = [i for i, prompt in enumerate(mixed_prompts) if len(prompt) < 3000][:24]
    batch = {"prompts": [mixed_prompts[i] for i in chosen], "sampling": GREEDY}
    steps = [("generate_with_random_lengths", {"batches": [batch], "seed": seed}) for seed in range(3)]
    run = engines.run(
        steps,
        env=IN_ONE_PROCESS,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        speculative_config=auto(draft_kv_policy=policy, draft_kv_budget=256),
    )
    for seed, result in enumerate(run.results):
        assert result["lengths"] == list(range(9))
        assert_same_tokens(
            [plain[i] for i in chosen], result["batches"][0], f"random lengths, {policy}, {seed}"
        )
    assert run.draft_failures == 0
    assert 0 < run.accepted < run.drafted


def test_output_is_unchanged_when_the_length_changes_on_the_v2_runner(mixed_prompts, plain):
    chosen = [i for i, prompt in enumerate(mixed_prompts) if len(prompt) < 1500][:6]
    batch = {"prompts": [mixed_prompts[i] for i in chosen], "sampling": {**GREEDY, "max_tokens": 24}}
    run = engines.run(
        [("generate_with_random_lengths", {"batches": [batch], "seed": 0})],
        v2=True,
        env=IN_ONE_PROCESS,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=257,
        speculative_config=auto(max_num_speculative_tokens=4, draft_kv_budget=128),
    )
    assert run.v2_runner
    (result,) = run.results
    assert set(result["lengths"]) == {0, 1, 2, 3, 4}
    assert_same_tokens(
        [first_tokens(plain[i], 24) for i in chosen], result["batches"][0], "random lengths, V2 runner"
    )
    assert run.accepted > 0


@pytest.fixture(scope="module")
def auto_run(mixed_prompts):
    batch = {"prompts": mixed_prompts, "sampling": GREEDY}
    return engines.run([("generate", {"batches": [batch]})], max_num_seqs=16, speculative_config=auto())


def test_the_controller_chooses_and_says_so(auto_run, plain):
    assert_same_tokens(plain, auto_run.results[0][0], "auto")
    assert auto_run.draft_failures == 0
    assert auto_run.drafted > 0, "the first steps try some drafts"
    assert "magicdec-self will try several numbers of drafts" in auto_run.log
    metrics = auto_run.metrics
    assert 0 <= metrics["vllm:magicdec_num_speculative_tokens"] <= 8
    assert metrics["vllm:magicdec_draft_kv_budget"] == 512
    assert 0 <= metrics["vllm:magicdec_draft_share"] < 1
    assert metrics["vllm:magicdec_predicted_speedup"] > 0
    assert metrics["vllm:magicdec_achieved_speedup"] > 0
    assert metrics["vllm:magicdec_switches"] >= 0


def test_the_dashboard_shows_metrics_that_exist(auto_run):
    dashboard = json.loads((engines.MODEL.parent / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for text in expressions for name in re.findall(r"vllm:[a-z_]+", text)}
    assert {re.sub("_(total|bucket)$", "", name) for name in named} <= set(auto_run.metrics)


def test_a_controller_that_fails_loses_and_changes_nothing(mixed_prompts, plain):
    chosen = [i for i, prompt in enumerate(mixed_prompts) if len(prompt) < 1000][:8]
    batch = {"prompts": [mixed_prompts[i] for i in chosen], "sampling": GREEDY}
    run = engines.run(
        [("generate_with_broken_controller", {"batches": [batch]})],
        strict=False,
        env=IN_ONE_PROCESS,
        max_num_seqs=4,
        speculative_config=auto(),
    )
    assert_same_tokens([plain[i] for i in chosen], run.results[0][0], "broken controller")
    assert run.log.count("RuntimeError: broken on purpose") == 1, "logged once, with its trace"
