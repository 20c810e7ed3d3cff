# SPDX-License-Identifier: Apache-2.0
"""Lookups where layers have a window, sinks or positions of their own; tests/engine/ has the rest."""

import cells
import engines
import pytest
from engines import magicdec
from families import FAMILIES
from greedy import assert_same_tokens


@pytest.mark.parametrize(
    ("name", "policy"),
    [("Gemma 3", "streamingllm"), ("Qwen2-VL", "streamingllm"), ("gpt-oss", "snapkv by token")],
)
def test_passes_with_random_lookups_draft_what_the_target_decodes(name, policy):
    (family,) = (family for family in FAMILIES if family.name == name)
    batch = {"prompts": cells.prompts(family), "sampling": cells.SAMPLING}
    run = engines.run(
        [("generate_with_random_lookups", {"batches": [batch], "seed": 0})],
        speculative_config=magicdec(
            4, draft_kv_budget=cells.MODEL_LEN, draft_lookup="on", **engines.POLICIES[policy]
        ),
        **cells.engine(family),
    )
    assert_same_tokens(cells.plain(family), run.results[0][0], name)
    assert run.draft_failures == 0
    assert run.accepted == run.drafted > 0, "a view of the whole context"
