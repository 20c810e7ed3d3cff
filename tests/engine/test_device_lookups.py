# SPDX-License-Identifier: Apache-2.0
"""Lookups on the device: output and drafts do not depend on the number of passes or on the lookups.

On a GPU the host does not have the latest tokens; here the V2 runner looks up the same way on a CPU.
"""

import engines
import pytest
from engines import MODEL_LEN, POLICIES
from greedy import assert_same_tokens, first_tokens
from test_draft_lookup import lookup_metrics, on_v2, with_lookups

pytestmark = pytest.mark.extended

ON_DEVICE = {"MAGICDEC_TEST_TOKENS_ON_DEVICE": "1"}
NUM_TOKENS = 24


def run_on_device(steps, env=None, **engine) -> engines.EngineRun:
    run = engines.run(steps, env={**ON_DEVICE, **(env or {})}, **engine)
    assert run.v2_runner and run.draft_failures == 0
    return run


@pytest.mark.parametrize(
    ("policy", "budget"),
    [
        ("snapkv", 128),
        ("verify-topk", MODEL_LEN),
    ],
)
def test_wide_passes_equal_one_pass_per_token(prompts, plain, policy, budget):
    chosen, engine = on_v2(prompts, NUM_TOKENS)
    batches = {"batches": engine.pop("batches")}
    run = run_on_device(
        [
            ("generate_and_count_drafts", batches),
            ("generate_with_random_lookups", {**batches, "seed": 3}),
            ("generate_and_draft_twice", batches),
        ],
        speculative_config=with_lookups(6, draft_kv_budget=budget, **POLICIES[policy]),
        **engine,
    )
    counted, at_random, twice = run.results
    assert twice["rounds"] > 20 and twice["passes"] > 20
    assert twice["different"] <= 0.01 * twice["rounds"], "more than rounding"
    expected = [first_tokens(plain[i], NUM_TOKENS) for i in chosen]
    for results in (counted["batches"], twice["batches"], at_random):
        assert_same_tokens(expected, results[0], f"{policy}, budget {budget}")
    looked_up = lookup_metrics(run)
    assert 0 < looked_up["accepted_tokens"] < looked_up["tokens"]
    assert looked_up["rounds"] <= looked_up["passes"] < 6 * looked_up["rounds"]


@pytest.mark.parametrize("max_num_seqs", [4, 2])
def test_sampled_drafts_and_their_logits_are_those_of_one_pass_per_token(prompts, plain, max_num_seqs):
    """Drafts agree up to the number of passes; later ones are verified with the logits kept for them.

    With `max_num_seqs=2` passes run uncaptured, since recorded graphs have no Triton kernels.
    """
    chosen, engine = on_v2(prompts, NUM_TOKENS)
    (batch,) = engine.pop("batches")
    sampled = {**batch["sampling"], "temperature": 0.8, "seed": 5}
    sampling = [sampled, batch["sampling"]] * (len(batch["prompts"]) // 2)
    batches = {"batches": [{**batch, "sampling": sampling}]}
    captured = [("run_passes_as_captured", {})] if max_num_seqs < 4 else []
    run = run_on_device(
        [
            *captured,
            ("generate_with_random_lookups", {**batches, "seed": 3}),
            ("generate_and_draft_twice", batches),
        ],
        speculative_config=with_lookups(6, draft_kv_budget=64, draft_sample_method="probabilistic"),
        **{**engine, "max_num_seqs": max_num_seqs},
    )
    at_random, twice = run.results[-2:]
    assert twice["rounds"] > 20
    assert twice["different"] <= 0.01 * twice["rounds"], "more than rounding"
    assert twice["other_logits"] == twice["not_kept"] == 0
    expected = [first_tokens(plain[i], NUM_TOKENS) for i in chosen]
    for results in (at_random, twice["batches"]):
        assert_same_tokens(expected[1::2], results[0][1::2], "beside sampled requests")


def test_output_is_unchanged_with_a_draft_model(prompts, plain):
    """tests/drafting/test_model_cache.py checks the draft's cache after too few passes."""
    chosen, engine = on_v2(prompts, NUM_TOKENS)
    batches = {"batches": engine.pop("batches")}
    spec = with_lookups(6, draft_kv_budget=MODEL_LEN)
    spec |= {"method": "magicdec", "model": str(engines.MODEL)}
    run = run_on_device(
        [
            ("generate_and_count_drafts", batches),
            ("generate_with_random_lookups", {**batches, "seed": 3}),
            ("generate_and_draft_twice", batches),
        ],
        speculative_config=spec,
        **engine,
    )
    expected = [first_tokens(plain[i], NUM_TOKENS) for i in chosen]
    counted, at_random, twice = run.results
    for results in (counted["batches"], at_random, twice["batches"]):
        assert_same_tokens(expected, results[0], "a draft model")
    # The draft is the target with a full view, so drafts of one pass per token are all accepted.
    assert twice["different"] == 0


def test_wide_passes_are_replayed_from_recorded_graphs(prompts, plain):
    chosen, engine = on_v2(prompts, NUM_TOKENS)
    batches = {"batches": engine.pop("batches")}
    run = run_on_device(
        [
            ("record_graphs", {"sizes": [2, 4]}),
            ("generate_with_random_lookups", {**batches, "seed": 3}),
            ("generate_and_draft_twice", batches),
            ("count_replays", {}),
        ],
        # Recorded graphs replay torch's operators, which the kernel for CPUs is not.
        speculative_config=with_lookups(
            6, draft_kv_budget=128, native_attention=False, **POLICIES["snapkv"]
        ),
        **engine,
    )
    _, at_random, twice, replays = run.results
    expected = [first_tokens(plain[i], NUM_TOKENS) for i in chosen]
    for results in (at_random, twice["batches"]):
        assert_same_tokens(expected, results[0], "recorded graphs")
    assert twice["rounds"] > 20
    assert twice["different"] <= 0.01 * twice["rounds"], "more than rounding"
    # 4, 3, 2 and 1 requests at a time, each in the smallest graph that holds them.
    assert replays["2 x 6, a pass"] > 0 < replays["4 x 6, a pass"]


def test_failing_lookups_lose_no_request(prompts, plain):
    chosen, engine = on_v2(prompts, 16)
    run = run_on_device(
        [("generate", {"batches": engine.pop("batches")})],
        env={engines.FAULT: "lookup"},
        strict=False,
        speculative_config=with_lookups(4, draft_kv_budget=64),
        **engine,
    )
    expected = [first_tokens(plain[i], 16) for i in chosen]
    assert_same_tokens(expected, run.results[0][0], "broken lookups")
    assert run.metrics["vllm:magicdec_lookup_failures"] > 0
