# SPDX-License-Identifier: Apache-2.0
"""benchmarks/roofline.py: its arithmetic, and what it refuses to compare. No engine."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import roofline
import step_profile

from vllm_magicdec.planner.hardware import HARDWARE, worker_threads
from vllm_magicdec.planner.performance import Costs, Deployment, Hardware
from vllm_magicdec.planner.shapes import ModelShape

RESULTS = Path(roofline.__file__).parent / "results" / "zen-5-avx512_bf16-2-cores"

# 2 layers, 2 heads of 8: K/V are 128 bytes per token, attention 128 FLOP per query and token of K/V.
SHAPE = ModelShape("two-layers", 2, 16, 2, 2, 8, 32, 100)
DEVICE = Hardware("CPU", 1, 1e9, 1e9, 0, "measured here")
ONES = Costs(memory_efficiency=1, compute_efficiency=1, layer_overhead_us=0, token_overhead_us=0)
MACHINE = {"processor": "one", "cores": 2}


def test_every_time_of_a_result_stands_beside_the_pass_it_is_of():
    record = {
        "speculative_config": {"num_speculative_tokens": 3, "draft_kv_budget": 500.0},
        "rows": [
            {"batch": 4, "context": 2000, "plain_step_ms": 1, "draft_step_ms": 2, "verification_ms": 3},
            {"batch": 1, "context": 400, "plain_step_ms": 4, "draft_step_ms": 5, "verification_ms": 6},
        ],
    }
    deployment = Deployment(SHAPE, DEVICE, costs=ONES)
    slow = Deployment(SHAPE, DEVICE, costs=replace(ONES, attention_memory_efficiency=0.5))
    compared = roofline.compare(record, {"roofline": deployment, "slow": slow})
    assert [(c.context, c.time, c.measured_ms) for c in compared] == [
        *((400, "T_T", 4), (400, "T_D", 5), (400, "T_V(3)", 6)),
        *((2000, "T_T", 1), (2000, "T_D", 2), (2000, "T_V(3)", 3)),
    ]
    assert [c.roofline_ms["roofline"] for c in compared] == [
        deployment.plain_step_ms(1, 400),
        deployment.draft_step_ms(1, 400, 500),
        deployment.verify_ms(3, 1, 400),
        deployment.plain_step_ms(4, 2000),
        deployment.draft_step_ms(4, 2000, 500),
        deployment.verify_ms(3, 4, 2000),
    ]
    # One query is as long in compute as in memory here, so half the bandwidth is twice the time.
    slower = compared[3].roofline_ms["slow"] - compared[3].roofline_ms["roofline"]
    assert slower == pytest.approx(4 * 2000 * 128 / 1e9 * 1e3)
    record["speculative_config"]["draft_kv_budget"] = 0.25  # a share of the context
    shared = roofline.compare(record, {"roofline": deployment})
    assert shared[4].roofline_ms["roofline"] == deployment.draft_step_ms(4, 2000, 500)


def test_another_cpu_is_refused_and_a_gpu_has_its_data_sheet(monkeypatch):
    monkeypatch.setattr("roofline.measure_this_machine", lambda: DEVICE)
    assert roofline.deployment_of(SHAPE, MACHINE, MACHINE, {}).hardware is DEVICE
    for other in ({"processor": "two"}, {"cores": 64}, {"gpu": "NVIDIA GeForce RTX 4090"}):
        with pytest.raises(SystemExit, match="so compare where it was measured"):
            roofline.deployment_of(SHAPE, MACHINE | other, MACHINE, {})
    deployment = roofline.deployment_of(SHAPE, {**MACHINE, "gpu": "NVIDIA H200"}, MACHINE, {})
    assert deployment.hardware is HARDWARE["H200"]


def test_the_time_of_an_operation_goes_to_its_part_of_the_step():
    forward, draft = "gpu_model_runner: forward", "gpu_model_runner: draft"
    attention = ["vllm::unified_attention_with_output", "_C::cpu_attention_with_kv_cache"]
    parts = {
        "attention": [forward, *attention],
        "drafting: attention": [draft, *attention],
        "drafting: rest": [draft, "aten::argmax"],
        "linear layers": ["gpu_model_runner: postprocess", "_C::onednn_mm"],
        "rest of the forward pass": [forward, "aten::mean", "aten::div_"],
        "sampling": ["gpu_model_runner: sample", "_C::greedy_argmax"],
        "rest of the step": ["gpu_model_runner: preprocess", "aten::slice"],
    }
    for part, path in parts.items():
        assert step_profile.part_of(path) == part
    assert step_profile.part_of(["aten::add"]) == "rest of the step"


def test_what_attention_achieves():
    deployment = Deployment(SHAPE, replace(DEVICE, flops=4e9), costs=ONES)
    # 1,000 tokens: 128 kB in 0.512 ms, and 3 x 128 kFLOP.
    achieved = step_profile.Achieved.of(0.512, deployment, batch=1, queries=3, context=1000)
    assert (achieved.bytes_per_s, achieved.memory_share) == pytest.approx((0.25e9, 0.25))
    assert (achieved.flops, achieved.compute_share) == pytest.approx((0.75e9, 0.1875))


def test_costs_that_are_fitted_give_back_the_times_they_are_fitted_to():
    deployment = Deployment(SHAPE, DEVICE, costs=replace(ONES, token_overhead_us=2))
    batch, context, gamma = 2, 1000, 3
    attention_ms = {1: 2.0, gamma + 1: 5.0}
    rest_ms = 0.5  # of a draft step, 0.1 in linear layers
    parts = {
        "drafting: attention": 1.0,
        "drafting: linear layers": 0.1 * gamma,
        "drafting: rest": 0.4 * gamma,
    }
    steps = {}
    for name, queries in (("plain step", 1), ("round", gamma + 1)):
        attention = step_profile.Achieved.of(attention_ms[queries], deployment, batch, queries, context)
        steps[name] = {"parts_ms": parts, "attention": vars(attention)}
    costs = step_profile.fit_costs(deployment, batch, gamma, steps)
    fitted = replace(deployment, costs=replace(deployment.costs, **costs))
    assert fitted.plain_step_ms(batch, context) == pytest.approx(attention_ms[1] + rest_ms)
    more_tokens_ms = (
        max(deployment.linear_ms(batch * (gamma + 1))) - max(deployment.linear_ms(batch)) + 2 * 2 * 6e-3
    )
    expected = attention_ms[gamma + 1] + rest_ms + more_tokens_ms
    assert fitted.verify_ms(gamma, batch, context) == pytest.approx(expected)


def test_shapes_of_results_have_the_size_of_their_dtype():
    tiny = roofline.shape_of("tiny-llama", "float32")
    assert (tiny.num_layers, tiny.weight_bytes, tiny.kv_bytes) == (6, 4, 4)
    heavy = roofline.shape_of("kv-heavy", "bfloat16")
    assert heavy.kv_bytes_per_token == 16 * 1024


def test_cpus_are_measured_with_the_threads_of_a_worker(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU", raising=False)
        for reserved, threads in ((None, 1), ("0", 2), ("2", 1)):
            if reserved:
                monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", reserved)
            with worker_threads() as used:
                assert used == threads == torch.get_num_threads()
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_committed_result_is_what_the_calculator_says():
    """The tables of docs/performance.md come from this file."""
    record = json.loads((RESULTS / "roofline.json").read_text())
    for compared in record["comparisons"]:
        result = json.loads((RESULTS / compared["result"]).read_text())
        shape = roofline.shape_of(result["engine"]["model"], result["engine"]["dtype"])
        deployments = {
            name: Deployment(shape, Hardware(**compared["device"]), costs=Costs(**costs))
            for name, costs in compared["costs"].items()
        }
        assert [vars(c) for c in roofline.compare(result, deployments)] == compared["times"]
