# SPDX-License-Identifier: Apache-2.0
"""benchmarks/roofline.py: its arithmetic and its errors, without an engine."""

import json
from pathlib import Path

import pytest
import roofline
import torch

from vllm_magicdec.planner.hardware import HARDWARE, worker_threads
from vllm_magicdec.planner.performance import Costs, Deployment, Hardware
from vllm_magicdec.planner.shapes import ModelShape

RESULTS = Path(roofline.__file__).parent / "results" / "zen-5-avx512_bf16-2-cores"

# 2 layers, 2 heads of 8: K/V are 128 bytes per token, attention 128 FLOP per query and token of K/V.
SHAPE = ModelShape("two-layers", 2, 16, 2, 2, 8, 32, 100)
DEVICE = Hardware("CPU", 1, 1e9, 1e9, 0, "measured here")
ONES = Costs(memory_efficiency=1, compute_efficiency=1, layer_overhead_us=0, token_overhead_us=0)
MACHINE = {"processor": "one", "cores": 2}


def test_every_time_of_a_result_is_compared_with_its_pass():
    record = {
        "speculative_config": {"num_speculative_tokens": 3, "draft_kv_budget": 500.0},
        "rows": [
            {"batch": 4, "context": 2000, "plain_step_ms": 1, "draft_step_ms": 2, "verification_ms": 3},
            {"batch": 1, "context": 400, "plain_step_ms": 4, "draft_step_ms": 5, "verification_ms": 6},
        ],
    }
    deployment = Deployment(SHAPE, DEVICE, costs=ONES)
    compared = roofline.compare(record, {"roofline": deployment})
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
    record["speculative_config"]["draft_kv_budget"] = 0.25  # a share of the context
    shared = roofline.compare(record, {"roofline": deployment})
    assert shared[4].roofline_ms["roofline"] == deployment.draft_step_ms(4, 2000, 500)


def test_another_cpu_is_refused_and_a_gpu_has_its_data_sheet(monkeypatch):
    monkeypatch.setattr("roofline.measure_this_machine", lambda: DEVICE)
    assert roofline.deployment_of(SHAPE, MACHINE, MACHINE, {}).hardware is DEVICE
    for other in ({"processor": "two"}, {"cores": 64}, {"gpu": "NVIDIA GeForce RTX 4090"}):
        with pytest.raises(SystemExit, match="compare it on the machine of the result"):
            roofline.deployment_of(SHAPE, MACHINE | other, MACHINE, {})
    deployment = roofline.deployment_of(SHAPE, {**MACHINE, "gpu": "NVIDIA H200"}, MACHINE, {})
    assert deployment.hardware is HARDWARE["H200"]


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


def test_the_committed_result_matches_the_model():
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
