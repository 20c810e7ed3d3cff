# SPDX-License-Identifier: Apache-2.0
"""With lookups the drafts are the same and fewer passes make them, whatever was looked up."""

import engines
import pytest
from engines import POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens

BY_PAGE = ("streamingllm", "snapkv", "verify-topk")


def with_lookups(gamma: int = 8, **fields):
    return magicdec(gamma, draft_lookup="on", **fields)


@pytest.mark.parametrize("policy", BY_PAGE)
def test_passes_with_lookups_draft_what_one_pass_per_token_does(prompts, plain, policy):
    """Of every round, over the same views and cache; with lookups of its own, then with random ones."""
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
