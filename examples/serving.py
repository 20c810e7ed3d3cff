# SPDX-License-Identifier: Apache-2.0
"""Start and stop `vllm serve` from Python; used by the demo and the benchmarks."""

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

STARTUP_TIMEOUT_S = 1800  # a first start may download the model
SHUTDOWN_TIMEOUT_S = 30
LOG_LINES = 30  # shown of a server that failed


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    log: Path

    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges by sample name, summed over labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def log_tail(self) -> str:
        """The end of the log, for a person who wants to know what went wrong."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is its CPU build."""
    return importlib.metadata.version("vllm").endswith("+cpu")


def default_environment(model: str) -> dict[str, str]:
    """What a server on this machine needs: a KV cache that fits, and no network for local models."""
    environment = dict(os.environ)
    if runs_on_cpu():
        free_gib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(min(5, max(1, int(free_gib / 4)))))
    if Path(model).exists():
        environment.setdefault("HF_HUB_OFFLINE", "1")
    return environment


def default_options() -> list[str]:
    """Options that suit this machine's build of vLLM."""
    # The CPU's page of 128 tokens is coarse for small budgets, and compiling costs more than it saves.
    return ["--block-size", "32", "--enforce-eager"] if runs_on_cpu() else []


@contextmanager
def serve(
    model: str, *options: str, show_progress: Callable[[float], None] = lambda seconds: None
) -> Iterator[Server]:
    """Run `vllm serve MODEL OPTIONS` on a free local port until the block ends.

    Args:
        model: folder or name on huggingface.co.
        options: of `vllm serve`.
        show_progress: called with the seconds since the start, until the server is healthy.

    Raises:
        SystemExit: the server ended or did not become healthy in time; the end of its log is shown.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm), "serve", model, "--host", "127.0.0.1", "--port", str(port), *options]
    with tempfile.TemporaryDirectory(prefix="vllm-serve-") as directory:
        log = Path(directory, "server.log")
        with log.open("w") as output:
            # A session of its own: Ctrl-C reaches this process alone, which ends the server in order.
            process = subprocess.Popen(
                command,
                env=default_environment(model),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = Server(f"http://127.0.0.1:{port}", log)
        try:
            _wait_until_healthy(server, process, show_progress)
            yield server
        finally:
            _stop(process)


def _wait_until_healthy(
    server: Server, process: subprocess.Popen, show_progress: Callable[[float], None]
) -> None:
    started = time.monotonic()
    while (elapsed_s := time.monotonic() - started) < STARTUP_TIMEOUT_S:
        show_progress(elapsed_s)
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    print(server.log_tail(), file=sys.stderr)
    what = "did not become healthy in time" if process.poll() is None else "did not start"
    sys.exit(f"error: the server {what}; the end of its log is above")


def _stop(process: subprocess.Popen) -> None:
    """Ask the server to end; end it with all its workers if it does not."""
    process.terminate()
    try:
        process.wait(SHUTDOWN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
