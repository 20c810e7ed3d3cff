# SPDX-License-Identifier: Apache-2.0
"""Replicas of `examples/ray_serve.py` that come and go with the requests: from one to two and back.

One client asks one question after the other; then several do, until Ray Serve has started another replica;
then one again, until there is one replica left. All the while every answer has to come whole, and has to be
what the first replica said to that prompt (greedy; a near-tie may fall the other way in another batch). In
between, Ray's endpoint has to show the plugin's metrics of both replicas.
"""

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import openai
import psutil
from common.documents import read_text
from common.engines import PAGE, set_environment
from common.machine import vllm_environment
from common.options import add_documents, add_model, add_out, make_parser, settings_of
from common.processes import below, started
from common.record import make_record, write
from kv_heavy import TINY_LLAMA
from prometheus_client.parser import text_string_to_metric_families
from ray_documents import excerpts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import ray_cluster

RAY_SERVE = Path(ray_cluster.__file__).with_name("ray_serve.py")
NAME = "served"
KV_CACHE_GIB = 1
NUM_PROMPTS = 16
INTERVAL_S = 0.5
TIME_LIMIT_S = 600.0  # of a phase
SHUTDOWN_S = 120.0
# Of the plugin, at Ray's endpoint, where colons are no part of a name.
METRIC_PREFIX = "ray_vllm_magicdec_"


# --- requests ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What became of a request."""

    prompt: int
    seconds: float
    text: str
    error: str  # "": none


class Clients:
    """Each asks one question after the other, none twice.

    Args:
        url: of the API.
        prompts: that they take in turns.
        max_tokens: of an answer.
    """

    def __init__(self, url: str, prompts: Sequence[str], max_tokens: int) -> None:
        self._url, self._prompts, self._max_tokens = url, prompts, max_tokens
        self._turns = itertools.count()
        self.answers: list[Answer] = []  # in the order of their ends

    @contextmanager
    def asking(self, count: int) -> Iterator[None]:
        """So many of them until the block ends, and their last answers have come."""
        is_over = threading.Event()
        with ThreadPoolExecutor(count) as threads:
            asking = [threads.submit(self._ask_until, is_over) for _ in range(count)]
            try:
                yield
            finally:
                is_over.set()
        for one in asking:
            one.result()

    def _ask_until(self, is_over: threading.Event) -> None:
        with openai.OpenAI(base_url=self._url, api_key="none", max_retries=0) as client:
            while not is_over.is_set():
                self.answers.append(self.ask(client, next(self._turns) % len(self._prompts)))

    def ask(self, client: openai.OpenAI, prompt: int) -> Answer:
        """A streamed answer, so that one that breaks off is told from one that ends."""
        began = time.monotonic()
        text, reason, error = "", None, ""
        try:
            for piece in client.completions.create(
                model=NAME,
                prompt=self._prompts[prompt],
                temperature=0,
                max_tokens=self._max_tokens,
                stream=True,
            ):
                for choice in piece.choices:
                    text += choice.text
                    reason = choice.finish_reason or reason
            error = "" if reason else "it broke off"
        except (openai.OpenAIError, httpx.HTTPError) as raised:
            error = repr(raised)
        return Answer(prompt, time.monotonic() - began, text, error)


def judge(answers: Sequence[Answer]) -> dict[str, Any]:
    """What was lost, and what is other than the first answer to the same prompt."""
    whole = [answer for answer in answers if not answer.error]
    first: dict[int, str] = {}
    for answer in whole:
        first.setdefault(answer.prompt, answer.text)
    errors = [answer.error for answer in answers if answer.error]
    return {
        "answers": len(whole),
        "lost": len(errors),
        "errors": errors[:10],
        "differ": sum(answer.text != first[answer.prompt] for answer in whole),
    }


# --- the server -------------------------------------------------------------------------------------------


class Server:
    """`ray_serve.py`, and what its Ray says of it.

    Args:
        process: it.
        log: what it prints.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    def wait_for(self, is_so: Callable[[], Any]) -> float:
        """Seconds until something is so.

        Raises:
            RuntimeError: the server ended before, or it took too long.
        """
        began = time.monotonic()
        while not is_so():
            if self._process.poll() is not None or time.monotonic() - began > TIME_LIMIT_S:
                raise RuntimeError(f"the server ended, or took too long: {self._log.read_text()[-4000:]}")
            time.sleep(INTERVAL_S)
        return time.monotonic() - began

    def join(self) -> None:
        """Join its Ray, which is there before it is ready."""
        self.wait_for(lambda: "; replicas start" in self._log.read_text())
        ray_cluster.connect(self._log.read_text().split("Ray at ")[1].split(";")[0], replicas=0, cpus=1)

    def wait_until_ready(self) -> float:
        return self.wait_for(lambda: "\nready" in self._log.read_text())

    def replicas(self) -> dict[str, int]:
        """How many of its replicas are in which state."""
        from ray import serve

        (application,) = serve.status().applications.values()
        (states,) = (
            deployment.replica_states
            for name, deployment in application.deployments.items()
            if name.startswith("LLMServer")
        )
        return {str(getattr(state, "value", state)): number for state, number in states.items() if number}

    def metrics(self) -> dict[str, int]:
        """The plugin's at the endpoint of its Ray: of how many replicas, by name."""
        import ray

        (node,) = ray.nodes()
        address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(address, timeout=60) as response:
            families = text_string_to_metric_families(response.read().decode())
        found: dict[str, set[str]] = {}
        for sample in (sample for family in families for sample in family.samples):
            if sample.name.startswith(METRIC_PREFIX):
                found.setdefault(sample.name, set()).add(sample.labels["ReplicaId"])
        return {name: len(replicas) for name, replicas in sorted(found.items())}

    def end(self) -> dict[str, Any]:
        """Ctrl-C; its exit status, and how many of its processes are left."""
        import ray

        ray.shutdown()
        processes = below(self._process.pid)
        self._process.send_signal(signal.SIGINT)
        status = self._process.wait(SHUTDOWN_S)
        return {"status": status, "left": len(psutil.wait_procs(processes, SHUTDOWN_S)[1])}


def run_phase(
    server: Server, clients: Clients, count: int, is_reached: Callable[[], Any], steady_s: float
) -> dict[str, Any]:
    """Some clients ask until something is so, and for a while longer."""
    before = len(clients.answers)
    with clients.asking(count):
        reached_s = server.wait_for(is_reached)
        time.sleep(steady_s)
    seconds = [answer.seconds for answer in clients.answers[before:]]
    return {
        "clients": count,
        "replicas": server.replicas(),
        "reached_after_s": round(reached_s, 1),
        "answers": len(seconds),
        "median_s": round(statistics.median(seconds), 2),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The server and its phases."""
    port, log = free_port(), folder / "log"
    kwargs = {"dtype": args.dtype, "max_model_len": args.model_len, "block_size": PAGE}
    command = [sys.executable, str(RAY_SERVE), "--model", args.model, "--name", NAME]
    command += ["--port", str(port), "--min-replicas", "1", "--max-replicas", "2", "--cpus", "1"]
    command += ["--target-requests", "1", "--upscale-delay", str(args.upscale_delay)]
    command += ["--downscale-delay", str(args.downscale_delay), "--engine-kwargs", json.dumps(kwargs)]
    # Ray's processes would stand back behind all others of the machine.
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB), "RAY_worker_niceness": "0"}
    prompts = excerpts(read_text(args.documents), NUM_PROMPTS, *args.characters)
    clients = Clients(f"http://127.0.0.1:{port}/v1", prompts, args.tokens)
    with started(command, log, env) as process:
        server = Server(process, log)
        began = time.monotonic()
        server.join()
        server.wait_until_ready()
        ready_s = round(time.monotonic() - began, 1)
        print(f"ready after {ready_s} s", flush=True)
        phases = []
        for count, replicas in ((1, 1), (args.clients, 2), (1, 1)):
            expected = {"RUNNING": replicas}
            reached = lambda expected=expected: server.replicas() == expected  # noqa: E731
            phases.append(run_phase(server, clients, count, reached, args.steady))
            print(json.dumps(phases[-1]), flush=True)
            if replicas == 2:
                metrics = server.metrics()
        ended = server.end()
    return {
        "ready_s": ready_s,
        "phases": phases,
        "metrics": metrics,
        "ended": ended,
        "answers": judge(clients.answers),
    }


def main() -> None:
    parser = make_parser(__doc__)
    add_model(parser, str(TINY_LLAMA))
    parser.set_defaults(dtype="float32")
    add_documents(parser)
    add_out(parser)
    parser.add_argument("--clients", type=int, default=3, help="at a time, for two replicas (default 3)")
    parser.add_argument("--characters", type=int, nargs=2, default=[100, 800], help="of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most (default 64)")
    parser.add_argument("--model-len", type=int, default=1024, help="tokens")
    parser.add_argument("--upscale-delay", type=float, default=2.0, help="seconds (default 2)")
    parser.add_argument("--downscale-delay", type=float, default=10.0, help="seconds (default 10)")
    parser.add_argument("--steady", type=float, default=15.0, help="seconds after each change (default 15)")
    args = parser.parse_args()
    set_environment(kv_cache_gib=KV_CACHE_GIB)
    record = make_record(
        "ray-scaling",
        environment=vllm_environment(),
        settings={**settings_of(args, "model"), "target_requests": 1},
        model=Path(args.model).name,
        cores=len(os.sched_getaffinity(0)),
    )
    with TemporaryDirectory(prefix="ray-scaling-") as name:
        record |= run(args, Path(name))
    print(json.dumps(record["answers"], indent=1))
    write(record, args.out)
    judged, ended = record["answers"], record["ended"]
    if judged["lost"]:
        sys.exit("error: answers were lost")
    if judged["differ"] > 0.02 * judged["answers"]:
        sys.exit("error: replicas do not answer alike")
    if 2 not in record["metrics"].values():
        sys.exit("error: Ray's endpoint lacks the plugin's metrics of two replicas")
    if ended["status"] or ended["left"]:
        sys.exit("error: the server did not end well")


if __name__ == "__main__":
    main()
