# SPDX-License-Identifier: Apache-2.0
"""Servers of the shipped model: start them, watch metrics, memory and descriptors, find leftovers."""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engines
import psutil

from .requests import MAX_MODEL_LEN, MODEL

sys.path.insert(0, str(engines.HERE.parent / "examples"))
from serving import Server, serve

# Float32, so that summing in another order changes hardly any answer.
OPTIONS = (
    *("--dtype", "float32", "--enforce-eager", "--block-size", str(engines.PAGE)),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "1024"),
    *("--max-num-seqs", "24", "--scheduling-policy", "priority"),
    *("--served-model-name", MODEL, "--uvicorn-log-level", "warning"),
)
ENVIRONMENT = {
    "VLLM_MAGICDEC_STRICT": "0",
    # Longer than the client keeps an idle connection (5 s): otherwise it may be closed while being reused.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
    # oneDNN caches a kernel per number of tokens, and glibc keeps large blocks in a fragmented heap: both
    # look like a leak for an hour, also in plain vLLM.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
    "MALLOC_MMAP_THRESHOLD_": "131072",
}
GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "preemptions": "vllm:num_preemptions_total",
}
SHARED_MEMORY = "/dev/shm/"
# Plain vLLM leaves these in its folder for temporary files: sockets, the ranks' rendezvous, caches.
LEFT_BY_VLLM = ("????????-????-????-????-????????????", "vllm_dist_*", "torchinductor_*", ".libxsmm.*")


def speculation(**fields: Any) -> list[str]:
    config = {"method": "magicdec-self", "num_speculative_tokens": "auto", **fields}
    return ["--speculative-config", json.dumps(config)]


@contextmanager
def serve_tiny(*options: str, fault: Path | None = None) -> Iterator[tuple[Server, "Footprint"]]:
    """Start a server with its own folder for temporary files, and yield it when it is healthy."""
    with tempfile.TemporaryDirectory(prefix="soak-server-") as folder:
        variables = {**ENVIRONMENT, "TMPDIR": folder, **({engines.FAULT: str(fault)} if fault else {})}
        environment = engines.environment(**variables)
        with serve(str(engines.MODEL), *OPTIONS, *options, environment=environment) as server:
            footprint = Footprint(Path(folder))
            footprint.note(server)
            yield server, footprint


def metrics_of(server: Server) -> dict[str, float]:
    """Return samples by name; failures also by stage, as in 'vllm:magicdec_failures_total:batch'."""
    found = Counter[str]()
    for sample in server.samples():
        stage = sample.labels.get("what")
        found[f"{sample.name}:{stage}" if stage else sample.name] += sample.value
    return dict(found)


class Footprint:
    """Processes, shared memory and temporary files of a server; `folder` has the temporary files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: set[psutil.Process] = set()
        self._shared: set[Path] = set()

    def note(self, server: Server) -> None:
        for process in processes_of(server):
            self._processes.add(process)
            with suppress(OSError):  # it has just ended
                lines = Path("/proc", str(process.pid), "maps").read_text().splitlines()
                names = (line.partition(SHARED_MEMORY)[2].strip() for line in lines)
                self._shared |= {Path(SHARED_MEMORY, name) for name in names if name}

    def left(self) -> list[str]:
        """Return whatever still exists, except for leftovers of plain vLLM."""
        processes = [f"process {one.pid}" for one in self._processes if is_alive(one)]
        segments = [str(path) for path in sorted(self._shared) if path.exists()]
        files = [
            path.name
            for path in sorted(self._folder.iterdir())
            if not any(path.match(pattern) for pattern in LEFT_BY_VLLM)
        ]
        return processes + segments + files

    def wait_until_gone(self, timeout_s: float) -> list[str]:
        deadline_s = time.monotonic() + timeout_s
        while (left := self.left()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return left


def processes_of(server: Server) -> list[psutil.Process]:
    """Return all processes of the server's session by process id."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == server.process.pid and is_alive(process):
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def lasting_processes(server: Server) -> dict[str, psutil.Process]:
    """Return the server's processes by role, without short-lived ones such as compilers."""
    roles = {"EngineCore": "engine core", "Worker": "worker", "resource_tracker": "resource tracker"}
    found = {}
    for process in processes_of(server):
        with suppress(psutil.Error):
            title = f"{process.name()} {' '.join(process.cmdline())}"
            role = next((role for part, role in roles.items() if part in title), None)
            if process.pid == server.process.pid:
                role = "server"
            if role is not None:
                found.setdefault(role, process)
    return found


@dataclass
class Watch:
    """Takes samples of a server's memory, file descriptors and gauges, and updates its footprint."""

    server: Server
    footprint: Footprint
    count: Callable[[], int]  # requests that have ended
    now_s: Callable[[], float]
    samples: list[dict[str, Any]] = field(default_factory=list)

    async def watch(self, every_s: float) -> None:
        while True:
            await self.take()
            await asyncio.sleep(every_s)

    async def take(self) -> dict[str, Any]:
        metrics = await asyncio.to_thread(metrics_of, self.server)
        self.footprint.note(self.server)
        rss_mb, num_fds = {}, {}
        for role, process in lasting_processes(self.server).items():
            with suppress(psutil.Error):
                rss_mb[role] = process.memory_info().rss / 1e6
                num_fds[role] = process.num_fds()
        sample = {
            "at_s": round(self.now_s(), 1),
            "answered": self.count(),
            **{name: metrics.get(metric, 0.0) for name, metric in GAUGES.items()},
            "rss_mb": rss_mb,
            "num_fds": num_fds,
        }
        self.samples.append(sample)
        return sample
