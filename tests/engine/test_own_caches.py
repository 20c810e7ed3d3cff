# SPDX-License-Identifier: Apache-2.0
"""A draft's own KV cache holds all verified tokens in every round, under any schedule.

Both drafts have the target's K/V, so that caches can be compared: the target itself, as a draft model with
a view of the whole context, and a SPIRe draft whose blocks are the target's last and whose memory is the
input of each block.
"""

import engines
import pytest
import spire_drafts
import torch
from draft_engines import (
    SCHEDULES,
    V2_ENGINE,
    V2_SCHEDULES,
    V2_TOKENS,
    WHOLE_LEN,
    drafting_with,
    longest,
    on_v2,
)
from engines import MODEL
from greedy import GREEDY, assert_same_tokens, first_tokens

pytestmark = pytest.mark.extended

REMEMBERS_INPUTS = 1e4  # a logit far above the others
DRAFT_MODEL, SPIRE = "draft", "spire"  # as scenarios are named


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of the drafts."""
    spire = spire_drafts.write(
        tmp_path_factory.mktemp("copying"),
        MODEL,
        num_layers=2,
        sinks=4,
        window=60,
        noise=0,
        memory=REMEMBERS_INPUTS * torch.eye(2, 3),
    )
    return {DRAFT_MODEL: MODEL, SPIRE: spire}


def run_watched(models, draft, steps, number=4, lookup="off", **engine):
    """Run an engine whose caches are compared; return the run, the steps' results, and the comparison."""
    fields = {"draft_kv_budget": engine["max_model_len"]} if draft == DRAFT_MODEL else {}
    run = engines.run(
        [(f"watch_{draft}_cache", {}), *steps, (f"watched_{draft}_cache", {})],
        speculative_config=drafting_with(models[draft], number, draft_lookup=lookup, **fields),
        **engine,
    )
    _, *results, watched = run.results
    assert run.draft_failures == 0
    assert watched["tokens"] > 5000 and watched["difference"] < 1e-3, watched
    return run, results, watched


@pytest.mark.parametrize(
    ("draft", "schedule", "lookup"),
    [
        (DRAFT_MODEL, "chunked prefill", "on"),
        (DRAFT_MODEL, "preemption", "off"),
        (SPIRE, "chunked prefill", "off"),
        (SPIRE, "preemption", "off"),
    ],
)
def test_it_holds_the_verified_tokens(prompts, plain, models, draft, schedule, lookup):
    batches = [{"prompts": prompts, "sampling": GREEDY}]
    batches.append({"prompts": [prompts[i] for i in longest(prompts)], "sampling": GREEDY})
    run, [[first, again]], watched = run_watched(
        models,
        draft,
        [("generate", {"batches": batches})],
        lookup=lookup,
        **{"max_model_len": WHOLE_LEN, "max_num_seqs": 16, **SCHEDULES[schedule]},
    )
    assert_same_tokens(plain, first, schedule)
    assert_same_tokens([plain[i] for i in longest(prompts)], again, f"{schedule}, prefix cached")
    assert watched["tokens"] > 10_000
    assert (run.preemptions > 0) == (schedule == "preemption")
    if schedule != "preemption":
        assert all(request["cached_tokens"] > 0 for request in again)
    if draft == DRAFT_MODEL:
        assert run.accepted == run.drafted > 0
        # All drafts are accepted, so a round lacks only the last one of each request.
        assert 0 < watched["catch_up"] <= 24


@pytest.mark.parametrize("draft", [DRAFT_MODEL, SPIRE])
def test_it_follows_plain_steps(prompts, plain, models, draft):
    """Numbers of drafts change at random, 0 included."""
    batches = [{"prompts": prompts, "sampling": GREEDY}]
    _, [result], watched = run_watched(
        models,
        draft,
        [("generate_with_random_schedule", {"batches": batches, "seed": 2})],
        "auto",
        max_model_len=engines.MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=256,
    )
    assert_same_tokens(plain, result["batches"][0], "random numbers")
    assert result["gammas"]["0"] > 5 and watched["tokens"] > 10_000
    assert draft == SPIRE or watched["catch_up"] > 0


def test_aborted_requests_change_no_other_and_free_their_pages(prompts, plain, models):
    batch = {"prompts": prompts, "sampling": GREEDY}
    _, [others, [after]], _ = run_watched(
        models,
        DRAFT_MODEL,
        [
            ("abort_half_while_decoding", {"batch": batch, "steps_before_abort": 4}),
            ("generate", {"batches": [batch]}),
        ],
        max_num_seqs=8,
        max_model_len=WHOLE_LEN,
        num_gpu_blocks_override=160,
    )
    for index in range(1, len(prompts), 2):
        assert others[str(index)] == plain[index]["completions"][0]["tokens"]
    assert_same_tokens(plain, after, "after aborts")


@pytest.mark.parametrize(
    ("draft", "schedule", "lookup"),
    [
        (DRAFT_MODEL, "preemption", "off"),
        (DRAFT_MODEL, "chunked prefill", "on"),
        (SPIRE, "chunked prefill", "off"),
    ],
)
def test_it_holds_the_verified_tokens_on_the_v2_runner(prompts, plain, models, draft, schedule, lookup):
    """Aborted requests leave their pages to others; no write of SPIRe's memory waits for the device."""
    chosen, batch = on_v2(prompts)
    run, [others, [first, again]], watched = run_watched(
        models,
        draft,
        [
            ("abort_half_while_decoding", {"batch": batch, "steps_before_abort": 3}),
            ("generate", {"batches": [batch, batch]}),
        ],
        lookup=lookup,
        **{**V2_ENGINE, **V2_SCHEDULES[schedule]},
    )
    assert run.v2_runner
    expected = [first_tokens(plain[i], V2_TOKENS) for i in chosen]
    for index in range(1, len(chosen), 2):
        assert others[str(index)] == expected[index]["completions"][0]["tokens"]
    assert_same_tokens(expected, first, f"V2 runner, {schedule}")
    assert_same_tokens(expected, again, f"V2 runner, {schedule}, prefix cached")
    assert (run.preemptions > 0) == (schedule == "preemption")
    if schedule != "preemption":
        assert any(request["cached_tokens"] > 0 for request in again)
    if draft == DRAFT_MODEL:
        assert run.accepted == run.drafted > 0
        # The first pass takes the last token of each request's round, also with lookups.
        assert watched["catch_up"] == 4 and watched["lag"] <= 1


@pytest.mark.parametrize("draft", [DRAFT_MODEL, SPIRE])
def test_it_follows_plain_steps_on_the_v2_runner(prompts, plain, models, draft):
    """A full page is complete in the draft's cache before the prefix cache shares it."""
    chosen, batch = on_v2(prompts)
    run, [result], watched = run_watched(
        models,
        draft,
        [("generate_with_random_schedule", {"batches": [batch, batch], "seed": 3})],
        "auto",
        **V2_ENGINE,
    )
    expected = [first_tokens(plain[i], V2_TOKENS) for i in chosen]
    for tokens, what in zip(result["batches"], ("random numbers", "prefix cached"), strict=True):
        assert_same_tokens(expected, tokens, f"V2 runner, {what}")
    assert result["gammas"]["0"] > 5 and run.v2_runner
    assert draft == SPIRE or (watched["lag"] > 1 and watched["catch_up"] > 0)


@engines.needs_tensor_parallel
def test_with_tensor_parallel_2_every_rank_holds_the_memory_of_its_heads(prompts, plain, models):
    chosen = [i for i, prompt in enumerate(prompts) if len(prompt) < 1000][:16]
    batch = {"prompts": [prompts[i] for i in chosen], "sampling": GREEDY}
    run, [[result]], _ = run_watched(
        models, SPIRE, [("generate", {"batches": [batch]})], **engines.TENSOR_PARALLEL_2, max_num_seqs=8
    )
    assert_same_tokens([plain[i] for i in chosen], result, "tensor parallel 2")
    assert run.accepted > 0
