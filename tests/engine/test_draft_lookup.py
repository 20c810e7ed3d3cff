# SPDX-License-Identifier: Apache-2.0
"""Lookups spare passes of drafts, and change no output."""

import engines
import pytest
from draft_engines import WHOLE_LEN
from engines import POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens

pytestmark = pytest.mark.extended


def with_lookups(gamma: int = 8, **fields):
    return magicdec(gamma, draft_lookup="on", **fields)


def lookup_metrics(run: engines.EngineRun) -> dict[str, int]:
    names = ("rounds", "passes", "tokens", "accepted_tokens")
    return {name: run.metrics[f"vllm:magicdec_lookup_{name}"] for name in names}


def test_passes_are_spared_and_counted(prompts, plain):
    spec = with_lookups(draft_kv_budget=WHOLE_LEN, **POLICIES["snapkv by token"])
    sizes = {"max_model_len": WHOLE_LEN, "max_num_seqs": 24, "max_num_batched_tokens": 256}
    run = engines.generate(prompts, GREEDY, speculative_config=spec, **sizes)
    assert_same_tokens(plain, run.results[0][0], "lookups")
    assert run.draft_failures == 0 and run.preemptions == 0
    assert run.accepted == run.drafted > 0, "a view of the whole context drafts what the target decodes"
    counted = lookup_metrics(run)
    assert 0 < counted["accepted_tokens"] < counted["tokens"]
    assert counted["rounds"] <= counted["passes"] < 8 * counted["rounds"]
    assert run.metrics["vllm:magicdec_pass_accepted_tokens"] == run.accepted, "of the last round, too"


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
