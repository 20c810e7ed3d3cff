# SPDX-License-Identifier: Apache-2.0
"""A draft model over a sparse view of its own KV cache (`method: magicdec`) changes no output.

Its cache holds the verified tokens under any schedule: with the target itself as the draft model and a
view of the whole context, both caches are equal and every draft is accepted.
"""

from pathlib import Path

import engines
import pytest
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
from engines import MODEL, MODEL_LEN
from greedy import GREEDY, assert_same_tokens, first_tokens

pytestmark = pytest.mark.extended

TINY_DRAFT = Path(__file__).parents[2] / "benchmarks" / "tiny-draft"
HYBRID = TINY_DRAFT.parent / "tiny-hybrid"


@pytest.mark.parametrize(("schedule", "lookup"), [("chunked prefill", "on"), ("preemption", "off")])
def test_the_cache_holds_verified_tokens_and_the_target_accepts_its_own_drafts(
    prompts, plain, schedule, lookup
):
    batches = [prompts, [prompts[i] for i in longest(prompts)]]
    run = engines.run(
        [
            ("watch_draft_cache", {}),
            ("generate", {"batches": [{"prompts": batch, "sampling": GREEDY} for batch in batches]}),
            ("watched_draft_cache", {}),
        ],
        speculative_config=drafting_with(MODEL, draft_kv_budget=WHOLE_LEN, draft_lookup=lookup),
        **{"max_model_len": WHOLE_LEN, "max_num_seqs": 16, **SCHEDULES[schedule]},
    )
    _, (first, again), watched = run.results
    assert_same_tokens(plain, first, schedule)
    assert_same_tokens([plain[i] for i in longest(prompts)], again, f"{schedule}, prefix cached")
    assert run.accepted == run.drafted > 0 and run.draft_failures == 0
    if schedule != "preemption":
        assert all(request["cached_tokens"] > 0 for request in again)
    assert watched["tokens"] > 10_000 and watched["difference"] < 1e-3, watched
    # All drafts are accepted, so a round lacks only the last one of each request.
    assert 0 < watched["catch_up"] <= 24
    assert (run.preemptions > 0) == (schedule == "preemption")


def test_the_cache_catches_up_with_plain_steps(prompts, plain):
    """Numbers of drafts change at random, 0 among them."""
    run = engines.run(
        [
            ("watch_draft_cache", {}),
            (
                "generate_with_random_choices",
                {"batches": [{"prompts": prompts, "sampling": GREEDY}], "seed": 2},
            ),
            ("watched_draft_cache", {}),
        ],
        max_num_seqs=8,
        max_num_batched_tokens=256,
        speculative_config=drafting_with(MODEL, "auto", draft_kv_budget=MODEL_LEN, draft_lookup="off"),
    )
    _, result, watched = run.results
    assert_same_tokens(plain, result["batches"][0], "random choices")
    assert result["plain_steps"] > 5 and run.draft_failures == 0
    assert result["sampled_as_speculative"] < result["speculative_steps"] + result["plain_steps"]
    assert watched["tokens"] > 10_000 and watched["difference"] < 1e-3, watched
    assert watched["catch_up"] > 0


def test_requests_may_reach_the_model_length_in_the_middle_of_a_draft(prompts):
    engine = {
        "prompts": [prompt[:length] for prompt in prompts for length in (230, 250) if len(prompt) > 250],
        "sampling": {**GREEDY, "max_tokens": 64},
        "max_model_len": 256,
        "max_num_seqs": 8,
    }
    truth = engines.generate(**engine).results[0][0]
    run = engines.generate(speculative_config=drafting_with(MODEL, 16, draft_kv_budget=256), **engine)
    assert_same_tokens(truth, run.results[0][0], "the model's end")
    assert run.draft_failures == 0 and run.accepted == run.drafted > 0


def test_aborted_requests_change_no_other_and_free_their_pages(prompts, plain):
    batch = {"prompts": prompts, "sampling": GREEDY}
    run = engines.run(
        [
            ("watch_draft_cache", {}),
            ("abort_half_while_decoding", {"batch": batch, "steps_before_abort": 4}),
            ("generate", {"batches": [batch]}),
            ("watched_draft_cache", {}),
        ],
        max_num_seqs=8,
        max_model_len=WHOLE_LEN,
        num_gpu_blocks_override=160,
        speculative_config=drafting_with(MODEL, draft_kv_budget=WHOLE_LEN),
    )
    _, others, (after,), watched = run.results
    for index in range(1, len(prompts), 2):
        assert others[str(index)] == plain[index]["completions"][0]["tokens"]
    assert_same_tokens(plain, after, "after aborts")
    assert run.draft_failures == 0 and watched["difference"] < 1e-3


def test_failed_drafting_loses_no_request(prompts, plain):
    run = engines.run(
        [("generate_with_broken_drafting", {"batches": [{"prompts": prompts[:6], "sampling": GREEDY}]})],
        strict=False,
        speculative_config=drafting_with(TINY_DRAFT, draft_lookup="on"),
    )
    assert_same_tokens(plain[:6], run.results[0][0], "broken drafting")
    assert run.draft_failures > 3  # then it pauses


def test_targets_and_drafts_may_have_layers_with_a_window(prompts):
    """The KV cache then has groups of layers with separate block tables, among them the draft's."""
    chosen = [prompts[i] for i in longest(prompts)] + prompts[:6]
    settings = {"model": str(HYBRID), "max_num_seqs": 4, "max_model_len": WHOLE_LEN}
    truth = engines.generate(chosen, GREEDY, **settings).results[0][0]
    for draft in (TINY_DRAFT, HYBRID):
        spec = drafting_with(draft, draft_kv_budget=WHOLE_LEN)
        run = engines.generate(chosen, GREEDY, speculative_config=spec, **settings)
        assert_same_tokens(truth, run.results[0][0], f"windows, {draft.name}")
        assert run.draft_failures == 0 and 0 < run.accepted <= run.drafted
        assert draft != HYBRID or run.accepted == run.drafted


def test_a_late_catch_up_writes_to_no_page_that_a_window_has_left(prompts, plain):
    """Such pages may belong to another group of layers by then, which shares the memory."""
    chosen = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))[:12]
    batch = {"prompts": [prompts[i] for i in chosen], "sampling": GREEDY}
    run = engines.run(
        [("generate_with_late_prompts", {"batches": [batch]})],
        max_model_len=WHOLE_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=300,
        speculative_config=drafting_with(HYBRID, draft_kv_budget=WHOLE_LEN),
    )
    assert_same_tokens([plain[i] for i in chosen], run.results[0][0], "late prompts")
    assert run.draft_failures == 0 and run.accepted > 0


@engines.needs_tensor_parallel
def test_greedy_output_is_unchanged_with_tensor_parallel_2(prompts, plain):
    chosen = [i for i, prompt in enumerate(prompts) if len(prompt) < 1000][:16]
    run = engines.generate(
        [prompts[i] for i in chosen],
        GREEDY,
        **engines.TENSOR_PARALLEL_2,
        max_num_seqs=8,
        speculative_config=drafting_with(TINY_DRAFT, draft_kv_budget=128),
    )
    assert_same_tokens([plain[i] for i in chosen], run.results[0][0], "tensor parallel 2")
    assert run.accepted > 0


def test_greedy_output_is_unchanged_on_the_v2_runner(prompts, plain):
    """Draft steps run eagerly first, then from CUDA graphs (recorded ones, see recorded_graphs.py)."""
    chosen, batch = on_v2(prompts)
    run = engines.run(
        [
            ("generate_and_count_drafts", {"batches": [batch]}),
            ("record_graphs", {"sizes": [2, 4]}),
            ("generate_and_count_drafts", {"batches": [batch]}),
            ("count_replays", {}),
        ],
        **V2_ENGINE,
        enable_prefix_caching=False,
        # Recorded graphs replay torch's operators, which the kernel for CPUs is not.
        speculative_config=drafting_with(TINY_DRAFT, draft_kv_budget=64, native_attention=False),
    )
    assert run.v2_runner and run.draft_failures == 0
    eager, _, replayed, replays = run.results
    expected = [first_tokens(plain[i], V2_TOKENS) for i in chosen]
    for how, result in (("eager", eager), ("replayed", replayed)):
        assert_same_tokens(expected, result["batches"][0], f"V2 runner, {how}")
    assert 0.3 < eager["accepted"] / eager["drafted"] < 0.95
    assert (replayed["accepted"], replayed["drafted"]) == (eager["accepted"], eager["drafted"])
    # Batches of 4, 3, 2 and 1 requests; first steps have two tokens per request.
    assert set(replays) == {"2", "4", "2 x 2", "4 x 2"} and all(replays.values())


@pytest.mark.parametrize(("schedule", "lookup"), [("preemption", "off"), ("chunked prefill", "on")])
def test_the_cache_holds_verified_tokens_on_the_v2_runner(prompts, plain, schedule, lookup):
    """Requests aborted before leave their pages to others."""
    chosen, batch = on_v2(prompts)
    run = engines.run(
        [
            ("watch_draft_cache", {}),
            ("abort_half_while_decoding", {"batch": batch, "steps_before_abort": 3}),
            ("generate", {"batches": [batch, batch]}),
            ("watched_draft_cache", {}),
        ],
        speculative_config=drafting_with(MODEL, draft_kv_budget=640, draft_lookup=lookup),
        **{**V2_ENGINE, **V2_SCHEDULES[schedule]},
    )
    assert run.v2_runner and run.draft_failures == 0
    _, others, (first, again), watched = run.results
    expected = [first_tokens(plain[i], V2_TOKENS) for i in chosen]
    for index in range(1, len(chosen), 2):
        assert others[str(index)] == expected[index]["completions"][0]["tokens"]
    assert_same_tokens(expected, first, f"V2 runner, {schedule}")
    assert_same_tokens(expected, again, f"V2 runner, {schedule}, prefix cached")
    assert run.accepted == run.drafted > 0
    assert watched["tokens"] > 5000 and watched["difference"] < 1e-3, watched
    # With lookups, the first pass takes the catch-up tokens.
    assert watched["catch_up"] == (4 if lookup == "off" else 0) and watched["lag"] <= 1
    assert (run.preemptions > 0) == (schedule == "preemption")
    if schedule != "preemption":
        assert any(request["cached_tokens"] > 0 for request in again)


def test_the_cache_catches_up_with_plain_steps_on_the_v2_runner(prompts, plain):
    """A full page is complete in the draft's cache before the prefix cache shares it."""
    chosen, batch = on_v2(prompts)
    run = engines.run(
        [
            ("watch_draft_cache", {}),
            ("generate_with_random_choices", {"batches": [batch, batch], "seed": 3}),
            ("watched_draft_cache", {}),
        ],
        **V2_ENGINE,
        speculative_config=drafting_with(MODEL, "auto", draft_kv_budget=1024, draft_lookup="off"),
    )
    assert run.v2_runner and run.draft_failures == 0
    _, result, watched = run.results
    expected = [first_tokens(plain[i], V2_TOKENS) for i in chosen]
    for tokens, what in zip(result["batches"], ("random choices", "prefix cached"), strict=True):
        assert_same_tokens(expected, tokens, f"V2 runner, {what}")
    assert result["plain_steps"] > 5
    assert watched["tokens"] > 5000 and watched["difference"] < 1e-3, watched
    assert watched["lag"] > 1 and watched["catch_up"] > 0


def test_failed_drafting_loses_no_request_on_the_v2_runner(prompts, plain):
    chosen, batch = on_v2(prompts)
    run = engines.run(
        [("generate_with_broken_drafting", {"batches": [batch]})],
        **V2_ENGINE,
        strict=False,
        speculative_config=drafting_with(TINY_DRAFT, draft_lookup="off"),
    )
    expected = [first_tokens(plain[i], V2_TOKENS) for i in chosen]
    assert_same_tokens(expected, run.results[0][0], "V2 runner, broken drafting")
    assert run.v2_runner and run.draft_failures > 3  # then it pauses


def test_drafts_may_have_layers_with_a_window_on_the_v2_runner(prompts):
    _, batch = on_v2(prompts)
    settings = {**V2_ENGINE, "model": str(HYBRID)}
    truth = engines.run([("generate", {"batches": [batch]})], **{**settings, "v2": False}).results[0][0]
    spec = drafting_with(HYBRID, draft_kv_budget=1024)
    run = engines.run([("generate", {"batches": [batch]})], speculative_config=spec, **settings)
    assert_same_tokens(truth, run.results[0][0], "V2 runner, windows")
    assert run.v2_runner and run.draft_failures == 0 and run.accepted == run.drafted > 0
