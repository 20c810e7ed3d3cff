# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu: the whole of it on a CPU with tiny shapes, and its refusal to time what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import draft_attention, kernels
from benchmarks.gpu.problem import Heads, Layer

ROOT = Path(__file__).resolve().parents[2]
# The kernel layer has to run where there is no vLLM.
WITHOUT_VLLM = "import sys; sys.modules['vllm'] = None; from benchmarks.gpu.kernels import main; main()"


def run_kit(out: Path, *arguments: str) -> dict:
    child = subprocess.run(
        [sys.executable, "-c", WITHOUT_VLLM, *arguments, "--small", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-4000:]
    assert " 0 wrong, 0 failed, 0 skipped" in child.stdout
    return json.loads(out.read_text())


def check_record(record: dict, device: str) -> None:
    assert record["benchmark"] == "gpu kernels" and record["device"] == device
    assert {"processor", "torch", "triton", "memory_gib"} <= record["machine"].keys()
    assert {"timer", "repeats", "warmup", "flush_bytes"} == record["clock"].keys()
    assert record["copy_bytes_per_s"] > 0 and record["empty_us"] > 0
    settings = record["settings"]
    cells = len(settings["shapes"]) * len(settings["batch"]) * len(settings["context"])
    results = record["results"]
    assert len(results) == cells * (1 + len(settings["budget"]) * len(kernels.KERNELS))
    names = {f"{result['granularity']} {result['kernel']}" for result in results}
    assert names == {kernels.FULL, *kernels.KERNELS}
    heads = {heads.name: heads for heads in kernels.SHAPES + kernels.SMALL_SHAPES}
    dtype = getattr(torch, settings["dtype"])
    for result in results:
        assert result["status"] == "ok" and result["error"] <= record["tolerance"]
        assert result["time_us"] > 0
        floor_us = 1e6 * result["bytes_read"] / record["copy_bytes_per_s"]
        assert result["floor_us"] == pytest.approx(floor_us)
        assert result["share"] == pytest.approx(floor_us / result["time_us"])
        assert (result["full_us"] is None) == (result["granularity"] == "full")
        assert (result["plan_us"] is not None) == (result["kernel"] == "flashinfer")
        assert result["goal"] is None  # for large batches on a GPU alone
        ends = sum(i % settings["page_size"] for i in range(result["batch"]))
        tokens = result["batch"] * result["budget"] - ends
        lists = result["bytes_read"] - tokens * heads[result["shape"]].bytes_per_token(dtype)
        listed = result["budget"] / settings["page_size"]
        if result["granularity"] == "token":
            listed = result["budget"] * heads[result["shape"]].num_kv_heads
        assert lists == 4 * listed * result["batch"]


def test_the_kernel_layer_runs_on_a_cpu_without_vllm(tmp_path):
    record = run_kit(tmp_path / "kernels.json", "--device", "cpu")
    check_record(record, "cpu")
    labels = {result["kernel"]: result["runs_on"] for result in record["results"]}
    assert labels["triton"] == "cpu: Triton's interpreter"
    assert labels["flashinfer"] == "cpu: torch reads what FlashInfer is told to read"
    assert "gpu" not in record["machine"] or torch.cuda.is_available()


@pytest.mark.gpu
def test_the_kernel_layer_runs_on_a_gpu(tmp_path):
    pytest.importorskip("flashinfer")
    record = run_kit(tmp_path / "kernels.json", "--device", "cuda")
    check_record(record, "cuda")
    assert {result["runs_on"] for result in record["results"]} == {"cuda"}
    assert record["machine"]["gpu"] and record["machine"]["driver"]


@pytest.fixture
def in_process(monkeypatch):
    """Run the kit here, with kernels that need no interpreter; returns what is in its JSON."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    threads = torch.get_num_threads()

    def run(tmp_path: Path, *arguments: str) -> tuple[int, list[dict]]:
        out = tmp_path / "kernels.json"
        cell = ["--batch", "3", "--context", "64", "--budget", "32", "--shapes", "small gqa"]
        chosen = ["--kernels", "page flashinfer", "token torch"]
        status = 0
        try:
            kernels.main(["--device", "cpu", "--small", *cell, *chosen, "--out", str(out), *arguments])
        except SystemExit as end:
            status = end.code
        return status, json.loads(out.read_text())["results"]

    yield run
    torch.set_num_threads(threads)


def test_a_wrong_kernel_is_reported_and_not_timed(in_process, tmp_path, monkeypatch, capsys):
    def one_token_less(layer, view):
        view.lens.sub_(1)
        result = draft_attention.token_torch(layer, view).run()
        view.lens.add_(1)
        return draft_attention.Prepared(lambda: result)

    monkeypatch.setitem(kernels.KERNELS, "token torch", one_token_less)
    status, (full, page, token) = in_process(tmp_path)
    assert status == 1
    assert (full["status"], page["status"], token["status"]) == ("ok", "ok", "wrong")
    assert token["error"] > 1e-5 and token["time_us"] is None and token["share"] is None
    printed = capsys.readouterr().out
    assert "2 ok, 1 wrong" in printed and "WRONG: token torch (small gqa, batch 3" in printed


def test_a_kernel_that_raises_is_reported(in_process, tmp_path, monkeypatch, capsys):
    def fail(layer, view):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(kernels.KERNELS, "token torch", fail)
    status, results = in_process(tmp_path)
    assert status == 1
    assert results[-1]["status"] == "failed" and results[-1]["reason"] == "RuntimeError: no such kernel"
    assert "FAILED: token torch" in capsys.readouterr().out


def test_cells_that_do_not_fit_are_skipped_and_named(in_process, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "free_bytes", lambda device: 3 * 64 * 2 * 2 * 64 * 4 - 1)
    status, results = in_process(tmp_path)
    assert status == 0
    assert {result["status"] for result in results} == {"skipped"} and len(results) == 3
    assert all("does not fit" in result["reason"] for result in results)
    assert "skipped 3: a cache of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "cpu"], "use --device cpu --small"),
        (["--device", "cpu", "--small", "--budget", "24"], "multiples of the page size, 16"),
        (["--device", "cpu", "--small", "--budget", "256"], "no budget may exceed a context"),
    ],
)
def test_impossible_settings_are_refused_in_a_sentence(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as end:
        kernels.parse(arguments)
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_reference_is_attention_over_the_view():
    """Against softmax over the listed tokens, gathered by hand."""
    layer = Layer(
        Heads("", num_heads=4, num_kv_heads=2, head_size=8),
        batch=2,
        context=32,
        page_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=1,
    )
    keys, values = (half.flatten(0, 1) for half in layer.halves)  # by slot
    for view in (layer.page_view(8), layer.token_view(8)):
        for request in range(2):
            result = layer.dense(view, request)
            for head in range(4):
                kv_head = head // 2
                if view.slots is not None:
                    slots = view.slots[request, kv_head]
                else:
                    slots = (view.pages[request].unsqueeze(1) * 4 + torch.arange(4)).flatten()
                slots = slots[: view.lens[request]].long()
                weights = (keys[slots, kv_head] @ layer.query[request, head] * 8**-0.5).softmax(0)
                expected = weights @ values[slots, kv_head]
                assert torch.allclose(result[head], expected, atol=1e-6)
