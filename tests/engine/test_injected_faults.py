# SPDX-License-Identifier: Apache-2.0
"""Injected faults cost speed and are counted by name; the soak has those of lookups and the controller."""

from collections import Counter

import engines
import numpy as np
import pytest
from draft_engines import few
from engines import MODEL, POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens

pytestmark = pytest.mark.extended

FAILURES = "vllm:magicdec_failures:"
# By fault: the expected counts of failures, and whether some drafts are accepted nevertheless.
V1 = {
    "": ({}, True),
    "batch:last=2": ({"batch": 3}, True),
    "selection:last=2": ({"selection": 3}, True),
    "selection": ({"selection": 4}, False),  # the fourth after the first pause
    "third_step:last=2": ({"draft_step": 3}, True),
    "third_step": ({"draft_step": 4}, False),
    "nan": ({}, False),
    "slow:last=10": ({}, True),
    "stuck:last=20": ({}, True),
    "summaries": ({}, True),
}
# V2's greedy drafts from NaN and token 0, which its failed rounds verify, may be right by chance.
V2 = {
    "batch:last=2": ({"batch": 3}, True),
    "selection:last=2": ({"selection": 3}, True),
    "third_step:last=2": ({"draft_step": 3}, True),
    "nan": ({}, None),
}


@pytest.mark.parametrize(
    ("faults", "fields", "v2"), [(V1, POLICIES["verify-topk"], False), (V2, {}, True)], ids=["V1", "V2"]
)
def test_faults_change_no_answer_and_are_counted_by_name(prompts, plain, tmp_path, faults, fields, v2):
    size = {"number": 3, "below": 300} if v2 else {"number": 6, "below": 700}
    batch, expected = few(prompts, plain, **size)
    spec = magicdec(4, draft_kv_budget=128 if v2 else 192, **fields)
    file = tmp_path / "fault"
    file.write_text("")
    run = engines.run(
        [("generate_under_faults", {"batches": [batch], "faults": list(faults), "file": str(file)})],
        v2=v2,
        strict=False,
        env={engines.FAULT: str(file)},
        max_num_seqs=8,
        num_gpu_blocks_override=257,
        speculative_config=spec,
    )
    assert run.v2_runner == v2
    # Also those without a counter have happened.
    for name, times in Counter(fault.partition(":")[0] for fault in faults if fault).items():
        assert run.log.count(f"The fault {name} happens, on purpose") >= times, name
    accepted = {}
    for result, (fault, (failures, accepts)) in zip(run.results[0], faults.items(), strict=True):
        assert_same_tokens(expected, result["batches"][0], fault or "no fault")
        counted = {
            name.removeprefix(FAILURES): number
            for name, number in result["counted"].items()
            if name.startswith(FAILURES) and number
        }
        assert counted == failures, fault
        accepted[fault] = result["counted"][engines.SPEC_METRIC + "accepted_tokens"]
        assert accepts is None or (accepted[fault] > 0) == accepts, (fault, accepted)
    if "summaries" in faults:  # other pages, other drafts; slow ones are the same
        assert accepted["slow:last=10"] == accepted["stuck:last=20"] != accepted["summaries"]


def test_a_fault_in_capture_leaves_eager_draft_steps(prompts, plain, tmp_path):
    """The second of two recorded graphs fails (recorded_graphs.py)."""
    batch, expected = few(prompts, plain, number=3, below=300)
    run = engines.run(
        [
            ("record_graphs", {"sizes": [2, 4]}),
            ("watch_draft_steps", {}),
            ("generate", {"batches": [batch]}),
            ("noted", {}),
        ],
        v2=True,
        strict=False,
        env={engines.FAULT: "capture:first=1"},
        max_num_seqs=4,
        num_gpu_blocks_override=257,
        speculative_config=magicdec(4, draft_kv_budget=128, native_attention=False),
    )
    assert "draft steps run without CUDA graphs, slower: capturing failed" in run.log
    assert "capture, on purpose" in run.log
    *_, (answers,), steps = run.results
    assert_same_tokens(expected, answers, "after a capture that failed")
    assert steps["eager"] > 0 and steps["graph"] == 0
    assert run.metrics[FAILURES + "capture"] == 1
    assert run.accepted > 0 and run.draft_failures == 0


def test_truncating_a_datastore_costs_only_its_lookups(prompts, plain, tmp_path):
    """Reading beyond the end of a mapped file would end the process with SIGBUS."""
    pytest.importorskip("pydivsufsort", reason="the extra 'index' is not installed")
    from vllm.tokenizers import get_tokenizer

    from vllm_magicdec.lookup import datastore_files

    store = tmp_path / "store"
    vocabulary = datastore_files.Vocabulary.of(get_tokenizer(str(MODEL)).get_vocab())
    texts = [
        [*prompt, *request["completions"][0]["tokens"]]
        for prompt, request in zip(prompts, plain, strict=True)
    ]
    datastore_files.write(store, map(np.array, texts), vocabulary, "tiny-llama")
    batch = {"prompts": prompts[:6], "sampling": GREEDY}
    run = engines.run(
        [
            ("generate", {"batches": [batch]}),
            ("generate_with_a_cut_file", {"batches": [batch], "path": str(store / "tokens.npy")}),
        ],
        strict=False,
        speculative_config=magicdec(4, draft_lookup="on", draft_lookup_sources=["context", str(store)]),
    )
    (whole,), cut = run.results
    for results in (whole, *cut["batches"]):
        assert_same_tokens(plain[:6], results, "a datastore")
    assert run.metrics[FAILURES + "lookup"] == 1 and run.draft_failures == 0
    assert cut["counted"][FAILURES + "lookup"] == 1, "since it was cut"
    assert "tokens.npy was cut while it was in use" in run.log
    # The requests' own contexts are searched as before.
    looked_up = "vllm:magicdec_lookup_accepted_tokens"
    assert 0 < cut["counted"][looked_up] < run.metrics[looked_up] - cut["counted"][looked_up]


@engines.needs_tensor_parallel
def test_a_fault_on_one_tensor_parallel_rank_ends_the_engine_in_time(prompts):
    fault = "third_step"
    batch = {"prompts": prompts[:2], "sampling": GREEDY}
    parallel = engines.TENSOR_PARALLEL_2
    # vLLM would end a hanging engine after 300 s with an error that may look like the expected one.
    env = {engines.FAULT: f"{fault}:first=3,rank=1", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "36000"}
    with pytest.raises(RuntimeError, match=rf"(?s)engine: failed.*{fault}, on purpose.*died unexpectedly"):
        engines.run(
            [("generate", {"batches": [batch]})],
            strict=False,
            **{**parallel, "env": {**parallel["env"], **env}},
            max_num_seqs=4,
            num_gpu_blocks_override=257,
            speculative_config=magicdec(4),
            time_limit_s=1200,  # of an engine that hangs the error says no more than that it took so long
        )
