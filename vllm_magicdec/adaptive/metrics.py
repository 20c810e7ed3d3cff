# SPDX-License-Identifier: Apache-2.0
"""Counters that workers raise and the front end's Prometheus endpoint shows.

Workers and the HTTP server are different processes. `prometheus_client` has a file format for exactly
that (one memory-mapped file per process, merged when scraped). vLLM uses it only when it starts several
API servers; otherwise the plugin opens a directory of its own and names it in the configuration that
vLLM hands to its workers. Workers on another host (Ray) log their failures but are not counted.
"""

import atexit
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from prometheus_client import REGISTRY, Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from vllm.logger import init_logger

from vllm_magicdec.adaptive.controller import Forecast

logger = init_logger(f"vllm.{__name__}")

_DRAFT_COUNTERS = {
    "draft_failures": "Rounds whose drafting failed.",
    "draft_pauses": "Pauses of drafting because it had failed several times.",
    "paused_rounds": "Rounds without drafts in these pauses.",
}
_FAILURES_METRIC = "vllm:magicdec_failures"
_FAILURES_HELP = "Failures that cost speed alone, by what failed."
_LOOKUP_COUNTERS = {
    "lookup_rounds": "Rounds drafted with lookups.",
    "lookup_passes": "Passes of the draft in these rounds.",
    "lookup_tokens": "Tokens that were looked up and read by the draft.",
    "lookup_accepted_tokens": "Looked-up tokens that the draft drew itself.",
    "lookup_unread_tokens": "Looked-up tokens that were drafts without a pass.",
    "lookup_unread_accepted_tokens": "Of these, those that the text went on with.",
    "lookup_failures": "Rounds in which a lookup failed.",
    "lookup_pauses": "Pauses of lookups because they had failed several times.",
    "cut_tokens": "Drafts that were too unlikely to be verified.",
}


class _WorkerMetrics(Collector):
    """Merges the files of all workers of all engines that this process started."""

    def __init__(self) -> None:
        self._dirs: list[Path] = []
        self._owner = os.getpid()

    def open_dir(self) -> str:
        if not self._dirs:
            REGISTRY.register(self)
            atexit.register(self._remove_dirs)
        directory = tempfile.mkdtemp(prefix="vllm-magicdec-")
        self._dirs.append(Path(directory))
        return directory

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        files = [str(file) for directory in self._dirs for file in directory.glob("*.db")]
        return MultiProcessCollector.merge(files)

    def _remove_dirs(self) -> None:
        if os.getpid() == self._owner:  # not in a forked worker
            for directory in self._dirs:
                shutil.rmtree(directory, ignore_errors=True)


_worker_metrics = _WorkerMetrics()


def open_metrics_dir() -> str:
    """A new directory whose counters this process's default Prometheus registry shows until it ends."""
    return _worker_metrics.open_dir()


class _MetricsFile:
    """This process's values of some metrics, for the front end to read.

    Args:
        metrics_dir: a directory that the front end reads; None keeps the values in this process.
        kind: how `prometheus_client` merges the files of several processes.
        name: of the file, which must be the process's own.
    """

    def __init__(self, metrics_dir: str | None, kind: str, name: str) -> None:
        self._file: MmapedDict | None = None
        # vLLM's own directory, if it opened one: then its endpoint reads nothing else.
        directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR", metrics_dir) if metrics_dir else None
        if directory and Path(directory).is_dir():
            self._file = MmapedDict(str(Path(directory) / f"{kind}_{name}{os.getpid()}.db"))

    def write(
        self,
        metric: str,
        sample: str,
        value: float,
        help_text: str,
        labels: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Set the value of one sample of a metric."""
        if self._file is not None:
            key = mmap_key(metric, sample, list(labels), list(labels.values()), help_text)
            self._file.write_value(key, value, time.time())


class Failures:
    """Counts what failed in a part of the plugin, by what it was; none of it costs more than speed.

    Args:
        metrics_dir: a directory that the front end reads; None counts in this process alone.
        part: tells counters of one process apart.
    """

    def __init__(self, metrics_dir: str | None, part: str) -> None:
        self.totals = Counter[str]()
        self._file = _MetricsFile(metrics_dir, "counter", f"magicdec_{part}_failures_")

    def count(self, what: str) -> None:
        """Record a failure."""
        self.totals[what] += 1
        sample = f"{_FAILURES_METRIC}_total"
        self._file.write(_FAILURES_METRIC, sample, self.totals[what], _FAILURES_HELP, {"what": what})


class DraftFailures:
    """Counts rounds that failures left without useful drafts.

    Args:
        metrics_dir: as for `Failures`.
    """

    def __init__(self, metrics_dir: str | None) -> None:
        self.by_stage = Failures(metrics_dir, "draft")
        self._file = _MetricsFile(metrics_dir, "counter", "magicdec_")
        self.totals = dict.fromkeys(_DRAFT_COUNTERS, 0)
        for name in _DRAFT_COUNTERS:
            self._show(name)

    def count(self, stage: str) -> None:
        """Record a round whose drafting failed, and at which stage."""
        self.by_stage.count(stage)
        self._count("draft_failures")

    def count_pause(self) -> None:
        """Record that drafting pauses."""
        self._count("draft_pauses")

    def count_paused_round(self) -> None:
        """Record a round of a pause."""
        self._count("paused_rounds")

    def _count(self, name: str) -> None:
        self.totals[name] += 1
        self._show(name)

    def _show(self, name: str) -> None:
        metric = f"vllm:magicdec_{name}"
        self._file.write(metric, f"{metric}_total", float(self.totals[name]), _DRAFT_COUNTERS[name])


class LookupCounters:
    """What became of looked-up tokens, and of drafts that were not worth verifying.

    Args:
        metrics_dir: as for `Failures`.
    """

    def __init__(self, metrics_dir: str | None) -> None:
        self._failures = Failures(metrics_dir, "lookup")
        self._file = _MetricsFile(metrics_dir, "counter", "magicdec_lookup_")
        self.totals = dict.fromkeys(_LOOKUP_COUNTERS, 0)
        for name in _LOOKUP_COUNTERS:
            self._show(name)

    def count_round(self, num_passes: int, num_looked_up: int, num_accepted: int) -> None:
        """Record a round.

        Args:
            num_passes: of the draft over the batch.
            num_looked_up: tokens of all requests that were read in them.
            num_accepted: of these, those that the draft drew itself.
        """
        self._count(
            lookup_rounds=1,
            lookup_passes=num_passes,
            lookup_tokens=num_looked_up,
            lookup_accepted_tokens=num_accepted,
        )

    def count_unread(self, num_tokens: int, num_accepted: int) -> None:
        """Record a request's looked-up drafts that the draft had not read, once they are verified."""
        self._count(lookup_unread_tokens=num_tokens, lookup_unread_accepted_tokens=num_accepted)

    def count_cut(self, num_tokens: int) -> None:
        """Record drafts of a request that are not verified."""
        self._count(cut_tokens=num_tokens)

    def count_failure(self) -> None:
        """Record a round in which a lookup failed."""
        self._failures.count("lookup")
        self._count(lookup_failures=1)

    def count_pause(self) -> None:
        """Record that lookups pause."""
        self._count(lookup_pauses=1)

    def _count(self, **counts: int) -> None:
        for name, count in counts.items():
            if count:
                self.totals[name] += count
                self._show(name)

    def _show(self, name: str) -> None:
        metric = f"vllm:magicdec_{name}"
        self._file.write(metric, f"{metric}_total", float(self.totals[name]), _LOOKUP_COUNTERS[name])


class SpeculationGauges:
    """What the controller of `auto` is doing.

    Args:
        metrics_dir: as for `Failures`.
        budget: K/V entries that a draft step reads per request at first, at most.
    """

    def __init__(self, metrics_dir: str | None, budget: int) -> None:
        self._gauges = _MetricsFile(metrics_dir, "gauge_mostrecent", "magicdec_")
        self._counters = _MetricsFile(metrics_dir, "counter", "magicdec_controller_")
        self._set_budget(budget)

    def set(self, forecast: Forecast, achieved_speedup: float, num_switches: int) -> None:
        """Show the present choice."""
        drafts, budget = forecast.choice
        self._set("num_speculative_tokens", drafts, "Drafts per round chosen at present.")
        if drafts:
            self._set_budget(budget)
        self._set("draft_share", forecast.draft_share, "Draft steps' share of a round's time.")
        self._set("predicted_speedup", forecast.speedup, "Expected speed over plain decoding.")
        self._set("achieved_speedup", achieved_speedup, "Speed over plain decoding of the latest steps.")
        name = "vllm:magicdec_switches"
        self._counters.write(name, f"{name}_total", num_switches, "Changes of the choice.")

    def _set_budget(self, budget: int) -> None:
        self._set("draft_kv_budget", budget, "K/V entries that a draft step reads per request, at most.")

    def _set(self, name: str, value: float, help_text: str) -> None:
        metric = f"vllm:magicdec_{name}"
        self._gauges.write(metric, metric, value, help_text)
