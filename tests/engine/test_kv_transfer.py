# SPDX-License-Identifier: Apache-2.0
"""With a KV connector: saved KV is exact, and requests with prompts computed elsewhere get drafts."""

import engines
import numpy as np
import pytest
from draft_engines import few
from engines import PAGE, POLICIES, magicdec
from greedy import assert_same_tokens

pytestmark = pytest.mark.extended

BY_TOKEN = magicdec(4, draft_kv_budget=256, **POLICIES["snapkv by token"])
ENGINE = {"own_process": True, "max_num_seqs": 4, "num_gpu_blocks_override": 257}
ENGINE["enable_prefix_caching"] = False


def connector(role, path):
    """Return engine arguments for vLLM's example connector, which saves and loads files."""
    extra = {"shared_storage_path": str(path)}
    config = {"kv_connector": "ExampleConnector", "kv_role": role, "kv_connector_extra_config": extra}
    return {"kv_transfer_config": config}


@pytest.fixture(scope="module")
def chosen(prompts, plain):
    return few(prompts, plain, number=6, least=101, below=900, tokens=12)


@pytest.fixture(scope="module")
def last_parts(prompts):
    """Prompts with 0 to 15 of the last 16 tokens, SnapKV's window, on pages that are sent: whole ones."""
    long = max(prompts, key=len)
    return [long[start : start + 20 * PAGE + rest] for start, rest in enumerate((1, 5, 15, 16, 31, 0))]


@pytest.fixture(scope="module")
def prefilled(chosen, last_parts, tmp_path_factory):
    """Prompts computed by another server, which drafts nothing."""
    batch, truth = chosen
    path = tmp_path_factory.mktemp("prefilled")
    one = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}
    batches = [{**batch, "sampling": one}, {"prompts": last_parts, "sampling": one}]
    run = engines.run([("generate", {"batches": batches})], **ENGINE, **connector("kv_producer", path))
    first = [request["completions"][0]["tokens"] for request in run.results[0][0]]
    assert first == [request["completions"][0]["tokens"][:1] for request in truth]
    return path


def test_prompts_computed_by_another_server(chosen, last_parts, prefilled):
    """Drafts, and what SnapKV selects, are the same as for prompts computed here."""
    batch, truth = chosen
    steps = [("generate", {"batches": [batch]}), ("selections", {"prompts": last_parts})]
    run = engines.run(steps, **ENGINE, **connector("kv_consumer", prefilled), speculative_config=BY_TOKEN)
    loaded = run.results[0][0]
    assert_same_tokens(truth, loaded, "loaded")
    pages = [(len(prompt) - 1) // PAGE * PAGE for prompt in batch["prompts"]]
    assert [request["cached_tokens"] for request in loaded] == pages
    assert run.accepted > 0 and run.draft_failures == 0
    alike = {"max_num_seqs": 4, "enable_prefix_caching": False, "speculative_config": BY_TOKEN}
    here = engines.run([("selections", {"prompts": last_parts})], **alike)
    for got, expected in zip(run.results[1], here.results[0], strict=True):
        assert got["end"] == expected["end"]
        positions, others = (np.array(one["positions"]) for one in (got, expected))  # [layers, heads, n]
        assert positions.shape == others.shape
        # Apart from ties: the queries may be recomputed in a separate pass.
        for index in np.ndindex(positions.shape[:2]):
            assert len(np.intersect1d(positions[index], others[index])) >= 0.98 * positions.shape[2]


@pytest.mark.parametrize("v2", [False, True], ids=["V1 runner", "V2 runner"])
def test_prompts_saved_by_the_same_server(chosen, tmp_path, v2):
    """A layer's K/V is saved whenever the connector sees one: once a step, by the target's passes alone."""
    batch, truth = chosen
    steps = [("generate_and_note_saves", {"batches": [batch, batch]})]
    both = connector("kv_both", tmp_path)
    run = engines.run(steps, v2=v2, **ENGINE, **both, speculative_config=BY_TOKEN)
    (result,) = run.results
    computed, loaded = result["batches"]
    assert_same_tokens(truth, computed, "saved")
    assert_same_tokens(truth, loaded, "loaded")
    assert not any(request["cached_tokens"] for request in computed)
    assert all(request["cached_tokens"] for request in loaded)
    assert len(result["saves"]) == 6 and max(result["saves"].values()) <= result["steps"]
    assert run.accepted > 0 and run.draft_failures == 0
