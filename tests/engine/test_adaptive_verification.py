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

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def few_prompts() -> list[list[int]]:
    return texts.prompts(5, 20, 600)


@pytest.fixture(scope="module")
def few_plain(few_prompts) -> list[dict]:
    return engines.generate(few_prompts, SHORT, **ENGINE).results[0][0]


@pytest.mark.parametrize("draft", ["streamingllm", "snapkv by token", "verify-topk", "a model", "SPIRe"])
def test_what_is_left_out_changes_no_output(few_prompts, few_plain, draft):
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
    free, dear = (run.results[0][name] for name in ("free", "dear"))
    for noted in (free, dear):
        assert_same_tokens(few_plain, noted["batches"][0], draft)
        assert noted["predicted"] > 100 and noted["difference"] < 1e-4
        assert noted["timed"] == 4, "vLLM times as many draft steps as a round has"
    assert free["verified"] == free["drafts"]
    assert 0 < dear["verified"] < dear["drafts"] and dear["uneven"] > 0
    # What is left out stands more seldom than the rest, where not all of it does.
    rate_of_all = free["accepted"] / free["verified"]
    assert rate_of_all > 0.95 or dear["accepted"] / dear["verified"] > rate_of_all


def test_drafts_that_failed_are_not_verified(few_prompts, few_plain):
    batches = [{"prompts": few_prompts, "sampling": SHORT}]
    steps = [("generate_adaptively_with_broken_drafting", {"batches": batches})]
    run = engines.run(steps, strict=False, speculative_config=magicdec(4), **ENGINE)
    (noted,) = run.results
    assert_same_tokens(few_plain, noted["batches"][0], "broken drafting")
    assert run.draft_failures > 0 and run.accepted == 0
    # Budgets are of what the draft promised two steps before.
    assert noted["verified"] <= 3 * 4 * len(few_prompts) < noted["drafts"]


@pytest.mark.gpu
@pytest.mark.parametrize("draft", ["streamingllm", "snapkv", "verify-topk", "a model"])
def test_what_is_left_out_changes_no_output_with_cuda_graphs(prompts, plain, draft):
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
