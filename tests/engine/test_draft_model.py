# SPDX-License-Identifier: Apache-2.0
"""A draft model over a view of its own KV cache changes no output; test_own_caches.py checks the cache."""

import engines
import pytest
from draft_engines import TINY_DRAFT, V2_ENGINE, WHOLE_LEN, drafting_with, longest, on_v2
from greedy import GREEDY, assert_same_tokens

pytestmark = pytest.mark.extended

HYBRID = TINY_DRAFT.with_name("tiny-hybrid")


@pytest.mark.parametrize("v2", [False, True], ids=["V1 runner, lookups", "V2 runner"])
def test_failed_drafting_loses_no_request(prompts, plain, v2):
    batch, expected = on_v2(prompts, plain)
    run = engines.generate(
        **batch,
        **{**V2_ENGINE, "v2": v2},
        strict=False,
        env={engines.FAULT: "selection"},
        speculative_config=drafting_with(TINY_DRAFT, draft_lookup="off" if v2 else "on"),
    )
    assert_same_tokens(expected, run.results[0][0], "broken drafting")
    assert run.v2_runner == v2 and run.draft_failures > 3  # then it pauses


@pytest.mark.parametrize(("draft", "v2"), [(TINY_DRAFT, False), (HYBRID, False), (HYBRID, True)])
def test_targets_and_drafts_may_have_layers_with_a_window(prompts, plain, draft, v2):
    """The KV cache then has groups of layers with separate block tables, among them the draft's."""
    batch, _ = on_v2(prompts, plain)
    if not v2:
        batch = {"prompts": [prompts[i] for i in longest(prompts)] + prompts[:6], "sampling": GREEDY}
    length = 1024 if v2 else WHOLE_LEN
    settings = {**batch, "model": str(HYBRID), "max_num_seqs": 4, "max_model_len": length}
    truth = engines.generate(**settings).results[0][0]
    settings |= V2_ENGINE if v2 else {}
    run = engines.generate(**settings, speculative_config=drafting_with(draft, draft_kv_budget=length))
    assert_same_tokens(truth, run.results[0][0], f"windows, {draft.name}")
    assert run.v2_runner == v2 and run.draft_failures == 0 and 0 < run.accepted <= run.drafted
    assert draft != HYBRID or run.accepted == run.drafted


def test_a_late_catch_up_writes_to_no_page_that_a_window_has_left(prompts, plain):
    """Such pages may belong to another group of layers by then, which shares the memory."""
    chosen = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))[:12]
    batch = {"prompts": [prompts[i] for i in chosen], "sampling": GREEDY}
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 300}
    run = engines.run(
        [("generate_with_late_prompts", {"batches": [batch]})],
        max_model_len=WHOLE_LEN,
        speculative_config=drafting_with(HYBRID, draft_kv_budget=WHOLE_LEN),
        **sizes,
    )
    assert_same_tokens([plain[i] for i in chosen], run.results[0][0], "late prompts")
    assert run.draft_failures == 0 and run.accepted > 0
