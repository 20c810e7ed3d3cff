# SPDX-License-Identifier: Apache-2.0
"""Requests may reach the model's length in the middle of a draft, or of a pass with looked-up tokens."""

import engines
import pytest
import texts
from draft_engines import TINY_SPIRE, V2_ENGINE, drafting_with
from engines import MODEL, POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens
from test_draft_lookup import lookup_metrics

pytestmark = pytest.mark.extended

MODEL_LEN = 256
ENGINE = {"max_model_len": MODEL_LEN, "max_num_seqs": 8}
CASES = {
    # With these, vLLM drafts for no request of a batch in which one has no room for all drafts.
    "streamingllm": magicdec(4, draft_kv_budget=192),
    "verify-topk": magicdec(4, draft_kv_budget=192, **POLICIES["verify-topk"]),
    "lookups": magicdec(16, draft_kv_budget=192, draft_lookup="on"),
    "a draft model": drafting_with(MODEL, 16, draft_kv_budget=MODEL_LEN),
    "SPIRe": drafting_with(TINY_SPIRE, 16),
}


@pytest.fixture(scope="module")
def batch() -> dict:
    """Prompts at every distance from the model's length up to 20."""
    lengths = range(MODEL_LEN - 20, MODEL_LEN)
    prompts = [texts.prompts(1, length, length, seed=length)[0] for length in lengths]
    return {"prompts": prompts, "sampling": {**GREEDY, "max_tokens": 64}}


@pytest.fixture(scope="module")
def truth(batch) -> list[dict]:
    return engines.generate(**batch, **ENGINE).results[0][0]


@pytest.mark.parametrize("case", CASES)
def test_answers_are_plain_decodings(batch, truth, case):
    """A draft crosses the model's end at every step."""
    run = engines.generate(speculative_config=CASES[case], **batch, **ENGINE)
    assert_same_tokens(truth, run.results[0][0], f"the model's end, {case}")
    assert {r["completions"][0]["finish_reason"] for r in run.results[0][0]} == {"length"}
    assert run.draft_failures == 0 and run.accepted > 0
    assert case != "a draft model" or run.accepted == run.drafted


@pytest.mark.parametrize("on_device", [False, True], ids=["lookups on the host", "lookups on the device"])
def test_answers_are_plain_decodings_on_the_v2_runner(batch, truth, on_device):
    """Requests have fewer drafts than the tensor for vLLM's runner has columns."""
    few = {**batch, "prompts": batch["prompts"][:18:3]}
    fields = {"draft_kv_budget": 64, "draft_lookup": "on", "draft_sample_method": "probabilistic"}
    run = engines.run(
        [("generate_with_random_lookups", {"batches": [few], "seed": 3})],
        env={"MAGICDEC_TEST_TOKENS_ON_DEVICE": "1"} if on_device else None,
        speculative_config=magicdec(8, **fields),
        **{**V2_ENGINE, **ENGINE, "max_num_seqs": 4},
    )
    assert_same_tokens(truth[:18:3], run.results[0][0], "the model's end, V2 runner")
    assert run.v2_runner and run.draft_failures == 0
    assert lookup_metrics(run)["tokens"] > 0
