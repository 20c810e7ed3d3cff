# SPDX-License-Identifier: Apache-2.0
"""Lookups with windows, sinks or M-RoPE; tests/engine/ has the other tests of lookups."""

import cells
import engines
import pytest
from engines import magicdec
from families import FAMILIES
from greedy import assert_same_tokens, first_tokens

pytestmark = pytest.mark.extended


@pytest.mark.parametrize(
    ("name", "policy", "runner"),
    [
        ("Gemma 3", "streamingllm", "V1"),
        ("gpt-oss", "snapkv by token", "V1"),
        ("Qwen2-VL", "streamingllm", "V2"),
    ],
)
def test_passes_with_random_lookups_over_the_whole_context_are_all_accepted(name, policy, runner):
    (family,) = (family for family in FAMILIES if family.name == name)
    prompts, length = cells.prompts(family), cells.num_tokens(runner)
    chosen = cells.V2_PROMPTS if runner == "V2" else range(len(prompts))
    batch = {"prompts": [prompts[i] for i in chosen], "sampling": {**cells.SAMPLING, "max_tokens": length}}
    run = engines.run(
        [("generate_with_random_lookups", {"batches": [batch], "seed": 0})],
        speculative_config=magicdec(
            4, draft_kv_budget=cells.MODEL_LEN, draft_lookup="on", **engines.POLICIES[policy]
        ),
        v2=runner == "V2",
        **cells.engine(family),
    )
    expected = [first_tokens(cells.plain(family)[i], length) for i in chosen]
    assert_same_tokens(expected, run.results[0][0], f"{name}, {runner}")
    assert run.v2_runner == (runner == "V2")
    assert run.draft_failures == 0
    assert run.accepted == run.drafted > 0, "a view of the whole context"
