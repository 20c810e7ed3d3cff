# SPDX-License-Identifier: Apache-2.0
"""Engines on a CUDA device: greedy output, CUDA graphs, no host sync, no compilation while serving."""

from dataclasses import replace
from typing import Any

import engines
import pytest
from draft_engines import TINY_SPIRE, drafting_with
from engines import MODEL, MODEL_LEN, magicdec
from greedy import GREEDY, assert_same_tokens

pytestmark = pytest.mark.gpu

BUDGET = 256
# `draft_kv_granularity` is explicit: its default depends on the device.
POLICIES = {
    "streamingllm": {},
    "snapkv by page": {"draft_kv_policy": "snapkv", "draft_kv_granularity": "page"},
    "snapkv by token": {"draft_kv_policy": "snapkv", "draft_kv_granularity": "token"},
    "verify-topk": {"draft_kv_policy": "verify-topk", "draft_kv_granularity": "page"},
}
DRAFTS = {
    **{
        policy: magicdec(4, draft_kv_budget=BUDGET, draft_lookup="off", **fields)
        for policy, fields in POLICIES.items()
    },
    **{
        f"lookups, {policy}": magicdec(6, draft_kv_budget=BUDGET, draft_lookup="on", **POLICIES[policy])
        for policy in ("streamingllm", "verify-topk")
    },
    "a draft model": drafting_with(MODEL, draft_kv_budget=BUDGET),
    "SPIRe": drafting_with(TINY_SPIRE),
}
# Summing in another order in bfloat16 changes a logprob by less.
BFLOAT16_TOLERANCE = 0.25
CHECKS = {
    "own_process": True,  # the checks stay on in a process, and an engine that starts there would fail
    "env": {"VLLM_GPU_SYNC_CHECK": "error"},
    "jit_monitor_mode": "error",
    "enforce_eager": False,  # eager engines warm up no kernels, so nothing would be monitored
    "dtype": "bfloat16",
    # vLLM warms up the rejection sampler's kernels for logits in float32 alone.
    "hf_overrides": {"head_dtype": "float32"},
    "max_num_seqs": 16,
}


def run_with_graphs(prompts: list[list[int]], spec: dict[str, Any], **engine: Any) -> engines.EngineRun:
    """Run an engine whose draft steps use CUDA graphs; `results` are answers and numbers of steps."""
    run = engines.run(
        [
            ("watch_draft_steps", {}),
            ("generate", {"batches": [{"prompts": prompts, "sampling": GREEDY}]}),
            ("noted", {}),
        ],
        v2=True,
        enforce_eager=False,
        max_num_seqs=16,
        speculative_config=spec,
        **engine,
    )
    assert run.v2_runner and "Capturing draft CUDA graphs" in run.log
    assert run.draft_failures == 0 and run.accepted > 0
    _, (answers,), steps = run.results
    assert steps["graph"] > 0
    return replace(run, results=[answers, steps])


@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_output_is_unchanged_with_cuda_graphs(prompts, plain, draft):
    run = run_with_graphs(prompts, DRAFTS[draft])
    assert_same_tokens(plain, run.results[0], f"{draft}, CUDA graphs")
    if draft.startswith("lookups"):
        metrics = (f"vllm:magicdec_lookup_{name}" for name in ("rounds", "passes", "tokens"))
        rounds, passes, tokens = (run.metrics[metric] for metric in metrics)
        assert tokens > 0 and rounds <= passes < 6 * rounds


@pytest.mark.parametrize("draft", [*POLICIES, "a draft model"])
def test_adaptive_verification_changes_no_output(prompts, plain, draft):
    """vLLM has it on GPUs alone; attention of TRITON_ATTN has graphs for requests of any length."""
    batches = [{"prompts": prompts, "sampling": GREEDY}]
    run = engines.run(
        [("adaptive_costs", {}), ("generate", {"batches": batches})],
        v2=True,
        enforce_eager=False,
        max_num_seqs=16,
        attention_backend="TRITON_ATTN",
        speculative_config={**DRAFTS[draft], "enable_adaptive_verification": True},
    )
    (drafts_ms, token_ms), answers = run.results
    assert drafts_ms > token_ms, "four draft steps read the weights four times"
    assert_same_tokens(plain, answers[0], f"{draft}, adaptive verification")
    assert run.draft_failures == 0 and run.accepted > 0


@pytest.mark.parametrize("policy", ["streamingllm", "snapkv by token"])
def test_greedy_output_is_unchanged_without_cuda_graphs(prompts, plain, policy):
    run = engines.generate(prompts, GREEDY, v2=True, max_num_seqs=16, speculative_config=DRAFTS[policy])
    assert_same_tokens(plain, run.results[0][0], f"{policy}, eager")
    assert run.draft_failures == 0 and run.accepted > 0


def test_drafts_over_a_view_of_the_whole_context_are_all_accepted(prompts, plain):
    run = run_with_graphs(prompts, magicdec(4, draft_kv_budget=MODEL_LEN, draft_lookup="off"))
    assert_same_tokens(plain, run.results[0], "the whole context in view, CUDA graphs")
    assert run.accepted == run.drafted


@pytest.mark.parametrize("policy", POLICIES)
def test_in_bfloat16_every_token_is_vllms_best(prompts, policy):
    """Up to rounding. FlashInfer, which has no float32 kernels, computes attention over token views."""
    run = run_with_graphs(prompts, DRAFTS[policy], dtype="bfloat16")
    answers, steps = run.results
    assert run.accepted < run.drafted, "a budget below the contexts costs drafts"
    if policy == "snapkv by token":
        assert steps["flashinfer"] > 0
    gap = engines.max_logprob_gap(prompts, answers, v2=True, dtype="bfloat16", max_num_seqs=16)
    assert gap < BFLOAT16_TOLERANCE


# ---- vLLM's own checks: a wait for the device, or a kernel compiled after warm-up, is an error


@pytest.mark.parametrize("draft", ["plain", *DRAFTS, "auto"])
def test_no_step_waits_for_the_device_or_compiles_a_kernel(prompts, draft):
    """A failure of plain decoding is a bug of vLLM, which warms up no kernel of logprobs."""
    specs = {**DRAFTS, "plain": None, "auto": magicdec("auto", draft_kv_budget=BUDGET)}
    sampling = {name: value for name, value in GREEDY.items() if name != "logprobs"}
    run = engines.generate(prompts, sampling, v2=True, speculative_config=specs[draft], **CHECKS)
    assert run.v2_runner and "will use mode=error" in run.log
    if draft != "plain":
        assert run.draft_failures == 0 and run.drafted > 0


def test_vllms_check_detects_drafts_that_wait_for_the_device(prompts):
    batches = [{"prompts": prompts[:2], "sampling": GREEDY}]
    steps = [("generate_with_waiting_drafts", {"batches": batches})]
    with pytest.raises(RuntimeError, match="GPU<->CPU sync detected"):
        engines.run(steps, v2=True, speculative_config=DRAFTS["streamingllm"], **CHECKS)
