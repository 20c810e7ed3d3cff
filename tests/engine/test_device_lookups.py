# SPDX-License-Identifier: Apache-2.0
"""Lookups on the device, by the V2 runner on a CPU: no number of passes or lookups changes the drafts."""

import engines
import pytest
from draft_engines import V2_ENGINE, drafting_with, on_v2
from engines import POLICIES
from greedy import assert_same_tokens
from test_draft_lookup import lookup_metrics, with_lookups

pytestmark = pytest.mark.extended

ON_DEVICE = {"MAGICDEC_TEST_TOKENS_ON_DEVICE": "1"}
WHOLE = V2_ENGINE["max_model_len"]


def run_on_device(steps, spec, **engine) -> engines.EngineRun:
    run = engines.run(steps, env=ON_DEVICE, speculative_config=spec, **{**V2_ENGINE, **engine})
    assert run.v2_runner and run.draft_failures == 0
    return run


def assert_drafts_are_those_of_one_pass_per_token(twice: dict) -> None:
    assert twice["rounds"] > 20 and twice["passes"] > 20
    assert twice["different"] <= 0.01 * twice["rounds"], "more than rounding"
    assert twice["other_logits"] == twice["not_kept"] == 0


@pytest.mark.parametrize(
    ("spec", "has_graphs"),
    [
        (with_lookups(6, draft_kv_budget=WHOLE, **POLICIES["verify-topk"]), False),
        # The target with a view of the whole context: drafts of one pass per token are all accepted.
        (drafting_with(engines.MODEL, 6, draft_kv_budget=WHOLE, draft_lookup="on"), False),
        # Recorded graphs replay torch's operators, which the kernel for CPUs is not.
        (with_lookups(6, draft_kv_budget=128, native_attention=False, **POLICIES["snapkv"]), True),
    ],
    ids=["verify-topk", "a draft model", "snapkv from recorded graphs"],
)
def test_wide_passes_equal_one_pass_per_token(prompts, plain, spec, has_graphs):
    batch, expected = on_v2(prompts, plain)
    batches = {"batches": [batch]}
    random = ("generate_with_random_lookups", {**batches, "seed": 3})
    steps = [random, ("generate_and_draft_twice", batches)]
    if has_graphs:
        steps = [("record_graphs", {"sizes": [2, 4]}), *steps, ("count_replays", {})]
    run = run_on_device(steps, spec)
    at_random, twice = run.results[1:3] if has_graphs else run.results
    if has_graphs:
        replays = run.results[-1]
        # 4, 3, 2 and 1 requests at a time, each in the smallest graph that holds them.
        assert replays["2 x 6, a pass"] > 0 < replays["4 x 6, a pass"]
    assert_drafts_are_those_of_one_pass_per_token(twice)
    for answers in (at_random, twice["batches"]):
        assert_same_tokens(expected, answers[0], "wide passes")
    looked_up = lookup_metrics(run)
    assert 0 < looked_up["accepted_tokens"] < looked_up["tokens"]
    assert looked_up["rounds"] <= looked_up["passes"] < 6 * looked_up["rounds"]


@pytest.mark.parametrize("max_num_seqs", [4, 2])
def test_sampled_drafts_and_their_logits_are_those_of_one_pass_per_token(prompts, plain, max_num_seqs):
    """With `max_num_seqs=2` passes are not recorded: recorded graphs have no Triton kernels."""
    batch, expected = on_v2(prompts, plain)
    sampled = {**batch["sampling"], "temperature": 0.8, "seed": 5}
    sampling = [sampled, batch["sampling"]] * (len(batch["prompts"]) // 2)
    batches = {"batches": [{**batch, "sampling": sampling}]}
    steps = [
        ("generate_with_random_lookups", {**batches, "seed": 3}),
        ("generate_and_draft_twice", batches),
    ]
    if max_num_seqs < 4:
        steps.insert(0, ("run_passes_as_captured", {}))
    spec = with_lookups(6, draft_kv_budget=64, draft_sample_method="probabilistic")
    run = run_on_device(steps, spec, max_num_seqs=max_num_seqs)
    at_random, twice = run.results[-2:]
    assert_drafts_are_those_of_one_pass_per_token(twice)
    for results in (at_random, twice["batches"]):
        assert_same_tokens(expected[1::2], results[0][1::2], "beside sampled requests")
