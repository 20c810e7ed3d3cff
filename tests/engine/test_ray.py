# SPDX-License-Identifier: Apache-2.0
"""The examples for Ray: Ray Serve, and jobs beside it that are interrupted or lose a replica.

Almost all of it is two dozen processes that import vLLM, for 11 to 15 s each. So the server starts beside
the first job, and plain vLLM answers while a replica starts again.
"""

import functools
import json
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import engines
import openai
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import texts
from greedy import GREEDY

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: pip install 'vllm-magicdec[ray]'"
    ),
]

EXAMPLES = engines.MODEL.parent
NUM_DOCUMENTS, NUM_TOKENS = 64, 32
# Draft passes of one engine, four per round: enough for its first answers at any acceptance rate, and too
# few for a third of the documents even if all drafts are accepted.
PASSES_TO_BE_STUCK = 160
KWARGS = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 4, "max_num_batched_tokens": 1024}
# Only the server's engine looks up: Numba takes five seconds per engine to compile.
JOB_KWARGS = {**KWARGS, "speculative_config": engines.magicdec(4, draft_lookup="off")}
# For a start or restart of Ray and its engines on a busy machine.
TIME_LIMIT_S = 600
# To look through Ray's processes takes tens of milliseconds.
POLL_INTERVAL_S = 0.5


def command(script, kwargs, *options):
    # A core each, so that the jobs' replicas have room beside the server's on machines of any size.
    options = (*options, "--cpus", "1", "--engine-kwargs", json.dumps(kwargs))
    return [sys.executable, str(EXAMPLES / script), *options]


def environment():
    env = engines.environment(
        VLLM_CPU_OMP_THREADS_BIND="nobind",  # what there is of all cores
        # By default Ray's processes have a lower priority, and would starve beside another test.
        RAY_worker_niceness="0",
        # Ray would start a process for each of its CPUs in advance, of which few are used.
        RAY_prestart_worker_first_driver="0",
        **{engines.FAULT: ""},  # the jobs' own may set one; Ray's workers have the server's PYTHONPATH
    )
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    return env


def wait_for(what, process, log):
    deadline = time.monotonic() + TIME_LIMIT_S
    while not (found := what()):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(POLL_INTERVAL_S)
    return found


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=TIME_LIMIT_S)
    assert not alive


@contextmanager
def started(command, log, env):
    """Run a command with its output in `log`; the end of the block kills it and its children."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        left = below(process.pid) if process.poll() is None else []
        for one in (process, *left):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def below(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


@dataclass
class Server:
    """`ray_serve.py` with its own Ray cluster, which jobs can join long before the server is ready."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def ray(self):
        said = re.compile(r"Ray at (\S+); replicas start")
        return wait_for(lambda: said.search(self.log.read_text()), self.process, self.log)[1]

    def wait_until_ready(self):
        ready = f"\nready: http://127.0.0.1:{self.port}/v1, Ray at {self.ray()} ("
        wait_for(lambda: ready in self.log.read_text(), self.process, self.log)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Start a server without waiting for it; at the end it leaves no process behind."""
    log = tmp_path_factory.mktemp("server") / "log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Its Ray cluster has room for another replica, where a job's replicas go.
    options = ("--port", str(port), "--max-replicas", "2")
    with started(command("ray_serve.py", KWARGS, *options), log, environment()) as process:
        server = Server(process, port, log)
        yield server
        server.wait_until_ready()
        processes = below(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIME_LIMIT_S) == 0, log.read_text()
        assert_gone(processes)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Write texts to a file of each type; return the folder and each document's text by name."""
    folder = tmp_path_factory.mktemp("documents")
    first, *rows = (texts.tokenizer().decode(ids) for ids in texts.prompts(NUM_DOCUMENTS, 50, 400, seed=7))
    (folder / "0.txt").write_text(first)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows[:20]))
    pq.write_table(pa.table({"text": rows[20:]}), folder / "table.parquet")
    by_name = {f"{folder}/0.txt": first}
    by_name |= {f"{folder}/rows.jsonl#{index}": text for index, text in enumerate(rows[:20])}
    return folder, by_name | {f"{folder}/table.parquet#{i}": text for i, text in enumerate(rows[20:])}


@pytest.fixture(scope="module")
def plain_answers(documents):
    """A function that returns plain vLLM's answers by document, computed at its first call."""
    _, by_name = documents

    @functools.cache
    def ask():
        prompts = [texts.tokenizer().encode(text).ids for text in by_name.values()]
        sampling = {**GREEDY, "ignore_eos": False, "max_tokens": NUM_TOKENS}
        (answers,) = engines.generate(prompts, sampling, max_num_seqs=8).results[0]
        return {name: one["completions"][0]["text"] for name, one in zip(by_name, answers, strict=True)}

    return ask


@dataclass
class Jobs:
    """Starts `ray_batch.py` with the same arguments again and again."""

    server: Server
    folder: Path
    answers: Path
    fault: Path

    def start(self, log, *options):
        options = (str(self.folder), "--out", str(self.answers), "--max-tokens", str(NUM_TOKENS), *options)
        options = (*options, "--batch-size", "1", "--rows-per-file", "2", "--address", self.server.ray())
        variables = {**environment(), engines.FAULT: str(self.fault)}
        return started(command("ray_batch.py", JOB_KWARGS, *options), log, variables)

    def answered(self):
        return sum(pq.read_metadata(file).num_rows for file in self.answers.glob("answers-*.parquet"))

    def replicas(self):
        found = []
        for one in below(self.server.process.pid):
            with suppress(psutil.NoSuchProcess):
                if "vLLMEngineStage" in " ".join(one.cmdline()):
                    found.append(one)
        return found

    def two_with_engines(self, but):
        """Return two replicas whose engine has started: until then, Ray names them by `__init__`."""
        found = []
        for one in self.replicas():
            with suppress(psutil.NoSuchProcess):
                names = ["".join(child.cmdline()) for child in one.children()]
                is_starting = "__init__" in "".join(one.cmdline())
                if one not in but and not is_starting and any("EngineCore" in name for name in names):
                    found.append(one)
        return found if len(found) == 2 else None


def test_an_interrupted_job_resumes_and_a_dying_replica_loses_nothing(
    documents, plain_answers, server, tmp_path
):
    folder, by_name = documents
    jobs = Jobs(server, folder, tmp_path / "answers", tmp_path / "fault")
    log = tmp_path / "log"
    # Every engine answers a few documents and then waits, so that no job ends too soon.
    jobs.fault.write_text(f"stuck:first={PASSES_TO_BE_STUCK}")
    with jobs.start(log) as job:
        wait_for(jobs.answered, job, log)
        its_replicas = jobs.replicas()
        its_processes = [*its_replicas, *(one for replica in its_replicas for one in below(replica.pid))]
        job.send_signal(signal.SIGINT)
        job.wait(TIME_LIMIT_S)
    assert job.returncode == 1 and "interrupted; the same command resumes" in log.read_text()
    assert len(its_processes) > len(its_replicas) == 1
    before = jobs.answered()
    assert 0 < before < NUM_DOCUMENTS

    with jobs.start(log, "--replicas", "2") as job:
        # Replicas of the interrupted job may exist for some more seconds.
        victim, other = wait_for(lambda: jobs.two_with_engines(but=its_replicas), job, log)
        assert_gone(its_processes)
        wait_for(lambda: jobs.answered() > before, job, log)
        its_engine = below(victim.pid)
        victim.kill()
        ever = {victim.pid, other.pid}
        wait_for(lambda: len(ever | {one.pid for one in jobs.replicas()}) == 3, job, log)
        assert_gone(its_engine)
        assert jobs.answered() < NUM_DOCUMENTS
        jobs.fault.write_text("")
        plain = plain_answers()  # while another engine starts, on one core
        job.wait(TIME_LIMIT_S)
    said = log.read_text()
    assert job.returncode == 0, said
    assert f"{NUM_DOCUMENTS} documents in 3 files, of which {before} are answered" in said
    files = sorted(jobs.answers.glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert sorted(row["document"] for row in rows) == sorted(by_name), "each one once"
    assert not any(row["error"] for row in rows)
    same = sum(row["answer"] == plain[row["document"]] for row in rows)
    assert same >= NUM_DOCUMENTS - 1  # a near-tie may fall the other way; test_greedy.py judges those
    for row in rows:
        assert row["rounds"] > 0 and row["drafted"] >= row["accepted"] >= 0
    assert f"all {NUM_DOCUMENTS} documents" in said


def test_ray_serve_answers_as_plain_vllm(documents, plain_answers, server):
    _, by_name = documents
    server.wait_until_ready()
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["tiny-llama"]
        names = list(by_name)[:4]
        options = {"model": "tiny-llama", "temperature": 0, "max_tokens": NUM_TOKENS}
        answers = [client.completions.create(prompt=by_name[name], **options) for name in names]
    assert [answer.choices[0].text for answer in answers] == [plain_answers()[name] for name in names]
