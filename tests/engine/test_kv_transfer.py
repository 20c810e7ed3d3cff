# SPDX-License-Identifier: Apache-2.0
"""Beside a KV connector: what is saved is exact, and prompts computed elsewhere are drafted for."""

import engines
import pytest
from engines import POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens, first_tokens


@pytest.mark.parametrize("policy", ["snapkv by token", "verify-topk"])
@pytest.mark.parametrize("v2", [False, True], ids=["V1 runner", "V2 runner"])
def test_prompts_that_were_computed_elsewhere(prompts, plain, tmp_path, v2, policy):
    """The first batch is saved, and the second one's prompts are loaded, by vLLM's example of a connector.

    It saves a layer's K/V whenever it is shown one: by the target's passes alone, a layer per step.
    """
    chosen = [i for i, prompt in enumerate(prompts) if 100 < len(prompt) < 900][:6]
    batch = {"prompts": [prompts[i] for i in chosen], "sampling": {**GREEDY, "max_tokens": 12}}
    run = engines.run(
        [("generate_and_note_saves", {"batches": [batch, batch]})],
        v2=v2,
        own_process=True,
        max_num_seqs=4,
        num_gpu_blocks_override=257,
        enable_prefix_caching=False,
        kv_transfer_config={
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        },
        speculative_config=magicdec(4, draft_kv_budget=256, **POLICIES[policy]),
    )
    (result,) = run.results
    computed, loaded = result["batches"]
    truth = [first_tokens(plain[i], 12) for i in chosen]
    assert_same_tokens(truth, computed, "saved")
    assert_same_tokens(truth, loaded, "loaded")
    assert not any(request["cached_tokens"] for request in computed)
    assert all(request["cached_tokens"] for request in loaded)
    assert len(result["saves"]) == 6 and max(result["saves"]) <= result["steps"]
    assert run.accepted > 0 and run.draft_failures == 0
