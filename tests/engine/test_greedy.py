# SPDX-License-Identifier: Apache-2.0
"""Greedy output equals plain decoding's token by token, whatever the budget, gamma and schedule."""

import engines
import pytest
import texts
from conftest import GREEDY, first_tokens
from engines import MODEL_LEN, magicdec
from greedy import assert_same_tokens

# Each budget meets each gamma, and each way of scheduling meets each budget and each gamma.
SCHEDULES = {
    "whole prompts": {},
    "chunked prefill": {"max_num_batched_tokens": 256},
    # 260 pages hold one longest request and nothing else.
    "preemption": {"num_gpu_blocks_override": 260, "max_num_batched_tokens": 8192, "max_num_seqs": 48},
}
BUDGETS = [64, 256, MODEL_LEN]
GAMMAS = [1, 4, 8]
CASES = [
    ("streamingllm", budget, gamma, list(SCHEDULES)[(b + g) % 3])
    for b, budget in enumerate(BUDGETS)
    for g, gamma in enumerate(GAMMAS)
]
CASES += [
    (policy, *case)
    for policy in ("snapkv", "verify-topk")
    for case in ((192, 8, "whole prompts"), (256, 4, "preemption"), (MODEL_LEN, 4, "chunked prefill"))
]


@pytest.mark.parametrize(("policy", "budget", "gamma", "schedule"), CASES)
def test_greedy_output_is_unchanged(mixed_prompts, plain, policy, budget, gamma, schedule):
    batch = {"prompts": mixed_prompts, "sampling": GREEDY}
    longest_first = sorted(range(len(mixed_prompts)), key=lambda i: -len(mixed_prompts[i]))[:8]
    again = {"prompts": [mixed_prompts[i] for i in longest_first], "sampling": GREEDY}
    run = engines.run(
        [("generate", {"batches": [batch, again]})],
        speculative_config=magicdec(gamma, draft_kv_policy=policy, draft_kv_budget=budget),
        **{"max_num_seqs": 16, **SCHEDULES[schedule]},
    )
    what = f"{policy}, budget {budget}, gamma {gamma}, {schedule}"
    first, second = run.results[0]
    assert_same_tokens(plain, first, what)
    # Prefix caching: the same prompts again, from the cache.
    assert_same_tokens([plain[i] for i in longest_first], second, f"{what}, prefix cached")
    assert run.draft_failures == 0
    assert run.drafted > 0
    if schedule == "preemption":
        assert run.preemptions > 0
    else:
        assert run.preemptions == 0
        assert all(request["cached_tokens"] > 0 for request in second)
    if budget == MODEL_LEN:
        assert run.accepted == run.drafted, "a view of the whole context drafts what the target decodes"


@pytest.mark.parametrize(
    ("policy", "budget", "gamma"),
    [
        ("streamingllm", 64, 4),
        ("streamingllm", MODEL_LEN, 8),
        ("snapkv", 128, 4),
        ("verify-topk", 256, 4),
        ("verify-topk", MODEL_LEN, 3),
    ],
)
def test_greedy_output_is_unchanged_on_the_v2_runner(mixed_prompts, plain, policy, budget, gamma):
    """Draft steps run eagerly first, then from CUDA graphs (recorded ones, see recorded_graphs.py)."""
    chosen = [i for i, prompt in enumerate(mixed_prompts) if len(prompt) < 1500][:8]
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
        max_num_batched_tokens=512,
        num_gpu_blocks_override=257,
        enable_prefix_caching=False,
        speculative_config=magicdec(gamma, draft_kv_policy=policy, draft_kv_budget=budget),
    )
    assert run.v2_runner
    expected = [first_tokens(plain[i], 24) for i in chosen]
    eager, _, replayed, replays = run.results
    for how, result in (("eager", eager), ("replayed", replayed)):
        what = f"V2 runner, {how}, {policy}, budget {budget}, gamma {gamma}"
        assert_same_tokens(expected, result["batches"][0], what)
        if budget == MODEL_LEN:
            assert result["accepted"] == result["drafted"] > 0
    assert replayed["accepted"] == eager["accepted"] and replayed["drafted"] == eager["drafted"]
    # 4, 3, 2 and 1 requests at a time, each in the smallest graph that holds them.
    assert set(replays) == {"2", "4"} and all(count > 0 for count in replays.values())
    assert run.draft_failures == 0


@pytest.mark.parametrize(("gamma", "policy"), [(2, "snapkv"), (16, "streamingllm"), (16, "verify-topk")])
def test_requests_may_reach_the_model_length_in_the_middle_of_a_draft(gamma, policy):
    """Every distance from the model's end, so that a draft crosses it at every step."""
    model_len = 256
    lengths = range(model_len - 20, model_len)
    prompts = [texts.prompts(1, length, length, seed=length)[0] for length in lengths]
    sampling = {**GREEDY, "max_tokens": 64}
    engine = {"max_model_len": model_len, "max_num_seqs": 8}
    truth = engines.generate(prompts, sampling, **engine)
    spec = magicdec(gamma, draft_kv_policy=policy, draft_kv_budget=192)
    run = engines.generate(prompts, sampling, speculative_config=spec, **engine)
    assert_same_tokens(truth.results[0][0], run.results[0][0], f"model length {model_len}, gamma {gamma}")
    assert {r["completions"][0]["finish_reason"] for r in run.results[0][0]} == {"length"}


@pytest.mark.parametrize("policy", ["streamingllm", "snapkv"])
def test_greedy_output_is_unchanged_with_tensor_parallel_2(mixed_prompts, plain, policy):
    chosen = [i for i, prompt in enumerate(mixed_prompts) if len(prompt) < 2000][:16]
    run = engines.generate(
        [mixed_prompts[i] for i in chosen],
        GREEDY,
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        max_num_seqs=8,
        speculative_config=magicdec(4, draft_kv_policy=policy, draft_kv_budget=128),
    )
    assert_same_tokens([plain[i] for i in chosen], run.results[0][0], f"tensor parallel 2, {policy}")
    assert run.accepted > 0
