# SPDX-License-Identifier: Apache-2.0
"""With lookups fewer passes sample the same drafts, or the first of them, whatever was looked up."""

import engines
import pytest
from engines import POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens

pytestmark = pytest.mark.extended

WHOLE_LEN = 2048  # tokens; nothing of the prompts and answers is longer


def with_lookups(gamma: int = 8, **fields):
    return magicdec(gamma, draft_lookup="on", **fields)


def lookup_metrics(run: engines.EngineRun) -> dict[str, int]:
    names = ("rounds", "passes", "tokens", "accepted_tokens")
    return {name: run.metrics[f"vllm:magicdec_lookup_{name}"] for name in names}


def test_passes_are_spared_and_counted(prompts, plain):
    run = engines.generate(
        prompts,
        GREEDY,
        speculative_config=with_lookups(draft_kv_budget=WHOLE_LEN, **POLICIES["snapkv by token"]),
        max_model_len=WHOLE_LEN,
        max_num_seqs=24,
        max_num_batched_tokens=256,
    )
    assert_same_tokens(plain, run.results[0][0], "lookups")
    assert run.draft_failures == 0 and run.preemptions == 0
    assert run.accepted == run.drafted > 0, "a view of the whole context drafts what the target decodes"
    counted = lookup_metrics(run)
    assert 0 < counted["accepted_tokens"] < counted["tokens"]
    assert counted["rounds"] <= counted["passes"] < 8 * counted["rounds"]
    assert run.metrics["vllm:magicdec_pass_accepted_tokens"] == run.accepted, "of the last round, too"


@pytest.mark.parametrize("policy", ["snapkv by token", "verify-topk"])
def test_passes_with_lookups_equal_one_pass_per_token(prompts, plain, policy):
    """Both draft every round over the same views and cache, with real and then with random lookups."""
    chosen = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))[-8:]
    batch = {"prompts": [prompts[i] for i in chosen], "sampling": GREEDY}
    spec = with_lookups(6, draft_kv_budget=192, **POLICIES[policy])
    run = engines.run(
        [
            ("generate_and_draft_twice", {"batches": [batch]}),
            ("generate_with_random_lookups", {"batches": [batch], "seed": 3}),
            ("generate_and_draft_twice", {"batches": [batch]}),
        ],
        max_num_seqs=4,
        speculative_config=spec,
    )
    own, _, at_random = run.results
    for result in (own, at_random):
        assert result["rounds"] > 50
        assert result["different"] <= 0.01 * result["rounds"], "more than rounding"
    for result in (own["batches"], run.results[1], at_random["batches"]):
        assert_same_tokens([plain[i] for i in chosen], result[0], policy)


def test_lookups_in_served_answers_change_no_output(prompts, plain):
    batch = {"prompts": prompts, "sampling": GREEDY}
    run = engines.run(
        [("generate", {"batches": [batch, batch]}), ("served_answers", {})],
        max_num_seqs=8,
        speculative_config=with_lookups(draft_kv_budget=256, draft_lookup_sources=["context", "served"]),
    )
    for answers in run.results[0]:
        assert_same_tokens(plain, answers, "served answers")
    served = f" {' '.join(map(str, run.results[1]))} "
    for request in run.results[0][0]:  # from the first token to the last
        assert f" {' '.join(map(str, request['completions'][0]['tokens']))} " in served
    assert run.results[1].count(-1) < 2 + 2 * len(prompts), "each once"
    counted = lookup_metrics(run)
    # The second time, every answer has been served before.
    assert counted["accepted_tokens"] > 0.4 * run.drafted and counted["passes"] < 6 * counted["rounds"]
