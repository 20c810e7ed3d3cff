# SPDX-License-Identifier: Apache-2.0
"""A draft's own KV cache holds all verified tokens in every round, under any schedule.

Both drafts have the target's K/V: the target itself over the whole context, and a SPIRe draft whose blocks
are the target's last and whose memory is the input of each block.
"""

import engines
import pytest
import spire_drafts
import torch
from draft_engines import V2_ENGINE, WHOLE_LEN, drafting_with, few, on_v2
from engines import MODEL
from greedy import GREEDY, assert_same_tokens

pytestmark = pytest.mark.extended

REMEMBERS_INPUTS = 1e4  # a logit far above the others
DRAFT_MODEL, SPIRE = "draft", "spire"  # as scenarios are named


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    fields = {"sinks": 4, "window": 60, "noise": 0, "memory": REMEMBERS_INPUTS * torch.eye(2, 3)}
    folder = tmp_path_factory.mktemp("copying")
    return {DRAFT_MODEL: MODEL, SPIRE: spire_drafts.write(folder, MODEL, num_layers=2, **fields)}


def run_watched(models, draft, steps, number=4, lookup="off", **engine):
    """Compare an engine's caches; return the run, the steps' results, and the first rank's comparison."""
    fields = {"draft_kv_budget": engine["max_model_len"]} if draft == DRAFT_MODEL else {}
    run = engines.run(
        [(f"watch_{draft}_cache", {}), *steps, ("noted_by_ranks", {})],
        speculative_config=drafting_with(models[draft], number, draft_lookup=lookup, **fields),
        **engine,
    )
    _, *results, ranks = run.results
    assert run.draft_failures == 0
    assert all(rank["tokens"] > 5000 and rank["difference"] < 1e-3 for rank in ranks), ranks
    return run, results, ranks[0]


@pytest.mark.parametrize("v2", [False, True], ids=["V1 runner", "V2 runner"])
@pytest.mark.parametrize(("draft", "lookup"), [(DRAFT_MODEL, "off"), (DRAFT_MODEL, "on"), (SPIRE, "off")])
def test_it_holds_the_verified_tokens(prompts, plain, models, draft, lookup, v2):
    """A full page is complete in the draft's cache before the prefix cache shares it.

    Without lookups the number of drafts is random. On V2 no write of SPIRe's memory waits for the device.
    """
    batch, expected = on_v2(prompts, plain) if v2 else ({"prompts": prompts, "sampling": GREEDY}, plain)
    batches = [batch, {**batch, "prompts": batch["prompts"][::-1]}]
    varied = ("generate_with_random_schedule", {"batches": batches, "seed": 2})
    engine = {"max_model_len": WHOLE_LEN, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    pages = {"num_gpu_blocks_override": 80}  # the longest request and little else
    if v2:
        engine = {**V2_ENGINE, "max_model_len": 640, "max_num_batched_tokens": 128}
        pages = {"num_gpu_blocks_override": 24}
    run, [result], watched = run_watched(
        models,
        draft,
        [("generate", {"batches": batches}) if lookup == "on" else varied],
        4 if lookup == "on" else "auto",
        lookup,
        **{**engine, **pages},
    )
    first, again = result if lookup == "on" else result["batches"]
    assert_same_tokens(expected, first, draft)
    assert_same_tokens(expected[::-1], again, f"{draft}, again")
    assert run.v2_runner == v2 and run.preemptions > 0 and run.accepted > 0
    assert any(request["cached_tokens"] > 0 for request in again)
    if lookup == "off":
        assert result["gammas"]["0"] > 5
    if draft == DRAFT_MODEL:
        assert watched["catch_up"] > 0


@engines.needs_tensor_parallel
def test_with_tensor_parallel_2_every_rank_holds_the_memory_of_its_heads(prompts, plain, models):
    batch, expected = few(prompts, plain, number=16, below=1000)
    run, [[result]], _ = run_watched(
        models, SPIRE, [("generate", {"batches": [batch]})], **engines.TENSOR_PARALLEL_2, max_num_seqs=8
    )
    assert_same_tokens(expected, result, "tensor parallel 2")
    assert run.accepted > 0
