# SPDX-License-Identifier: Apache-2.0
"""vLLM's adaptive verification leaves out drafts that hardly stand; see tests/adaptive_verification.py."""

import engines
import pytest
import texts
from draft_engines import drafting_with
from engines import MODEL, POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens

SPIRE = engines.HERE.parent / "benchmarks" / "tiny-spire"
SHORT = {**GREEDY, "max_tokens": 24}
ENGINE = {"v2": True, "max_model_len": 1024, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def few_prompts() -> list[list[int]]:
    return texts.prompts(5, 20, 600)


@pytest.fixture(scope="module")
def few_plain(few_prompts) -> list[dict]:
    return engines.generate(few_prompts, SHORT, **ENGINE).results[0][0]


def run_adaptively(prompts: list[list[int]], spec: dict, scenario: str, **engine) -> tuple:
    batches = [{"prompts": prompts, "sampling": SHORT}]
    run = engines.run([(scenario, {"batches": batches})], speculative_config=spec, **{**ENGINE, **engine})
    noted = run.results[0]
    return run, noted.pop("batches")[0], noted


@pytest.mark.parametrize("draft", ["streamingllm", "snapkv by token", "verify-topk", "a model", "SPIRe"])
def test_what_is_left_out_changes_no_output(few_prompts, few_plain, draft):
    if draft == "SPIRe":
        spec = drafting_with(SPIRE)
    elif draft == "a model":
        spec = drafting_with(MODEL, draft_kv_budget=64)
    else:
        spec = magicdec(4, draft_kv_budget=192, **POLICIES[draft])
    run, answers, noted = run_adaptively(few_prompts, spec, "generate_with_adaptive_verification")
    assert run.v2_runner and run.draft_failures == 0
    assert_same_tokens(few_plain, answers, draft)
    assert noted["predicted"] > 100 and noted["difference"] < 1e-4
    # Of what is verified more stands than of what is drafted.
    assert 0 < noted["verified"] < noted["drafts"] and noted["uneven"] > 0
    assert run.accepted / noted["verified"] > 1.2 * run.accepted / noted["drafts"]


def test_drafts_that_failed_are_not_verified(few_prompts, few_plain):
    run, answers, noted = run_adaptively(
        few_prompts, magicdec(4), "generate_adaptively_with_broken_drafting", strict=False
    )
    assert_same_tokens(few_plain, answers, "broken drafting")
    assert run.draft_failures > 0 and run.accepted == 0
    # Budgets are of what the draft promised two steps before.
    assert noted["verified"] <= 3 * 4 * len(few_prompts) < noted["drafts"]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["streamingllm", "snapkv", "verify-topk"])
def test_what_is_left_out_changes_no_output_with_cuda_graphs(prompts, plain, policy):
    spec = magicdec(4, draft_kv_policy=policy, draft_kv_budget=256, enable_adaptive_verification=True)
    engine = {"v2": True, "enforce_eager": False, "max_num_seqs": 16}
    run = engines.generate(prompts, GREEDY, speculative_config=spec, **engine)
    assert_same_tokens(plain, run.results[0][0], f"{policy}, adaptive verification")
    assert run.draft_failures == 0 and run.accepted > 0
