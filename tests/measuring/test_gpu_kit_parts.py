# SPDX-License-Identifier: Apache-2.0
"""`make bench-gpu`: the order of its parts, its budget, how it goes on, and its page of results."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import engines
import pytest
from engines import HERE

import benchmarks.gpu.__main__ as kit
from benchmarks.gpu import engine, kernels, lossless, page, parts, peer
from benchmarks.gpu.engine_scenarios import fitting, why_not
from benchmarks.gpu.parts import Part

MACHINE = {
    "processor": "a CPU",
    "cores": 2,
    "gpu": "NVIDIA H200",
    "gpu_memory_gib": 139.8,
    "vllm": "0.32.0",
}


class Scripted(Part):
    """A part that runs a line of Python; `arguments` are that line."""

    def command(self, folder: Path) -> list[str]:
        return [sys.executable, "-c", self.arguments[0], str(self.result(folder))]


WRITES = "import sys; open(sys.argv[1], 'w').write('{\"benchmark\": \"none\"}')"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run the kit with scripted parts; returns how each ended, and what was printed."""
    findings = {"date": "2026-11-22", "machine": MACHINE, "findings": [], "is_ready": True}
    chosen: list[Part] = []

    def preflight(device: str, model: str | None) -> Part:
        code = f"import sys; open(sys.argv[1], 'w').write({json.dumps(json.dumps(findings))})"
        return Scripted("preflight", 1, "", (code,))

    monkeypatch.setattr(parts, "preflight", preflight)
    monkeypatch.setattr(parts, "small_parts", lambda device: chosen)

    def run(*scripted: Part, arguments: tuple[str, ...] = (), **changes: object) -> tuple[dict, str]:
        findings.update(changes)
        chosen[:] = scripted
        before = signal.getsignal(signal.SIGTERM)
        try:
            kit.main(["--small", "--out", str(tmp_path), *arguments])
        except SystemExit as end:
            print("exit", end.code)
        finally:
            signal.signal(signal.SIGTERM, before)
        state = json.loads((tmp_path / "parts.json").read_text())["parts"]
        return {name: entry["status"] for name, entry in state.items()}, capsys.readouterr().out

    return run


def test_a_part_that_fails_does_not_stop_the_others_and_comes_last_the_next_time(run, tmp_path):
    broken = Scripted("first", 1, "something", ("raise RuntimeError",))
    after = Scripted("second", 1, "something", (WRITES,))
    found, printed = run(broken, after)
    assert found == {"first": "problems", "second": "done"} and "exit 1" in printed
    assert "RuntimeError" in (tmp_path / "first.log").read_text()
    never = Scripted("third", 1, "something", (WRITES,))
    _, printed = run(broken, after, never)
    assert "second: done before" in printed
    assert printed.index("third: something") < printed.index("first: something")
    mended = Scripted("first", 1, "something", (WRITES,))
    found, printed = run(mended, after, never)
    assert set(found.values()) == {"done"} and "exit" not in printed


def test_what_was_done_as_another_command_is_done_again(run):
    run(Scripted("first", 1, "something", (WRITES,)))
    _, printed = run(Scripted("first", 1, "something", (f"{WRITES}; print(1)",)))
    assert "done before" not in printed


def test_parts_that_do_not_fit_into_the_hours_are_left_out_and_said(run, tmp_path):
    short = Scripted("short", 1, "something", (WRITES,))
    long = Scripted("long", 10, "something", (WRITES,))
    found, printed = run(long, short, arguments=("--hours", "0.15"))
    assert found == {"long": "left out", "short": "done"}
    assert re.search(r"long: left out, 10 minutes are planned and \d left", printed)
    assert "| long | something | 10 |  | left out |" in (tmp_path / page.NAME).read_text()
    assert run(long, short)[0] == {"long": "done", "short": "done"}


def test_results_of_two_machines_are_not_mixed(run):
    part = Scripted("first", 1, "something", (WRITES,))
    run(part)
    for _ in range(2):
        _, printed = run(part, machine={**MACHINE, "gpu": "NVIDIA H100"})
        assert "has results of NVIDIA H200 and this is NVIDIA H100; take another folder" in printed
    assert "first: done before" in run(part, machine=MACHINE)[1]


def test_nothing_starts_on_a_machine_that_lacks_what_all_need(run, tmp_path):
    (tmp_path / "parts.json").write_text('{"device": null, "parts": {}}')
    found, printed = run(Scripted("first", 1, "something", (WRITES,)), is_ready=False)
    assert found == {} and "what is MISSING above says what to type" in printed


def test_a_part_out_of_time_ends_with_what_it_started(tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', "
        f"'import time; time.sleep(999)']); open({str(pids)!r}, 'w').write(str(child.pid)); time.sleep(999)"
    )

    class Begun(subprocess.Popen):
        def wait(self, timeout=None):
            """Its time begins when both processes run."""
            while self.poll() is None and not _content(pids):
                time.sleep(0.1)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Begun)
    assert parts.run(Scripted("endless", 1, "", (code,)), tmp_path, 1).status == "stopped"
    assert_ends(int(pids.read_text()))


def test_an_interrupted_kit_ends_its_part_and_does_it_again(tmp_path):
    """The whole command, ended as by a shell that is closed."""
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--small", "--out", str(tmp_path)],
        cwd=HERE.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])},
        stdout=subprocess.DEVNULL,
    )
    log = tmp_path / "lossless.log"
    while child.poll() is None and not log.exists():
        time.sleep(0.1)
    child.terminate()
    assert child.wait(60) == 128 + signal.SIGTERM
    running = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(tmp_path).encode() in _content(path)
    ]
    for pid in running:
        assert_ends(pid)
    assert "lossless" not in json.loads((tmp_path / "parts.json").read_text())["parts"]


def test_a_part_that_was_just_started_ends_with_the_kit(tmp_path, monkeypatch):
    """The signal comes when the process runs and `subprocess.Popen` has not returned yet."""
    children = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            children.append(self.pid)
            signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    try:
        with pytest.raises(SystemExit):
            parts.run(Scripted("endless", 1, "", ("import time; time.sleep(99)",)), tmp_path, 60)
    finally:
        signal.signal(signal.SIGTERM, before)
    (child,) = children
    assert_ends(child)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def assert_ends(pid: int) -> None:
    status = Path(f"/proc/{pid}/stat")
    for _ in range(600):
        fields = _content(status).split()
        if not fields or fields[2] == b"Z":
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} still runs")


# ---- what the parts are


@pytest.mark.parametrize("memory_gib", [79.2, 139.8])
def test_the_first_hour_has_sameness_goals_and_the_peer(memory_gib):
    chosen = parts.all_parts(memory_gib, "some/model")
    ends = accumulate(part.minutes for part in [parts.preflight("cuda", None), *chosen])
    first_hour = [part.name for part, end in zip(chosen, list(ends)[1:], strict=True) if end <= 60]
    assert {"lossless-graphs", "goals", "peer-10k", "tests", "kernels"} <= set(first_hour)
    assert len({part.name for part in chosen}) == len(chosen)


@pytest.mark.parametrize("chosen", [parts.all_parts(139.8, "some/model"), parts.small_parts("cpu")])
def test_every_part_is_a_command_that_its_program_takes(chosen, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    modules = {module.__name__: module for module in (engine, kernels, peer)}
    for part in chosen:
        module, *arguments = part.command(tmp_path)[2:]
        if module != "pytest":
            assert modules[module].parse(arguments).out == part.result(tmp_path)


@pytest.mark.parametrize(("memory_gib", "batch"), [(139.8, "24"), (79.2, "12")])
def test_the_goals_are_measured_with_as_many_requests_as_fit(memory_gib, batch):
    goals = next(part for part in parts.all_parts(memory_gib, None) if part.name == "goals")
    assert goals.arguments[goals.arguments.index("--batch") + 1] == batch


def test_make_puts_pips_programs_on_the_path():
    """FlashInfer's `ninja` is one of them."""
    for target in ("test-gpu", "bench-gpu", "demo", "bench-decode"):
        child = subprocess.run(
            ["make", "-n", "--no-print-directory", target, "OUT=somewhere", "VENV=/venv/bin"],
            cwd=HERE.parent,
            capture_output=True,
            text=True,
            check=True,
        )
        last = child.stdout.strip().splitlines()[-1]
        assert last.startswith(f'PATH="{HERE.parent}/') and '/bin:$PATH" /venv/bin/python' in last


# ---- the peer's cells


def test_the_peers_cells_have_one_batch_and_its_acceptance(monkeypatch):
    asked = []

    def run_cells(what, step, cells, known, args, **settings):
        asked.append((step[1]["as_many_as_fit"], *cells, settings["speculative_config"]))
        batch = 37 if step[1]["as_many_as_fit"] else cells[0][0]
        speed = {"plain": 900.0, "streamingllm": 1530.0}.get(known["policy"], 1890.0)
        measured = {"tokens_per_s": speed, "acceptance_length": 1.0}
        return [{**known, "batch": batch, "context": cells[0][1], "status": "ok", **measured}], None

    monkeypatch.setattr(peer, "run_cells", run_cells)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    results = peer.measure(peer.parse(["--context", "10000"]), 10_000)
    assert [(fit, cell) for fit, cell, _ in asked] == [
        (True, (128, 10_000)),
        (False, (37, 10_000)),
        (False, (37, 10_000)),
    ]
    first, second, plain = [spec for *_, spec in asked]
    assert plain is None
    assert first["draft_kv_policy"] == "verify-topk" and first["synthetic_acceptance_length"] == 6.24
    assert second["synthetic_acceptance_length"] == 4.92
    assert {spec["num_speculative_tokens"] for spec in (first, second)} == {6}
    assert {spec["draft_kv_budget"] for spec in (first, second)} == {600}
    assert [r.get("speedup") for r in results] == pytest.approx([2.1, 1.7, None])
    assert [round(r["peer"]["speedup"], 2) for r in results] == [2.01, 1.68, 1.0]


def test_the_peers_speedups_at_100k_are_those_that_it_states():
    figures = peer.FIGURES[100_000]
    ratios = [figures[policy] / figures["plain"] for policy in peer.TOKENS_PER_ROUND]
    assert ratios == pytest.approx([2.12, 2.73], abs=0.005)


def test_with_real_weights_acceptance_is_the_models_own(monkeypatch):
    asked = []

    def run_cells(what, step, cells, known, args, **settings):
        asked.append((step[1]["text"], settings))
        return [{**known, "batch": 1, "context": 10_000, "status": "failed", "reason": "x"}], None

    monkeypatch.setattr(peer, "run_cells", run_cells)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    peer.measure(peer.parse(["--model", "some/model"]), 10_000)
    assert all(text and settings["model"] == "some/model" for text, settings in asked)
    assert all("rejection_sample_method" not in (s["speculative_config"] or {}) for _, s in asked)
    assert not any("load_format" in settings for _, settings in asked)


@pytest.mark.parametrize(("context", "budget"), [(1000, 256), (10_000, 600), (100_000, 6000)])
def test_the_budget_is_a_share_of_the_context_and_at_least_the_peers(context, budget):
    assert peer.budget_of(context, 0.06) == budget


def test_as_many_requests_as_fit_are_those_that_are_not_refused():
    config = SimpleNamespace(
        num_speculative_tokens=6, cache_config=SimpleNamespace(num_gpu_blocks=1001, block_size=16)
    )
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
    most = fitting(llm, 994)
    room = {"max_model_len": 4096, "num_pages": 1000, "page_size": 16}
    assert most == 15 and not why_not(most, 994 + 6, **room) and why_not(most + 1, 994 + 6, **room)


# ---- the page


def test_the_page_has_goals_and_what_is_missing(tmp_path):
    entries = {"lossless-graphs": {"status": "done", "minutes": 9.5}, "kernels": {"status": "left out"}}
    finding = {"what": "FlashInfer", "found": "", "missing": "no ninja; type this", "is_fatal": False}
    files = {
        "preflight": {"date": "2026-11-22", "machine": MACHINE, "findings": [finding]},
        "lossless-graphs": {
            "benchmark": "gpu engine",
            "settings": {"gamma": 4},
            "times": [],
            "speed": [],
            "goals": [{"goal": "T_D / T_T", "at_most": 0.2, "measured": 0.25, "reached": False}],
            "lossless": [check(), check(status="wrong", reason="request 3 differs at token 5")],
        },
        "peer-10k": {
            "benchmark": "gpu peer",
            "acceptance": "synthetic",
            "peer": {"source": "a poster"},
            "results": [
                peer_result("verify-topk", 1890.0, 2.1),
                peer_result("streamingllm", 1350.0, 1.5),
                peer_result("plain", 900.0, None),
            ],
        },
    }
    for name, record in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    junit = '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1">'
    junit += '<testcase classname="a" name="b"><failure/></testcase></testsuite></testsuites>'
    (tmp_path / "tests.xml").write_text(junit)
    page.write(tmp_path, parts.all_parts(139.8, None), entries, "cuda")
    text = (tmp_path / page.NAME).read_text()
    for expected in (
        "NVIDIA H200, 139.8 GiB, vllm 0.32.0; 2026-11-22.",
        "- no ninja; type this",
        "| cases whose greedy output is plain decoding's | ≥ 2 | 1 | **missed** |",
        "| T_D / T_T | ≤ 0.2 | 0.25 | **missed** |",
        "| verify-topk over plain, 10,000 tokens, synthetic | ≥ 2.01 | 2.1 | met |",
        "| streamingllm over plain, 10,000 tokens, synthetic | ≥ 1.68 | 1.5 | **missed** |",
        "| 12 | 9.5 | done | [log](lossless-graphs.log) |",
        "| left out |  |",
        "1 passed, 1 failed, 1 skipped.",
        "- failed: a: b",
        "| 10,000 | verify-topk | 37 of 128 | 600 | 6.20 (synthetic) | 1890 (2.10 x) | 1893 (2.01 x), 1 x",
        "- left out: kernels",
        "- not run: peer-100k",
        "- wrong: lossless-graphs: graphs, snapkv, budget 128: request 3 differs at token 5",
    ):
        assert expected in text, expected
    assert "On a CPU" not in text and (tmp_path / "peer.png").stat().st_size > 0
    assert [goal["reached"] for goal in json.loads((tmp_path / "goals.json").read_text())] == [
        False,
        False,
        True,
        False,
    ]


def check(**changes: object) -> dict:
    case = {"mode": "graphs", "runner": "v2", "dtype": "float32", "policy": "snapkv", "budget": 128}
    counts = {"drafted": 9, "accepted": 8, "requests": 4, "tokens": 16, "status": "ok", "reason": ""}
    return {**case, **counts, **changes}


def peer_result(policy: str, speed: float, speedup: float | None) -> dict:
    result = {
        "shape": "qwen3-8b",
        "policy": policy,
        "requests": 128,
        "batch": 37,
        "context": 10_000,
        "budget": 600,
        "status": "ok",
        "reason": "",
        "tokens_per_s": speed,
        "acceptance_length": 6.2,
        "synthetic_tokens_per_round": None if policy == "plain" else 6.2,
    }
    peer.add_speedups([result])
    return result if speedup is None else {**result, "speedup": speedup}


def test_modes_that_need_graphs_or_flashinfer_fail_without(monkeypatch):
    """Sameness that was proved without them would be another statement."""
    steps = {"graph": 5, "flashinfer": 0, "eager": 0}

    def engine_run(*results: object) -> engines.EngineRun:
        metrics = {"vllm:magicdec_draft_failures": 0}
        return engines.EngineRun(list(results), metrics, 1, 4, False, True, [], "")

    def look(mode: str, policy: str) -> dict:
        case = lossless.Case(policy, 128)
        return lossless._how_it_drafted(engine_run(), engine_run([], steps), lossless.MODES[mode], case)

    assert look("graphs", "snapkv-token") == {"draft_steps": steps}
    assert look("bfloat16-graphs", "snapkv") == {"draft_steps": steps}
    with pytest.raises(RuntimeError, match="FlashInfer read in no draft step"):
        look("bfloat16-graphs", "snapkv-token")
    steps["graph"] = 0
    with pytest.raises(RuntimeError, match="no draft step came from a CUDA graph"):
        look("graphs", "streamingllm")
