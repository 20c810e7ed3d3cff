# SPDX-License-Identifier: Apache-2.0
"""benchmarks/roofline.py, and the floor of benchmarks/peer.py: arithmetic and errors, without an engine."""

import json
from pathlib import Path

import peer
import pytest
import roofline
import torch

from vllm_magicdec.planner.hardware import HARDWARE, worker_threads
from vllm_magicdec.planner.models import MODELS
from vllm_magicdec.planner.performance import Costs, Deployment, Hardware
from vllm_magicdec.planner.shapes import ModelShape

RESULTS = Path(roofline.__file__).parent / "results" / "zen-5-avx512_bf16-2-cores"

# 2 layers, 2 heads of 8: K/V are 128 bytes per token, attention 128 FLOP per query and token of K/V.
SHAPE = ModelShape("two-layers", 2, 16, 2, 2, 8, 32, 100)
DEVICE = Hardware("CPU", 1, 1e9, 1e9, 0, "measured here")
MACHINE = {"processor": "one", "cores": 2}


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


def test_the_floor_is_what_a_plain_step_reads():
    floor = peer.floor_ms(MODELS["qwen3-8b"], 32, 10_000, 4.8e12)
    kv_ms = 32 * 10_000 * 2 * 36 * 8 * 128 * 2 / 4.8e9
    weights_ms = 7.57e9 * 2 / 4.8e9  # all but the input embedding
    assert floor == pytest.approx(kv_ms + weights_ms, rel=0.01)


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
