# SPDX-License-Identifier: Apache-2.0
"""Real CUDA graphs of draft steps in a real engine."""

import engines
import pytest
import spire_drafts
from draft_engines import drafting_with
from engines import MODEL, magicdec
from greedy import GREEDY, assert_same_tokens

pytestmark = pytest.mark.extended


def assert_graphs_draft_losslessly(prompts, plain, speculative_config, what):
    run = engines.generate(
        prompts,
        GREEDY,
        v2=True,
        enforce_eager=False,
        max_num_seqs=16,
        speculative_config=speculative_config,
    )
    assert run.v2_runner
    assert_same_tokens(plain, run.results[0][0], f"{what}, CUDA graphs")
    assert "Capturing draft CUDA graphs" in run.log
    assert run.draft_failures == 0 and run.accepted > 0
    return run


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["streamingllm", "snapkv", "verify-topk"])
def test_greedy_output_is_unchanged_with_cuda_graphs(prompts, plain, policy):
    spec = magicdec(4, draft_kv_policy=policy, draft_kv_budget=256)
    assert_graphs_draft_losslessly(prompts, plain, spec, policy)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["streamingllm", "snapkv", "verify-topk"])
def test_greedy_output_is_unchanged_with_lookups_on_the_device(prompts, plain, policy):
    by_page = {"draft_kv_granularity": "page"} if policy != "streamingllm" else {}
    spec = magicdec(6, draft_kv_policy=policy, draft_kv_budget=256, draft_lookup="on", **by_page)
    run = assert_graphs_draft_losslessly(prompts, plain, spec, f"lookups, {policy}")
    counted = {name: run.metrics[f"vllm:magicdec_lookup_{name}"] for name in ("rounds", "passes", "tokens")}
    assert counted["tokens"] > 0 and counted["rounds"] <= counted["passes"] < 6 * counted["rounds"]


@pytest.mark.gpu
def test_greedy_output_is_unchanged_with_cuda_graphs_of_a_spire_draft(prompts, plain, tmp_path):
    draft = spire_drafts.write(tmp_path / "draft", MODEL, num_layers=2, sinks=4, window=60, noise=0.05)
    assert_graphs_draft_losslessly(prompts, plain, drafting_with(draft), "a SPIRe draft")
