# SPDX-License-Identifier: Apache-2.0
"""vLLM's adaptive verification drops drafts that are rarely accepted (tests/adaptive_verification.py)."""

import engines
import pytest
import texts
from draft_engines import drafting_with
from engines import MODEL, POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens

SPIRE = engines.HERE.parent / "benchmarks" / "tiny-spire"
SHORT = {**GREEDY, "max_tokens": 24}
ENGINE = {"v2": True, "max_model_len": 1024, "max_num_seqs": 8}

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def few_prompts() -> list[list[int]]:
    return texts.prompts(5, 20, 600)


@pytest.fixture(scope="module")
def few_plain(few_prompts) -> list[dict]:
    return engines.generate(few_prompts, SHORT, **ENGINE).results[0][0]


@pytest.mark.parametrize("draft", ["snapkv by token", "a model", "SPIRe"])
def test_adaptive_verification_changes_no_output(few_prompts, few_plain, draft):
    if draft == "SPIRe":
        spec = drafting_with(SPIRE)
    elif draft == "a model":
        spec = drafting_with(MODEL, draft_kv_budget=64)
    else:
        spec = magicdec(4, draft_kv_budget=192, **POLICIES[draft])
    batches = [{"prompts": few_prompts, "sampling": SHORT}]
    steps = [("generate_with_adaptive_verification", {"batches": batches})]
    run = engines.run(steps, speculative_config=spec, **ENGINE)
    assert run.v2_runner and run.draft_failures == 0
    free, expensive = (run.results[0][name] for name in ("free", "expensive"))
    for result in (free, expensive):
        assert_same_tokens(few_plain, result["batches"][0], draft)
        assert result["predicted"] > 100 and result["difference"] < 1e-4
        assert result["timed"] == 4, "vLLM times as many draft steps as a round has"
    assert free["verified"] == free["drafts"]
    assert 0 < expensive["verified"] < expensive["drafts"] and expensive["uneven"] > 0
    # Dropped drafts are accepted less often than the others, unless nearly all are accepted.
    overall_rate = free["accepted"] / free["verified"]
    assert overall_rate > 0.95 or expensive["accepted"] / expensive["verified"] > overall_rate


def test_failed_drafts_are_not_verified(few_prompts, few_plain):
    batches = [{"prompts": few_prompts, "sampling": SHORT}]
    steps = [("generate_adaptively_with_broken_drafting", {"batches": batches})]
    run = engines.run(steps, strict=False, speculative_config=magicdec(4), **ENGINE)
    (result,) = run.results
    assert_same_tokens(few_plain, result["batches"][0], "broken drafting")
    assert run.draft_failures > 0 and run.accepted == 0
    # A step's budget follows from the draft's confidence two steps before.
    assert result["verified"] <= 3 * 4 * len(few_prompts) < result["drafts"]


@pytest.mark.gpu
@pytest.mark.parametrize("draft", ["streamingllm", "snapkv", "verify-topk", "a model"])
def test_adaptive_verification_changes_no_output_with_cuda_graphs(prompts, plain, draft):
    fields = {"draft_kv_budget": 256, "enable_adaptive_verification": True}
    if draft == "a model":
        spec = drafting_with(MODEL, **fields)
    else:
        spec = magicdec(4, draft_kv_policy=draft, **fields)
    batches = [{"prompts": prompts, "sampling": GREEDY}]
    run = engines.run(
        [("adaptive_costs", {}), ("generate", {"batches": batches})],
        v2=True,
        enforce_eager=False,
        max_num_seqs=16,
        attention_backend="TRITON_ATTN",  # has graphs for requests of any length on every GPU
        speculative_config=spec,
    )
    (drafts_ms, token_ms), answers = run.results
    assert drafts_ms > token_ms, "four draft steps read the weights four times"
    assert_same_tokens(plain, answers[0], f"{draft}, adaptive verification")
    assert run.draft_failures == 0 and run.accepted > 0
