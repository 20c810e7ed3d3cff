# SPDX-License-Identifier: Apache-2.0
"""A server's memory, file descriptors and gauges over time."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from .asking import TIMEOUT_S
from .servers import Footprint, Server, processes_of

GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "preemptions": "vllm:num_preemptions_total",
}
# There where the plugin looks up, which 'auto' does where it can.
GAUGES_OF_PASSES = {
    "passes": "vllm:magicdec_lookup_passes_total",
    "stood": "vllm:magicdec_pass_accepted_tokens_total",
}
_PLUGIN = "vllm:magicdec_"


@dataclass(frozen=True)
class Sample:
    """What a server had at a time."""

    at_s: float  # since the run began
    answered: int  # requests
    gauges: dict[str, float]
    rss_mb: dict[str, float]  # by process, in units of 10^6 bytes
    num_fds: dict[str, int]
    failures: dict[str, float]  # of the plugin's counters, those that count failures and pauses


class Watch:
    """Takes samples until it is told to end.

    Args:
        server: that is watched.
        footprint: of the server, noted as well.
        count: requests that have been answered.
        now_s: seconds since the run began.
    """

    def __init__(
        self, server: Server, footprint: Footprint, count: Callable[[], int], now_s: Callable[[], float]
    ) -> None:
        self._server = server
        self._footprint = footprint
        self._count = count
        self._now_s = now_s
        self.samples: list[Sample] = []
        self.num_missed = 0

    async def watch(self, every_s: float) -> None:
        """Until it is cancelled; samples that do not come are counted."""
        while True:
            try:
                await self.take()
            except urllib.error.HTTPError:
                raise
            except OSError:  # in time; virtual machines may stand still for a minute
                self.num_missed += 1
            await asyncio.sleep(every_s)

    async def take(self) -> Sample:
        """One sample; of processes that have not ended meanwhile."""
        metrics = await asyncio.to_thread(self._server.metrics)
        self._footprint.note(self._server)
        memory = {name: _memory(one) for name, one in named_processes(self._server).items()}
        known = {name: one for name, one in memory.items() if one is not None}
        sample = Sample(
            at_s=self._now_s(),
            answered=self._count(),
            gauges={
                **{name: metrics[metric] for name, metric in GAUGES.items()},
                **{name: metrics.get(metric, 0.0) for name, metric in GAUGES_OF_PASSES.items()},
            },
            rss_mb={name: one.rss_mb for name, one in known.items()},
            num_fds={name: one.num_fds for name, one in known.items()},
            failures=await asyncio.to_thread(failures_of, self._server),
        )
        self.samples.append(sample)
        return sample


def failures_of(server: Server) -> dict[str, float]:
    """What the plugin counts of failures, by what failed (`failures:lookup`), and of pauses."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=TIMEOUT_S) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(_PLUGIN) and sample.name.endswith(("failures_total", "pauses_total")):
                what = sample.labels.get("what")
                name = sample.name.removeprefix(_PLUGIN).removesuffix("_total")
                found[f"{name}:{what}" if what else name] = sample.value
    return found


def named_processes(server: Server) -> dict[str, psutil.Process]:
    """The server's processes by what they are: 'server', 'engine core', 'worker', ...

    What they start for a moment, such as a compiler, is left out.
    """
    named: dict[str, psutil.Process] = {}
    for process in sorted(processes_of(server), key=lambda one: one.pid):
        role = _role(process, server)
        if role is not None:
            number = 1 + sum(name.startswith(role) for name in named)
            named[role if number == 1 else f"{role} {number}"] = process
    return named


def _role(process: psutil.Process, server: Server) -> str | None:
    if process.pid == server.process.pid:
        return "server"
    try:
        name, command = process.name(), " ".join(process.cmdline())
    except psutil.Error:
        return None
    for part, role in (("EngineCore", "engine core"), ("Worker", "worker")):
        if part in name:
            return role
    return "resource tracker" if "resource_tracker" in command else None


@dataclass(frozen=True)
class _Memory:
    """In units of 10^6 bytes."""

    rss_mb: float
    num_fds: int


def _memory(process: psutil.Process) -> _Memory | None:
    """None: the process has ended."""
    try:
        return _Memory(process.memory_info().rss / 1e6, process.num_fds())
    except psutil.Error:
        return None


def as_rows(samples: list[Sample], most: int = 120) -> list[dict[str, Any]]:
    """For a record: evenly chosen samples, the last among them."""
    step = max(1, -(-len(samples) // most))
    chosen = samples[::-1][::step][::-1]
    return [
        {
            "at_s": round(sample.at_s, 1),
            "answered": sample.answered,
            **sample.gauges,
            "rss_mb": {name: round(value, 2) for name, value in sample.rss_mb.items()},
            "num_fds": sample.num_fds,
        }
        for sample in chosen
    ]
