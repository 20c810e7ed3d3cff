# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu: `make bench-gpu` on a CPU with tiny models, all of its parts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import engines
import pytest
from short_runs import CELLS

from benchmarks.common.policies import POLICIES
from benchmarks.gpu import engine, lossless
from benchmarks.gpu.eq2 import CellTimes
from benchmarks.gpu.models import SMALL_SHAPE

ROOT = engines.HERE.parent
MAX_GAMMA = 3

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of the whole kit's results."""
    folder = tmp_path_factory.mktemp("kit")
    child = run_kit(folder)
    logs = "".join(f"\n{path}:\n{path.read_text()[-4000:]}" for path in folder.glob("*.log"))
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-4000:] + logs
    return folder


def run_kit(folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--small", "--out", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=1800,
    )


@pytest.fixture(scope="module")
def small_run(folder) -> tuple[str, dict]:
    """What the engine layer's two parts print and write."""
    printed, record = "", {}
    for part in ("lossless", "steps"):
        printed += (folder / f"{part}.log").read_text()
        written = json.loads((folder / f"{part}.json").read_text())
        record = {**written, **{name: value for name, value in record.items() if value}}
    return printed, record


def test_every_part_ran_and_is_on_the_page(folder):
    entries = json.loads((folder / "parts.json").read_text())["parts"]
    assert {name: entry["status"] for name, entry in entries.items()} == dict.fromkeys(
        ("lossless", "steps", "peer", "tests", "kernels"), "done"
    )
    page = (folder / "results.md").read_text()
    assert "no time says anything" in page and "Not measured." not in page and "\nNothing.\n" in page
    assert "| cases whose greedy output is plain decoding's | ≥ 7 | 7 | met |" in page
    assert (folder / "kernels.png").exists() and (folder / "peer.png").exists()


def test_what_is_done_is_not_done_again(folder):
    before = (folder / "results.md").read_text()
    child = run_kit(folder)
    assert child.returncode == 0 and child.stdout.count("done before") == 5
    assert (folder / "results.md").read_text() == before


def test_the_peers_cell_was_decoded_at_the_peers_acceptance(folder):
    results = json.loads((folder / "peer.json").read_text())["results"]
    assert [result["policy"] for result in results] == ["verify-topk", "plain"]
    assert {result["batch"] for result in results} == {2}
    drafting, plain = results
    assert plain["acceptance_length"] == 1 and 3 < drafting["acceptance_length"] <= 7
    assert drafting["speedup"] == pytest.approx(drafting["tokens_per_s"] / plain["tokens_per_s"])


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
    checks = [check for check in record["lossless"] if check["dtype"] == "float32"]
    (mode,) = {check["mode"] for check in checks}
    cases = [case for case in lossless.CASES if case.suits(lossless.MODES[mode])]
    assert [(c["policy"], c["budget"]) for c in checks] == [(c.policy, c.budget) for c in cases]
    assert {check["policy"] for check in checks} == POLICIES.keys()
    assert {check["status"] for check in checks} == {"ok"} and record["budgets_differ"]
    assert all(0 < check["accepted"] <= check["drafted"] for check in checks)
    for check in checks:
        sees_everything = check["budget"] == engines.MODEL_LEN
        assert (check["accepted"] == check["drafted"]) == sees_everything


def test_bfloat16_output_was_judged_by_the_targets_scores(small_run):
    _, record = small_run
    [check] = [check for check in record["lossless"] if check["dtype"] == "bfloat16"]
    assert check["status"] == "ok" and check["mode"] == "bfloat16-v1"
    # Their sizes are the machine's affair: over so few tokens some sum alike in decoding and scoring.
    assert {"rounding", "near_ties", "largest_margin"} <= check.keys()
    assert 0 < check["accepted"] < check["drafted"]


@pytest.mark.gpu
def test_the_engine_layer_runs_on_a_gpu(tmp_path):
    out = tmp_path / "engine.json"
    engine.main(["--small", "--out", str(out)])
    record = json.loads(out.read_text())
    assert {result["runner"] for result in record["times"]} == {"v2"}
    assert record["machine"]["gpu"] and record["machine"]["driver"]
