# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu, the engine layer: the whole of it on a CPU with a tiny model."""

import json
import os
import subprocess
import sys

import engines
import pytest
from short_runs import CELLS

from benchmarks.common.policies import POLICIES
from benchmarks.gpu import engine, lossless
from benchmarks.gpu.eq2 import CellTimes
from benchmarks.gpu.models import SMALL_SHAPE

ROOT = engines.HERE.parent
MAX_GAMMA = 3


@pytest.fixture(scope="module")
def small_run(tmp_path_factory) -> tuple[str, dict]:
    """What the command prints and writes."""
    out = tmp_path_factory.mktemp("kit") / "engine.json"
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.engine", "--device", "cpu", "--small", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-8000:]
    return child.stdout, json.loads(out.read_text())


def test_the_engine_layer_says_what_it_ran_on(small_run):
    printed, record = small_run
    assert record["benchmark"] == "gpu engine" and record["device"] == "cpu"
    assert {"processor", "torch", "vllm", "memory_gib"} <= record["machine"].keys()
    assert record["settings"]["max_gamma"] == MAX_GAMMA and record["policies"] == POLICIES
    assert record["goals"] == [] and "not judged" in printed
    assert "ON A CPU" in printed and "SYNTHETIC" in printed
    assert "SKIPPED" not in printed and "FAILED" not in printed and "WRONG" not in printed


def test_every_kind_of_step_was_timed_in_every_cell(small_run):
    _, record = small_run
    found = [(result["policy"], result["batch"], result["context"]) for result in record["times"]]
    assert found == [(policy, *cell) for policy in POLICIES for cell in CELLS]
    gammas = range(1, MAX_GAMMA + 1)
    kinds = {(0, 0), *((0, g) for g in gammas), *((g, 0) for g in gammas), *((g, g) for g in gammas)}
    for result in record["times"]:
        assert result["status"] == "ok" and result["shape"] == SMALL_SHAPE.name
        assert result["attention_backends"] == ["CPU_ATTN"]
        assert result["runner"] == "v1" and not result["async_scheduling"]
        assert {(kind["verified"], kind["drafted"]) for kind in result["kinds"]} == kinds
        # None is lost to prompts, accepted drafts or the requests of another cell.
        assert all(kind["count"] == 4 and kind["ms"] > 0 for kind in result["kinds"])
        times = CellTimes.of(result["kinds"])
        assert result["plain_ms"] == times.plain_ms and result["draft_ms"] == times.draft_ms
        assert result["roofline_ms"].keys() == {"T_T", "T_D", "T_V(1)", "T_V(2)", "T_V(3)"}
        assert len(result["speedups"]) == result["is_steady"] == times.is_steady
        for entry in result["speedups"]:
            assert entry["acceptance_rate"] == pytest.approx(0.8) and entry["paper"] is None
            assert entry["speedup"] > 0 and entry["roofline"] > 0


def test_decode_speed_is_that_of_the_synthetic_acceptance(small_run):
    _, record = small_run
    plain, synthetic = record["speed"][: len(CELLS)], record["speed"][len(CELLS) :]
    assert [(result["batch"], result["context"]) for result in plain] == CELLS
    for before, after in zip(plain, synthetic, strict=True):
        assert before["status"] == after["status"] == "ok"
        assert before["synthetic_acceptance_rate"] is None and before["acceptance_length"] == 1
        assert after["synthetic_acceptance_rate"] == 0.8 and 1 < after["acceptance_length"] <= MAX_GAMMA + 1
        assert after["speedup"] == pytest.approx(after["tokens_per_s"] / before["tokens_per_s"])
        times = next(
            t for t in record["times"] if (t["batch"], t["context"]) == (after["batch"], after["context"])
        )
        expected = CellTimes.of(times["kinds"]).speedup(3, 1 + 0.8 + 0.64 + 0.512, selects_every_round=True)
        assert times["policy"] == "streamingllm" and ("eq2" in after) == times["is_steady"]
        assert after.get("eq2", expected) == pytest.approx(expected)


def test_greedy_output_was_compared_where_views_lose_drafts(small_run):
    _, record = small_run
    checks = record["lossless"]
    assert [(c["policy"], c["budget"]) for c in checks] == [(c.policy, c.budget) for c in lossless.CASES]
    assert {check["policy"] for check in checks} == POLICIES.keys()
    assert {check["status"] for check in checks} == {"ok"} and record["budgets_differ"]
    assert all(0 < check["accepted"] <= check["drafted"] for check in checks)
    for check in checks:
        sees_everything = check["budget"] == engines.MODEL_LEN
        assert (check["accepted"] == check["drafted"]) == sees_everything


@pytest.mark.gpu
def test_the_engine_layer_runs_on_a_gpu(tmp_path):
    out = tmp_path / "engine.json"
    engine.main(["--small", "--out", str(out)])
    record = json.loads(out.read_text())
    assert {result["runner"] for result in record["times"]} == {"v2"}
    assert record["machine"]["gpu"] and record["machine"]["driver"]
