# SPDX-License-Identifier: Apache-2.0
"""Thousands of documents through `examples/ray_batch.py`: a replica of two is killed, the job interrupted.

The documents are excerpts of real text, in files of all three kinds. The first start of the job loses a
replica (SIGKILL), which Ray starts again, and is then interrupted (SIGINT); the same command answers the
rest. In the end every document has to have one answer, and a sample of the answers is compared with plain
vLLM's. The memory of the process that reads and writes is watched all the while.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from common.documents import read_text
from common.engines import PAGE, engine, engine_settings, set_environment
from common.machine import vllm_environment
from common.options import add_documents, add_model, add_out, make_parser, settings_of
from common.processes import batch_replicas, started, with_engines
from common.record import make_record, write
from kv_heavy import TINY_LLAMA

RAY_BATCH = Path(__file__).resolve().parents[1] / "examples" / "ray_batch.py"
REPLICAS = 2
KV_CACHE_GIB = 1
# Shares of the documents with an answer at which a replica is killed, and at which the job is interrupted.
KILL_AT, INTERRUPT_AT = 0.2, 0.6
INTERVAL_S = 0.5
TIME_LIMIT_S = 3600.0


# --- documents --------------------------------------------------------------------------------------------


def write_documents(folder: Path, texts: Sequence[str]) -> dict[str, str]:
    """A tenth of the texts as files of their own, the rest half as JSON lines, half as Parquet.

    Returns:
        texts by the names that ray_batch.py has for them.
    """
    num_files = max(1, len(texts) // 10)
    middle = (num_files + len(texts)) // 2
    by_name = {}
    for index, text in enumerate(texts[:num_files]):
        path = folder / f"{index:04}.txt"
        path.write_text(text)
        by_name[str(path)] = text
    lines, table = folder / "rows.jsonl", folder / "table.parquet"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[num_files:middle]))
    pq.write_table(pa.table({"text": list(texts[middle:])}), table)
    by_name |= {f"{lines}#{index}": text for index, text in enumerate(texts[num_files:middle])}
    return by_name | {f"{table}#{index}": text for index, text in enumerate(texts[middle:])}


def excerpts(text: str, count: int, shortest: int, longest: int) -> list[str]:
    """Excerpts spread over a text, their lengths (characters) spread between two."""
    stride = (len(text) - longest) // count
    lengths = [shortest + (longest - shortest) * (index * 7919 % count) // count for index in range(count)]
    return [text[index * stride :][:length] for index, length in enumerate(lengths)]


# --- a job ------------------------------------------------------------------------------------------------


class Job:
    """What is seen of `ray_batch.py` while it runs.

    Args:
        process: it.
        log: what it prints.
        answers: its folder of answers.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path, answers: Path) -> None:
        self.process, self._log, self._answers = process, log, answers
        self._began = time.monotonic()
        self.driver_memory: list[dict[str, float]] = []  # of the process that reads and writes, its own
        self.pids: list[int] = []  # of replicas, in the order of their coming

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def answered(self) -> int:
        """Documents that have an answer in a file."""
        return sum(pq.read_metadata(file).num_rows for file in self._answers.glob("answers-*.parquet"))

    def with_engines(self) -> list[psutil.Process]:
        """Replicas whose engine has started."""
        return with_engines(batch_replicas(self.process.pid))

    def wait_for(self, is_so: Callable[[], Any]) -> None:
        """Watch until something is so.

        Raises:
            RuntimeError: the job ended before, or it took too long.
        """
        while not is_so():
            if self.process.poll() is not None or self.seconds > TIME_LIMIT_S:
                raise RuntimeError(f"the job ended, or took too long: {self.log()[-4000:]}")
            self._look()
            time.sleep(INTERVAL_S)

    def wait(self) -> int:
        """Watch until it has ended; its exit status."""
        while self.process.poll() is None and self.seconds < TIME_LIMIT_S:
            self._look()
            time.sleep(INTERVAL_S)
        return self.process.wait(timeout=1)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _look(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.pids += [one.pid for one in batch_replicas(self.process.pid) if one.pid not in self.pids]
            memory = psutil.Process(self.process.pid).memory_info()
            own_mb = (memory.rss - memory.shared) / 1e6
            now = {"at_s": round(self.seconds, 1), "answered": self.answered(), "mb": round(own_mb)}
            if not self.driver_memory or now["answered"] != self.driver_memory[-1]["answered"]:
                self.driver_memory.append(now)


def lose_a_replica(job: Job) -> dict[str, float]:
    """Kill one of two replicas; returns when another has an engine in its place.

    Raises:
        RuntimeError: the processes of its engine outlive it.
    """
    job.wait_for(lambda: len(job.with_engines()) == REPLICAS)
    victim = job.with_engines()[0]
    its_engine = victim.children(recursive=True)
    at = {"at_s": round(job.seconds, 1), "answered": job.answered()}
    victim.kill()
    if psutil.wait_procs(its_engine, timeout=60)[1]:
        raise RuntimeError("processes of the killed replica's engine are still there")
    before = {*job.pids, victim.pid}
    job.wait_for(lambda: any(one.pid not in before for one in job.with_engines()))
    return {**at, "another_after_s": round(job.seconds - at["at_s"], 1)}


def run_jobs(command: Sequence[str], answers: Path, total: int) -> dict[str, Any]:
    """The job until it is interrupted, and once more until it ends."""
    # Ray's processes would stand back behind all others of the machine.
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB), "RAY_worker_niceness": "0"}
    log = answers.with_suffix(".log")
    with started(command, log, env) as process:
        job = Job(process, log, answers)
        job.wait_for(lambda: job.answered() >= KILL_AT * total)
        killed = lose_a_replica(job)
        job.wait_for(lambda: job.answered() >= INTERRUPT_AT * total)
        at_s = round(job.seconds, 1)
        process.send_signal(signal.SIGINT)
        status = job.wait()
        first = {"killed": killed, "interrupted_at_s": at_s, "seconds": round(job.seconds, 1)}
        first |= {"status": status, "answered": job.answered(), "driver_memory": job.driver_memory}
        said = [line for line in job.log().splitlines() if "(raylet)" not in line]
        first |= {"replicas_ever": len(job.pids), "end_of_log": said[-1]}
    print(f"interrupted: {first['answered']:,} of {total:,} documents are answered", flush=True)
    with started(command, log, env) as process:
        job = Job(process, log, answers)
        status = job.wait()
        second = {"seconds": round(job.seconds, 1), "status": status, "answered": job.answered()}
        second |= {"driver_memory": job.driver_memory, "repeated": job.log().count("answers came twice")}
    if status:
        raise RuntimeError(job.log()[-4000:])
    return {"first": first, "second": second}


# --- what came of it --------------------------------------------------------------------------------------


def judge(answers: Path, by_name: dict[str, str]) -> dict[str, Any]:
    """Whether every document has one answer, and what became of the drafts."""
    rows = [row for file in sorted(answers.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    names = [row["document"] for row in rows]
    accepted, rounds = (sum(row[name] or 0 for row in rows) for name in ("accepted", "rounds"))
    return {
        "documents": len(by_name),
        "lost": len(by_name.keys() - set(names)),
        "doubled": len(names) - len(set(names)),
        "unknown": len(set(names) - by_name.keys()),
        "errors": sum(bool(row["error"]) for row in rows),
        "prompt_tokens": sum(row["prompt_tokens"] or 0 for row in rows),
        "output_tokens": sum(row["output_tokens"] or 0 for row in rows),
        "tokens_per_round": round(1 + accepted / max(1, rounds), 3),
        "answers": {row["document"]: row["answer"] for row in rows},
    }


def compare(args: argparse.Namespace, answers: dict[str, str], by_name: dict[str, str]) -> dict[str, int]:
    """Answers of a sample that are plain vLLM's."""
    from vllm import SamplingParams

    names = list(by_name)[:: max(1, len(by_name) // args.sample)]
    settings = engine_settings(args.model, args.dtype, batch=args.seqs, model_len=args.model_len)
    sampling = SamplingParams(temperature=0, max_tokens=args.tokens)
    with engine(settings) as llm:
        outputs = llm.generate([by_name[name] for name in names], sampling, use_tqdm=False)
    plain = [output.outputs[0].text for output in outputs]
    same = sum(answers[name] == text for name, text in zip(names, plain, strict=True))
    return {"compared": len(names), "same": same}


def main() -> None:
    parser = make_parser(__doc__)
    add_model(parser, str(TINY_LLAMA))
    parser.set_defaults(dtype="float32")
    add_documents(parser)
    add_out(parser)
    parser.add_argument("--count", type=int, default=2000, help="documents (default 2000)")
    parser.add_argument("--characters", type=int, nargs=2, default=[100, 800], help="of a document")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer, at most (default 16)")
    parser.add_argument("--sample", type=int, default=200, help="documents that plain vLLM answers, too")
    parser.add_argument("--seqs", type=int, default=16, help="most requests of an engine at a time")
    parser.add_argument("--model-len", type=int, default=1024, help="tokens")
    args = parser.parse_args()
    set_environment(kv_cache_gib=KV_CACHE_GIB)
    record = make_record(
        "ray-documents",
        environment=vllm_environment(),
        settings={**settings_of(args, "model"), "replicas": REPLICAS},
        model=Path(args.model).name,
        cores=len(os.sched_getaffinity(0)),
    )
    kwargs = {"dtype": args.dtype, "max_model_len": args.model_len, "max_num_seqs": args.seqs}
    with TemporaryDirectory(prefix="ray-documents-") as name:
        # Resolved, as ray_batch.py names them.
        documents, answers = Path(name, "documents").resolve(), Path(name, "answers")
        documents.mkdir()
        texts = excerpts(read_text(args.documents), args.count, *args.characters)
        by_name = write_documents(documents, texts)
        command = [sys.executable, str(RAY_BATCH), str(documents), "--out", str(answers)]
        command += ["--replicas", str(REPLICAS), "--max-tokens", str(args.tokens), "--model", args.model]
        command += ["--rows-per-file", "50"]
        command += ["--engine-kwargs", json.dumps({**kwargs, "block_size": PAGE})]
        record |= run_jobs(command, answers, len(by_name))
        judged = judge(answers, by_name)
        record["answers"] = judged | compare(args, judged.pop("answers"), by_name)
    print(json.dumps(record["answers"], indent=1))
    write(record, args.out)
    judged = record["answers"]
    if any(judged[name] for name in ("lost", "doubled", "unknown", "errors")):
        sys.exit("error: documents were lost, doubled or not answered")
    # A near-tie may fall the other way in another batch.
    if judged["same"] < 0.98 * judged["compared"]:
        sys.exit("error: answers are not plain vLLM's")


if __name__ == "__main__":
    main()
