# SPDX-License-Identifier: Apache-2.0
"""A draft model's KV cache of sinks and window (a ring) changes no output and holds the verified tokens.

With the target itself as the draft model the entries of both caches are compared: in all layers if the
view is the whole context, when all drafts are accepted; otherwise in the first layer.
"""

import engines
import pytest
from draft_engines import SCHEDULES as WHOLE_SCHEDULES
from draft_engines import V2_ENGINE, V2_SCHEDULES, V2_TOKENS, WHOLE_LEN, drafting_with, longest, on_v2
from engines import MODEL
from greedy import GREEDY, assert_same_tokens, first_tokens
from test_draft_model import TINY_DRAFT

pytestmark = pytest.mark.extended

BUDGET = 512  # of 2,048 tokens; contexts are shorter and longer
V2_BUDGET = 192  # of 1,024
RING_V2_SCHEDULES = {
    **V2_SCHEDULES,
    "preemption": {**V2_SCHEDULES["preemption"], "num_gpu_blocks_override": 30},
}
# The longest request and its ring need 82 blocks.
SCHEDULES = {
    **WHOLE_SCHEDULES,
    "preemption": {**WHOLE_SCHEDULES["preemption"], "num_gpu_blocks_override": 84},
}


def short(prompts: list[list[int]]) -> list[int]:
    """Return indices of prompts that fit into a view with their answers."""
    return [i for i, prompt in enumerate(prompts) if len(prompt) + GREEDY["max_tokens"] < BUDGET - 64]


# test_draft_model.py has the other half of the pairs.
@pytest.mark.parametrize(("schedule", "lookup"), zip(SCHEDULES, ("on", "off", "on"), strict=True))
def test_the_ring_holds_verified_tokens(prompts, plain, schedule, lookup):
    batches = [prompts, [prompts[i] for i in longest(prompts)]]
    whole = {"prompts": [prompts[i] for i in short(prompts)], "sampling": GREEDY}
    run = engines.run(
        [
            ("watch_draft_cache", {}),
            ("generate_and_count_drafts", {"batches": [whole]}),
            ("generate", {"batches": [{"prompts": batch, "sampling": GREEDY} for batch in batches]}),
            ("watched_draft_cache", {}),
        ],
        speculative_config=drafting_with(
            MODEL, draft_kv_budget=BUDGET, draft_lookup=lookup, draft_kv_cache="ring"
        ),
        **{"max_model_len": WHOLE_LEN, "max_num_seqs": 16, **SCHEDULES[schedule]},
    )
    _, counted, (first, again), watched = run.results
    assert run.draft_failures == 0
    assert counted["accepted"] == counted["drafted"] > 0
    assert_same_tokens([plain[i] for i in short(prompts)], counted["batches"][0], "seen whole")
    assert_same_tokens(plain, first, schedule)
    assert_same_tokens([plain[i] for i in longest(prompts)], again, f"{schedule}, prefix cached")
    assert watched["tokens"] - watched["sparse"] > 10_000 and watched["sparse"] > 10_000
    assert watched["difference"] < 1e-3, watched
    assert (run.preemptions > 0) == (schedule == "preemption")
    if schedule != "preemption":
        assert all(request["cached_tokens"] > 0 for request in again)


def test_the_ring_catches_up_with_plain_steps_and_aborts(prompts, plain):
    """Numbers of drafts change at random, 0 included; others get the pages of aborted requests."""
    batch = {"prompts": prompts, "sampling": GREEDY}
    run = engines.run(
        [
            ("watch_draft_cache", {}),
            ("abort_half_while_decoding", {"batch": batch, "steps_before_abort": 4}),
            ("generate_with_random_choices", {"batches": [batch], "seed": 2}),
            ("watched_draft_cache", {}),
        ],
        max_num_seqs=8,
        max_model_len=WHOLE_LEN,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=160,
        speculative_config=drafting_with(
            MODEL, "auto", draft_kv_budget=BUDGET, draft_lookup="off", draft_kv_cache="ring"
        ),
    )
    _, others, result, watched = run.results
    for index in range(1, len(prompts), 2):
        assert others[str(index)] == plain[index]["completions"][0]["tokens"]
    assert_same_tokens(plain, result["batches"][0], "random choices")
    assert result["plain_steps"] > 5 and run.draft_failures == 0
    assert watched["sparse"] > 10_000 and watched["difference"] < 1e-3, watched


def test_a_small_draft_compiles_and_the_target_gets_the_room(prompts, plain):
    """As users run it; compared with an engine whose draft has a whole cache."""
    spec = drafting_with(TINY_DRAFT, draft_kv_budget=BUDGET)
    whole = engines.generate([prompts[0][:8]], GREEDY, max_num_seqs=8, speculative_config=spec)
    ring = engines.generate(
        prompts,
        GREEDY,
        own_process=True,
        enforce_eager=False,
        max_num_seqs=8,
        speculative_config={**spec, "draft_kv_cache": "ring"},
    )
    assert_same_tokens(plain, ring.results[0][0], "as users run it")
    assert ring.draft_failures == 0 and 0.3 < ring.accepted / ring.drafted < 0.95
    for run in (ring, whole):
        assert "has its own KV cache" in run.log
    assert "the draft model's layers take 25 % of the KV cache" in whole.log
    # A whole cache has 6 + 2 layers of the same page size, a ring leaves 6.
    assert ring.num_kv_blocks == pytest.approx(whole.num_kv_blocks * 8 / 6, rel=0.01)
    assert "holds 544 tokens of a request, in a ring of 17 pages" in ring.log
    assert "holds every token, as the target's does: draft_kv_cache is 'whole'" in whole.log


@pytest.mark.parametrize(
    ("schedule", "lookup"), [("whole prompts", "off"), ("chunked prefill", "on"), ("preemption", "off")]
)
def test_the_ring_holds_verified_tokens_on_the_v2_runner(prompts, plain, schedule, lookup):
    """Requests aborted before leave their rings to others."""
    chosen, batch = on_v2(prompts)
    run = engines.run(
        [
            ("watch_draft_cache", {}),
            ("abort_half_while_decoding", {"batch": batch, "steps_before_abort": 3}),
            ("generate", {"batches": [batch, batch]}),
            ("watched_draft_cache", {}),
        ],
        speculative_config=drafting_with(
            MODEL, draft_kv_budget=V2_BUDGET, draft_lookup=lookup, draft_kv_cache="ring"
        ),
        **{**V2_ENGINE, **RING_V2_SCHEDULES[schedule]},
    )
    assert run.v2_runner and run.draft_failures == 0
    _, others, (first, again), watched = run.results
    expected = [first_tokens(plain[i], V2_TOKENS) for i in chosen]
    for index in range(1, len(chosen), 2):
        assert others[str(index)] == expected[index]["completions"][0]["tokens"]
    assert_same_tokens(expected, first, f"V2 runner, {schedule}")
    assert_same_tokens(expected, again, f"V2 runner, {schedule}, prefix cached")
    assert watched["tokens"] - watched["sparse"] > 1000 and watched["sparse"] > 1000
    assert watched["difference"] < 1e-3, watched
    assert (run.preemptions > 0) == (schedule == "preemption")
    if schedule != "preemption":
        assert any(request["cached_tokens"] > 0 for request in again)


def test_the_ring_catches_up_with_plain_steps_on_the_v2_runner(prompts, plain):
    """A ring may lag by many plain steps: its pages are not shared, so none must be complete."""
    chosen, batch = on_v2(prompts)
    run = engines.run(
        [
            ("watch_draft_cache", {}),
            ("generate_with_random_choices", {"batches": [batch, batch], "seed": 3}),
            ("watched_draft_cache", {}),
        ],
        **V2_ENGINE,
        speculative_config=drafting_with(
            MODEL, "auto", draft_kv_budget=V2_BUDGET, draft_lookup="off", draft_kv_cache="ring"
        ),
    )
    assert run.v2_runner and run.draft_failures == 0
    _, result, watched = run.results
    expected = [first_tokens(plain[i], V2_TOKENS) for i in chosen]
    for tokens, what in zip(result["batches"], ("random choices", "prefix cached"), strict=True):
        assert_same_tokens(expected, tokens, f"V2 runner, {what}")
    assert result["plain_steps"] > 5
    assert watched["sparse"] > 1000 and watched["difference"] < 1e-3, watched
    assert watched["lag"] > 1 and watched["catch_up"] > 0


def test_graphs_over_rings_equal_eager_steps(prompts, plain):
    """Graphs are recorded, see recorded_graphs.py; a ring's tables are rebuilt in every round."""
    chosen, batch = on_v2(prompts)
    run = engines.run(
        [
            ("generate_and_count_drafts", {"batches": [batch]}),
            ("record_graphs", {"sizes": [2, 4]}),
            ("generate_and_count_drafts", {"batches": [batch]}),
            ("count_replays", {}),
        ],
        **V2_ENGINE,
        own_process=True,
        enable_prefix_caching=False,
        speculative_config=drafting_with(
            TINY_DRAFT, draft_kv_budget=V2_BUDGET, draft_kv_cache="ring", native_attention=False
        ),
    )
    assert run.v2_runner and run.draft_failures == 0
    eager, _, replayed, replays = run.results
    expected = [first_tokens(plain[i], V2_TOKENS) for i in chosen]
    for how, result in (("eager", eager), ("replayed", replayed)):
        assert_same_tokens(expected, result["batches"][0], f"V2 runner, {how}")
    assert 0.3 < eager["accepted"] / eager["drafted"] < 0.95
    assert (replayed["accepted"], replayed["drafted"]) == (eager["accepted"], eager["drafted"])
    assert set(replays) == {"2", "4", "2 x 2", "4 x 2"} and all(replays.values())
    assert "in a ring of 7 pages" in run.log
