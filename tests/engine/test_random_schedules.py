# SPDX-License-Identifier: Apache-2.0
"""Greedy output equals plain decoding's while everything that a scheduler can vary varies at random.

Prompts come in chunks, requests are preempted, a second batch finds the prefixes of the first in the cache,
and every step has a random number of drafts (0 included) and random lookups.
"""

from collections import Counter

import engines
import pytest
from draft_engines import TINY_DRAFT, TINY_SPIRE, V2_ENGINE, WHOLE_LEN, drafting_with, on_v2
from engines import POLICIES
from greedy import GREEDY, assert_same_tokens

MAX_DRAFTS = 8
V1_ENGINE = {
    "max_model_len": WHOLE_LEN,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 80,  # the longest request and little else
}


def self_drafting(policy: str, **fields) -> dict:
    return {"method": "magicdec-self", **POLICIES[policy], **fields}


CASES = {
    "streamingllm": self_drafting("streamingllm", draft_kv_budget=64),
    "snapkv": self_drafting("snapkv", draft_kv_budget=128),
    "snapkv by token": self_drafting("snapkv by token", draft_kv_budget=128),
    "verify-topk": self_drafting("verify-topk", draft_kv_budget=256),
    "int4 weights": self_drafting("streamingllm", draft_kv_budget=64, draft_weights="int4"),
    "draft model": drafting_with(TINY_DRAFT, draft_kv_budget=128),
    "SPIRe": drafting_with(TINY_SPIRE),
}
V2_CASES = ("streamingllm", "int4 weights", "draft model")


def run(batch: dict, spec: dict, seed: int, **engine) -> engines.EngineRun:
    """A batch, then its prompts in reverse: the last ones are still in the prefix cache."""
    auto = {"num_speculative_tokens": "auto", "max_num_speculative_tokens": MAX_DRAFTS}
    spec = {**spec, **auto, "draft_lookup": "on"}
    again = {**batch, "prompts": batch["prompts"][::-1]}
    steps = [("generate_with_random_schedule", {"batches": [batch, again], "seed": seed})]
    return engines.run(steps, speculative_config=spec, **engine)


def assert_everything_happened(run: engines.EngineRun) -> None:
    """Check for preemptions, prefix hits, many numbers of drafts, and accepted and rejected drafts."""
    (result,) = run.results
    assert run.preemptions > 0
    assert sum(request["cached_tokens"] for request in result["batches"][1]) > 0
    gammas = Counter({int(gamma): count for gamma, count in result["gammas"].items()})
    assert set(result["planned"]) == set(range(MAX_DRAFTS + 1))
    assert gammas[0] > 5 and len(gammas) > 4, gammas
    assert 0 < run.accepted < run.drafted and run.draft_failures == 0
    # A SPIRe draft checks no looked-up tokens before they are verified.
    assert sum(run.metrics[f"vllm:magicdec_lookup_{name}"] for name in ("tokens", "unchecked_tokens")) > 0


def assert_same_as_plain(run: engines.EngineRun, plain: list[dict], case: str) -> None:
    first, again = run.results[0]["batches"]
    assert_same_tokens(plain, first, case)
    assert_same_tokens(plain[::-1], again, f"{case}, again")


@pytest.mark.parametrize(
    ("seed", "case", "engine"),
    [
        *(pytest.param(seed, case, {}, id=case) for seed, case in enumerate(CASES)),
        pytest.param(6, "snapkv", {"async_scheduling": False}, marks=pytest.mark.extended, id="in sync"),
    ],
)
def test_greedy_output_is_unchanged(prompts, plain, seed, case, engine):
    chosen = range(0, len(prompts), 2)
    batch = {"prompts": [prompts[i] for i in chosen], "sampling": GREEDY}
    speculative = run(batch, CASES[case], seed, **V1_ENGINE, **engine)
    assert not speculative.v2_runner
    assert_everything_happened(speculative)
    assert_same_as_plain(speculative, [plain[i] for i in chosen], case)


@pytest.mark.parametrize(("seed", "case"), enumerate(V2_CASES), ids=V2_CASES)
def test_greedy_output_is_unchanged_on_the_v2_runner(prompts, plain, seed, case):
    """Lookups run on the device, as on a GPU."""
    batch, expected = on_v2(prompts, plain)
    schedule = {"max_model_len": 640, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 24}
    speculative = run(
        batch, CASES[case], seed, env={"MAGICDEC_TEST_TOKENS_ON_DEVICE": "1"}, **{**V2_ENGINE, **schedule}
    )
    assert speculative.v2_runner
    assert_everything_happened(speculative)
    assert_same_as_plain(speculative, expected, f"V2 runner, {case}")
