# SPDX-License-Identifier: Apache-2.0
"""Greedy output equals plain decoding's: long requests, recorded graphs, two ranks, custom policies."""

import engines
import example_policy
import pytest
import texts
from draft_engines import TINY_DRAFT, TINY_SPIRE, V2_ENGINE, drafting_with, few, longest, on_v2
from engines import POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens

pytestmark = pytest.mark.extended


def test_greedy_output_of_long_and_short_requests_together_is_unchanged():
    """As users run it: engine core and worker are separate processes, and options have their defaults."""
    prompts = texts.prompts(32, 20, 7000)
    as_users = {"own_process": True, "max_num_seqs": 16}
    plain = engines.generate(prompts, GREEDY, **as_users).results[0][0]
    last = longest(prompts)  # which are still in the prefix cache
    batches = [{"prompts": prompts, "sampling": GREEDY}]
    batches.append({"prompts": [prompts[i] for i in last], "sampling": GREEDY})
    run = engines.run([("generate", {"batches": batches})], speculative_config=magicdec(4), **as_users)
    first, cached = run.results[0]
    assert_same_tokens(plain, first, "up to 7,000 tokens")
    assert_same_tokens([plain[i] for i in last], cached, "prefix cached")
    assert all(request["cached_tokens"] > 0 for request in cached)
    assert run.draft_failures == 0 and run.drafted > 0


WHOLE = V2_ENGINE["max_model_len"]
ON_V2 = {
    "streamingllm": magicdec(4, draft_kv_budget=64),
    "snapkv by token": magicdec(4, draft_kv_budget=128, **POLICIES["snapkv by token"]),
    "verify-topk": magicdec(3, draft_kv_budget=WHOLE, **POLICIES["verify-topk"]),
    "a draft model": drafting_with(TINY_DRAFT, draft_kv_budget=64),
    "SPIRe": drafting_with(TINY_SPIRE),
}


@pytest.mark.parametrize("case", ON_V2)
def test_greedy_output_is_unchanged_on_the_v2_runner(prompts, plain, case):
    """Draft steps run eagerly first, then from CUDA graphs (recorded ones, see recorded_graphs.py)."""
    batch, expected = on_v2(prompts, plain)
    run = engines.run(
        [
            ("generate_and_count", {"batches": [batch]}),
            ("record_graphs", {"sizes": [2, 4]}),
            ("watch_draft_steps", {}),
            ("generate_and_count", {"batches": [batch]}),
            ("count_replays", {}),
            ("noted", {}),
        ],
        **V2_ENGINE,
        enable_prefix_caching=False,
        # Recorded graphs replay torch's operators, which the kernel for CPUs is not.
        speculative_config={**ON_V2[case], "native_attention": False},
    )
    assert run.v2_runner and run.draft_failures == 0
    eager, _, _, replayed, replays, steps = run.results
    for how, result in (("eager", eager), ("replayed", replayed)):
        assert_same_tokens(expected, result["batches"][0], f"V2 runner, {how}, {case}")
    drafted, accepted = (
        [result["counted"][engines.SPEC_METRIC + name] for result in (eager, replayed)]
        for name in ("draft_tokens", "accepted_tokens")
    )
    assert len({*drafted}) == len({*accepted}) == 1, "replayed drafts are the eager ones"
    assert (accepted == drafted and drafted[0] > 0) == (case == "verify-topk"), "a view of everything"
    # 4, 3, 2 and 1 requests at a time; first steps of a draft model have two tokens per request.
    sizes = {"2", "4", "2 x 2", "4 x 2"} if case == "a draft model" else {"2", "4"}
    assert sizes <= set(replays) and all(replays[size] for size in sizes)
    if "model" not in ON_V2[case]:
        assert steps == {"graph": sum(replays.values()), "flashinfer": 0, "eager": 0}


SPLIT = {
    "int4 weights": magicdec(4, draft_kv_budget=128, draft_weights="int4"),
    "snapkv by token": magicdec(4, draft_kv_budget=128, **POLICIES["snapkv by token"]),
    "a draft model": drafting_with(TINY_DRAFT, draft_kv_budget=128),
    # Ranks look up and cut alike; otherwise they would wait for one another in passes of different sizes.
    "lookups": magicdec("auto", draft_kv_budget=128, draft_lookup="on")
    | {"draft_lookup_sources": ["context", "served"]},
}


@engines.needs_tensor_parallel
@pytest.mark.parametrize("case", SPLIT)
def test_greedy_output_is_unchanged_with_tensor_parallel_2(prompts, plain, case):
    batch, expected = few(prompts, plain, number=16, below=1000)
    engine = {**engines.TENSOR_PARALLEL_2, "max_num_seqs": 8}
    run = engines.generate(**batch, **engine, speculative_config=SPLIT[case])
    assert_same_tokens(expected, run.results[0][0], f"tensor parallel 2, {case}")
    assert run.accepted > 0
    assert case != "lookups" or run.metrics["vllm:magicdec_lookup_unchecked_tokens"] > 0


def test_policies_of_other_packages_draft_losslessly(tmp_path, monkeypatch):
    example_policy.install(tmp_path, monkeypatch)
    prompts = texts.prompts(6, 200, 2000, seed=9)
    truth = engines.generate(prompts, GREEDY, max_num_seqs=4)
    for policy, budget in (("strided", 128), ("first-key", 192)):
        spec = magicdec(3, draft_kv_policy=policy, draft_kv_budget=budget)
        run = engines.generate(prompts, GREEDY, max_num_seqs=4, speculative_config=spec)
        assert_same_tokens(truth.results[0][0], run.results[0][0], policy)
        assert run.accepted > 0 and run.draft_failures == 0
