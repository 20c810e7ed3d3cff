# SPDX-License-Identifier: Apache-2.0
"""benchmarks/simulation.py: what it compares, without a server."""

import contextlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import engines
import pytest

pytest.importorskip("simpy")
sys.path.insert(0, str(engines.HERE.parent / "benchmarks"))
import simulation
from common import tables
from serving import Server
from suite_plots import PER_POSITION

from vllm_magicdec.planner.simulation import Limits

LIMITS = Limits(10_000, max_num_seqs=4, max_num_batched_tokens=1000)


class Seconds:
    """A second per step."""

    def seconds(self, work):
        return 1.0


def test_requests_are_replayed_when_they_began():
    result = {"start_times": [105.0, 100.0]}
    simulated = simulation.replay(result, 10, 3, Seconds(), LIMITS)
    # Each alone: its prompt, then two steps.
    assert (simulated["requests"], simulated["p50_ttft_ms"], simulated["p50_e2e_ms"]) == (2, 1000, 3000)
    assert simulated["duration_s"] == 8


def test_as_many_drafts_stand_as_on_the_server():
    result = {"start_times": [0.0], PER_POSITION: [1.0, 1.0]}
    assert simulation.replay(result, 10, 7, Seconds(), LIMITS)["p50_e2e_ms"] == 3000


def test_a_front_end_comes_before_the_engine():
    simulated = simulation.replay({"start_times": [0.0]}, 10, 3, Seconds(), LIMITS, frontend_s=0.25)
    assert (simulated["p50_ttft_ms"], simulated["p50_e2e_ms"]) == (1250, 3250)


class Answering(http.server.BaseHTTPRequestHandler):
    """Takes 0.3 s of the listener's clock for a request, 0.2 of which its engine says were its own."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["max_tokens"], asked["prompt"]) == (1, "Once")
        self.server.now_s += 0.3
        self.server.engine_s += 0.2
        self._answer("{}")

    def do_GET(self):
        assert self.path == "/metrics"
        self.server.now_s += 0.6  # is not part of it
        queued, computed = self.server.engine_s / 3, self.server.engine_s * 2 / 3
        self._answer(
            f"vllm:request_queue_time_seconds_sum {queued}\n"
            f"vllm:request_prefill_time_seconds_sum {computed}\n"
            "vllm:request_decode_time_seconds_sum 77.0\n"
        )

    def _answer(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def test_what_a_request_takes_beside_the_engine(tmp_path, monkeypatch):
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"prompt": "Once"}\n' * 3)
    with http.server.HTTPServer(("127.0.0.1", 0), Answering) as listener:
        listener.engine_s, listener.now_s = 100.0, 0.0
        monkeypatch.setattr(simulation.time, "perf_counter", lambda: listener.now_s)
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        server = Server(f"http://127.0.0.1:{listener.server_port}", tmp_path, None, 0.0)
        taken = simulation.frontend_seconds(server, "small", requests)
        listener.shutdown()
        thread.join()
    assert listener.engine_s == pytest.approx(100.6)
    assert taken == pytest.approx(0.1)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_worker_has_its_core_for_itself(tmp_path):
    mine = os.sched_getaffinity(0)
    core = min(mine)
    worker = shutil.copy(shutil.which("sleep"), tmp_path / "VLLM__Worker")
    command = f"taskset -c {core} {worker} 600 & sleep 600"
    with subprocess.Popen(["bash", "-c", command], start_new_session=True) as process:
        server = SimpleNamespace(process=process)
        try:
            deadline = time.monotonic() + 60
            while "worker" not in (found := simulation.named_processes(server)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            with simulation.worker_alone(server):
                assert found["worker"].cpu_affinity() == [core]
                assert set(found["server"].cpu_affinity()) == os.sched_getaffinity(0) == mine - {core}
            assert os.sched_getaffinity(0) == mine
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_profiles_before_and_after_count_alike():
    class Never:
        def seconds(self, work):
            return 0.0

    times = simulation.BeforeAndAfter(Never(), Seconds())
    assert simulation.replay({"start_times": [0.0]}, 10, 3, times, LIMITS)["p50_e2e_ms"] == 1500


def test_errors_are_relative_to_the_server():
    served = {
        "output_throughput": 50.0,
        "median_ttft_ms": 10.0,
        "median_tpot_ms": 4.0,
        "median_e2el_ms": 90.0,
    }
    said = {"output_throughput": 55.0, "p50_ttft_ms": 9.0, "p50_tpot_ms": 4.0, "p50_e2e_ms": 99.0}
    compared = simulation.compare(served, said)
    assert [cell["error"] for cell in compared.values()] == pytest.approx([0.1, -0.1, 0.0, 0.1])
    record = {"runs": [{"method": "plain", "rate": 2.5, "compared": compared}]}
    row = tables.markdown(simulation.table_of(record)).splitlines()[-1]
    assert row == "| plain | 2.5 | 50.0 55.0 +10% | 10.0 9.0 -10% | 4.0 4.0 +0% | 90.0 99.0 +10% |"


def test_of_several_turns_the_medians_count():
    def run(rate, served, simulated):
        cell = {"served": served, "simulated": simulated}
        return {"method": "plain", "rate": rate, "compared": dict.fromkeys(simulation.COMPARED, cell)}

    runs = [run(2.5, 10.0, 11.0), run(5.0, 1.0, 1.0), run(2.5, 20.0, 30.0), run(2.5, 40.0, 40.0)]
    rows = tables.markdown(simulation.table_of({"runs": runs})).splitlines()
    assert rows[-2:] == [
        "| plain | 2.5 |" + " 20.0 30.0 +50%! |" * 4,
        "| plain | 5 |" + " 1.0 1.0 +0% |" * 4,
    ]


def record_of(*errors):
    """Of magicdec at 2.5 requests per second: a turn with each error of TTFT; the rest is right."""
    right = {name: {"served": 100.0, "simulated": 100.0} for name in simulation.COMPARED}
    turns = [right | {"TTFT": {"served": 100.0, "simulated": 100.0 * (1 + error)}} for error in errors]
    return {"runs": [{"method": "magicdec", "rate": 2.5, "compared": turn} for turn in turns]}


@pytest.mark.parametrize(
    ("errors", "share", "is_beyond"),
    [
        ([0.14], 0.15, False),
        ([-0.14], 0.15, False),
        ([0.16], 0.15, True),
        ([-0.16], 0.15, True),
        ([-0.16], 0.2, False),
        ([9.0, 0.14, 0.1], 0.15, False),
        ([-0.2, -0.2, 0.0], 0.15, True),
    ],
)
def test_errors_that_are_too_large_are_found_and_marked(errors, share, is_beyond):
    record = record_of(*errors)
    beyond = simulation.cells_beyond(record, share)
    assert list(beyond) == ([("magicdec", 2.5, "TTFT")] if is_beyond else [])
    assert tables.markdown(simulation.table_of(record, share)).count("%!") == is_beyond


@pytest.mark.parametrize("within", [0.15, 0.3])
def test_the_record_is_written_before_its_errors_are_judged(within, tmp_path, monkeypatch):
    out = tmp_path / "simulation.json"
    monkeypatch.setattr(sys, "argv", ["simulation.py", "--out", str(out), "--within", str(within)])
    monkeypatch.setattr(simulation, "set_environment", lambda **_: None)
    monkeypatch.setattr(simulation, "model_folder", lambda name: contextlib.nullcontext(name))
    monkeypatch.setattr(simulation, "measure", lambda *_: record_of(-0.2))
    if within < 0.2:
        with pytest.raises(SystemExit, match=r"more than 15% of error: TTFT of magicdec at 2\.5 \(-20%\)$"):
            simulation.main()
    else:
        simulation.main()
    assert json.loads(out.read_text()) == record_of(-0.2)


def test_every_load_has_its_turns_there_and_back(tmp_path, monkeypatch):
    served = []

    def run_load(server, model, load, requests, count, num_tokens, folder, *options):
        folder.mkdir(parents=True)  # as the real one does: each is another
        served.append((server.name, load.rate))

    @contextlib.contextmanager
    def serve(model, *options):
        name = "magicdec" if "--speculative-config" in options else "plain"
        yield SimpleNamespace(name=name, only_now=contextlib.nullcontext)

    def compare_run(args, method, rate, result, times, *rest):
        return {"method": method, "rate": rate, "profiles": (times.before, times.after)}

    monkeypatch.setattr(simulation, "run_load", run_load)
    monkeypatch.setattr(simulation, "serve", serve)
    monkeypatch.setattr(simulation, "compare_run", compare_run)
    monkeypatch.setattr(simulation, "capacity", lambda *_: 4.0)
    monkeypatch.setattr(simulation, "prompts_of", lambda *_: tmp_path)
    monkeypatch.setattr(simulation, "profile_engine", lambda *_: {})
    monkeypatch.setattr(simulation.ProfiledTimes, "load", lambda path: path.stem)
    monkeypatch.setattr(simulation, "frontend_seconds", lambda *_: 0.0)
    monkeypatch.setattr(simulation, "worker_alone", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(sys, "argv", ["simulation.py", "--turns", "2", "--shares", "0.25", "0.5", "0.75"])
    written = []
    monkeypatch.setattr(simulation, "set_environment", lambda **_: None)
    monkeypatch.setattr(simulation, "model_folder", lambda name: contextlib.nullcontext(name))
    monkeypatch.setattr(simulation, "table_of", lambda *_: "")
    monkeypatch.setattr(simulation, "cells_beyond", lambda *_: {})
    monkeypatch.setattr(simulation, "write", lambda record, out: written.append(record))
    simulation.main()
    there = [(method, rate) for rate in (1.0, 2.0, 3.0) for method in ("plain", "magicdec")]
    assert served[2:] == there + there[::-1]  # after the warm-ups
    runs = written[0]["runs"]
    assert [(run["method"], run["rate"]) for run in runs] == there + there[::-1]
    # One after the servers have started, then one after each run.
    assert [run["profiles"] for run in runs] == [(f"profile-{n}", f"profile-{n + 1}") for n in range(1, 13)]
