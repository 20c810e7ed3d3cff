# SPDX-License-Identifier: Apache-2.0
"""The examples for Ray: a job that is interrupted and goes on, a replica that dies, and Ray Serve."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec

import engines
import openai
import psutil
import pyarrow.parquet as pq
import pytest
import texts
from greedy import GREEDY

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: pip install 'vllm-magicdec[ray]'"
)

EXAMPLES = engines.MODEL.parent
NUM_DOCUMENTS, NUM_TOKENS = 36, 64
KWARGS = {"dtype": "float32", "max_model_len": 4096, "max_num_seqs": 4, "max_num_batched_tokens": 1024}
# Of a start of Ray and its engines, or a restart, on a busy machine.
TIME_LIMIT_S = 240


def environment():
    env = engines.environment(VLLM_CPU_OMP_THREADS_BIND="nobind")
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    return env


def _as_a_user_starts_it():
    os.sched_setaffinity(0, engines.own_cores() or os.sched_getaffinity(0))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it, and their children


@contextmanager
def started(script, *options):
    """An example as its user starts it; ends with all of its processes."""
    command = [sys.executable, str(EXAMPLES / script), *options, "--engine-kwargs", json.dumps(KWARGS)]
    process = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_as_a_user_starts_it,
    )
    try:
        yield process
    finally:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for one in (process, *left):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
        process.stdout.close()


def wait_for(what, process):
    deadline = time.monotonic() + TIME_LIMIT_S
    while not (found := what()):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def descendants(process):
    return psutil.Process(process.pid).children(recursive=True)


def replicas(process):
    """Ray's processes that hold an engine."""
    found = []
    for one in descendants(process):
        try:
            if "vLLMEngineStage" in " ".join(one.cmdline()) and one.children():
                found.append(one)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Texts in files of all three kinds; returns the folder and every document's text by its name."""
    folder = tmp_path_factory.mktemp("documents")
    lengths = [texts.tokenizer().decode(ids) for ids in texts.prompts(NUM_DOCUMENTS, 200, 1200, seed=7)]
    by_name = {}
    for index, text in enumerate(lengths[:4]):
        (folder / f"{index}.txt").write_text(text)
        by_name[f"{folder}/{index}.txt"] = text
    rows = lengths[4:]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows[:16]))
    by_name |= {f"{folder}/rows.jsonl#{index}": text for index, text in enumerate(rows[:16])}
    import pyarrow as pa

    pq.write_table(pa.table({"text": rows[16:]}), folder / "table.parquet")
    by_name |= {f"{folder}/table.parquet#{index}": text for index, text in enumerate(rows[16:])}
    return folder, by_name


@pytest.fixture(scope="module")
def plain_answers(documents):
    """Plain vLLM's, by document."""
    _, by_name = documents
    prompts = [texts.tokenizer().encode(text).ids for text in by_name.values()]
    run = engines.generate(
        prompts, {**GREEDY, "ignore_eos": False, "max_tokens": NUM_TOKENS}, max_num_seqs=8
    )
    return {
        name: request["completions"][0]["text"]
        for name, request in zip(by_name, run.results[0][0], strict=True)
    }


def test_an_interrupted_job_goes_on_and_a_replica_that_dies_loses_nothing(
    documents, plain_answers, tmp_path
):
    folder, by_name = documents
    options = (str(folder), "--out", str(tmp_path), "--max-tokens", str(NUM_TOKENS))
    options = (*options, "--batch-size", "2", "--rows-per-file", "2")

    def answered():
        return sum(pq.read_metadata(file).num_rows for file in tmp_path.glob("answers-*.parquet"))

    with started("ray_batch.py", *options) as job:
        wait_for(answered, job)
        job.send_signal(signal.SIGINT)
        log, _ = job.communicate(timeout=TIME_LIMIT_S)
    assert job.returncode == 1 and "interrupted; the same command goes on" in log, log
    before = answered()
    assert 0 < before < NUM_DOCUMENTS

    with started("ray_batch.py", *options, "--replicas", "2") as job:
        wait_for(lambda: answered() > before and len(replicas(job)) == 2, job)
        victim, other = replicas(job)
        its_engine = victim.children(recursive=True)
        victim.kill()
        # A third one takes its place, unless the other has answered all that was left by then.
        ever = {victim.pid, other.pid}
        wait_for(lambda: job.poll() is not None or len(ever | {one.pid for one in replicas(job)}) == 3, job)
        _, alive = psutil.wait_procs(its_engine, timeout=60)
        assert not alive
        log, _ = job.communicate(timeout=TIME_LIMIT_S)
    assert job.returncode == 0, log
    assert f"{NUM_DOCUMENTS} documents in 6 files, of which {before} are answered" in log
    rows = [row for file in sorted(tmp_path.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    assert sorted(row["document"] for row in rows) == sorted(by_name), "each one once"
    assert not any(row["error"] for row in rows)
    same = sum(row["answer"] == plain_answers[row["document"]] for row in rows)
    assert same >= NUM_DOCUMENTS - 1  # a near-tie may fall the other way; test_greedy.py judges those
    for row in rows:
        assert row["rounds"] > 0 and row["drafted"] >= row["accepted"] >= 0
        assert row["acceptance_length"] == pytest.approx(1 + row["accepted"] / row["rounds"], rel=1e-5)
    assert f"all {NUM_DOCUMENTS} documents" in log


def test_ray_serve_answers_as_plain_vllm(documents, plain_answers):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _, by_name = documents
    with started("ray_serve.py", "--port", str(port), "--max-replicas", "2") as server:
        for line in server.stdout:
            if line.startswith("ready"):
                break
        else:
            pytest.fail("Ray Serve did not start")
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            assert [model.id for model in client.models.list()] == ["tiny-llama"]
            names = list(by_name)[:4]
            answers = [
                client.completions.create(
                    model="tiny-llama", prompt=by_name[name], temperature=0, max_tokens=NUM_TOKENS
                )
                for name in names
            ]
        assert [answer.choices[0].text for answer in answers] == [plain_answers[name] for name in names]
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=TIME_LIMIT_S)
    assert server.returncode == 0
