# SPDX-License-Identifier: Apache-2.0
"""Start and stop `vllm serve` from Python; used by the demo and the benchmarks."""

import importlib.metadata
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

STARTUP_TIMEOUT_S = 1800  # a first start may download the model
HEALTH_INTERVAL_S = 0.5
SHUTDOWN_TIMEOUT_S = 30
LEFTOVER_TIMEOUT_S = 1
LOG_LINES = 30  # printed when a server fails

# Patterns of log lines, and the stage that begins with them. The latest match counts.
STAGES = tuple(
    (re.compile(line), stage)
    for line, stage in (
        (r"non-default args", "starting the engine"),
        (r"Initializing a V1 LLM engine", "starting the worker"),
        (r"Starting to load model", "loading weights"),
        (r"Loading \S+ checkpoint shards: +(\d+%)", r"loading weights, \1"),
        (r"Loading weights took|Model loading took", "profiling"),
        (r"Compiling a graph|Dynamo bytecode transform", "compiling"),
        (r"KV cache size", "allocating the KV cache, warming up"),
        (r"Capturing CUDA graphs.*?(\d+%)", r"capturing CUDA graphs, \1"),
        (r"init engine .* took", "starting the API"),
    )
)


@dataclass
class Server:
    """A starting or running server."""

    url: str
    log: Path
    process: subprocess.Popen
    started_s: float  # monotonic clock
    has_started: bool = False

    def is_healthy(self) -> bool:
        """Return whether the server answers.

        Raises:
            SystemExit: it ended or takes too long; the end of its log is printed.
        """
        ended = self.process.poll() is not None
        if ended or time.monotonic() - self.started_s > STARTUP_TIMEOUT_S:
            print(self.log_tail(), file=sys.stderr)
            problem = "did not start" if ended else "did not become healthy in time"
            sys.exit(f"error: the server {problem}; the end of its log is above")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                self.has_started = True
        except OSError:
            return False
        return True

    def stage(self) -> str:
        """Return the stage of a starting server, from its log."""
        for line in reversed(self.log.read_text(errors="replace").splitlines()):
            for pattern, stage in STAGES:
                if match := pattern.search(line):
                    return match.expand(stage)
        return "importing vLLM"

    def metrics(self) -> dict[str, float]:
        """Return vLLM's counters and gauges by sample name, summed over labels."""
        values: dict[str, float] = {}
        for sample in self.samples():
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def metric_by_engine(self, name: str) -> dict[str, float]:
        """Return a counter's or gauge's value of each data-parallel rank."""
        return {sample.labels["engine"]: sample.value for sample in self.samples() if sample.name == name}

    def samples(self) -> list[Sample]:
        """Return all of vLLM's metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=120) as response:
            text = response.read().decode()
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    @contextmanager
    def only_now(self) -> Iterator[None]:
        """Run the server until the block ends, then suspend it until the next such block."""
        _signal_group(self.process, signal.SIGCONT)
        try:
            yield
        finally:
            _signal_group(self.process, signal.SIGSTOP)

    def log_tail(self) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def runs_on_cpu() -> bool:
    """Return whether the installed vLLM is the CPU build."""
    return importlib.metadata.version("vllm").endswith("+cpu")


def default_environment(model: str) -> dict[str, str]:
    """Return the environment of a server: a KV cache that fits, and no network for local models."""
    environment = dict(os.environ)
    if runs_on_cpu():
        free_gib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(min(5, max(1, int(free_gib / 4)))))
    if Path(model).exists():
        environment.setdefault("HF_HUB_OFFLINE", "1")
    return environment


def default_options() -> list[str]:
    """Return options for this machine's build of vLLM."""
    # The CPU's page of 128 tokens is coarse for small budgets, and compiling costs more than it saves.
    return ["--block-size", "32", "--enforce-eager"] if runs_on_cpu() else []


@contextmanager
def launch(
    model: str, *options: str, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Server]:
    """Run `vllm serve MODEL OPTIONS` on a free local port until the block ends, without waiting for it.

    Args:
        model: folder or name on huggingface.co.
        options: options of `vllm serve`.
        environment: variables added to this process's.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm), "serve", model, "--host", "127.0.0.1", "--port", str(port), *options]
    with tempfile.TemporaryDirectory(prefix="vllm-serve-") as directory:
        log = Path(directory, "server.log")
        with log.open("w") as output:
            # In a new session, Ctrl-C reaches only this process, which stops the server cleanly.
            process = subprocess.Popen(
                command,
                env={**default_environment(model), **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = Server(f"http://127.0.0.1:{port}", log, process, time.monotonic())
        try:
            yield server
        finally:
            _stop(server)


@contextmanager
def serve(
    model: str,
    *options: str,
    environment: Mapping[str, str] = MappingProxyType({}),
    show_progress: Callable[[float], None] = lambda seconds: None,
) -> Iterator[Server]:
    """Run `vllm serve MODEL OPTIONS` until the block ends, and enter the block when it is healthy.

    Args:
        model: folder or name on huggingface.co.
        options: options of `vllm serve`.
        environment: variables added to this process's.
        show_progress: called with the seconds since the start, until the server is healthy.

    Raises:
        SystemExit: the server ended or did not become healthy in time; the end of its log is printed.
    """
    with launch(model, *options, environment=environment) as server:
        while not server.is_healthy():
            show_progress(time.monotonic() - server.started_s)
            time.sleep(HEALTH_INTERVAL_S)
        yield server


def _stop(server: Server) -> None:
    """Stop the server, then its remaining workers."""
    process = server.process
    _signal_group(process, signal.SIGCONT)
    try:
        if server.has_started:
            process.terminate()
            process.wait(SHUTDOWN_TIMEOUT_S)
        else:
            # A starting server ignores SIGTERM, but its workers do not.
            _signal_group(process, signal.SIGTERM)
            process.wait(LEFTOVER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    finally:  # also when a second Ctrl-C ends the waiting
        _end_group(process)


def _end_group(process: subprocess.Popen) -> None:
    """End the server's workers, after a moment in which they can remove its shared memory."""
    try:
        deadline_s = time.monotonic() + LEFTOVER_TIMEOUT_S
        while process.poll() is None or _signal_group(process, 0):
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.05)
    finally:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen, number: int) -> bool:
    """Signal the server's session and return whether it has any process."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True
