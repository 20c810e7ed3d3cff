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
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import REGISTRY, Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")

FAILURES_METRIC = "vllm:magicdec_draft_failures"
_FAILURES_HELP = "Rounds in which drafting failed and the step went on without useful drafts."


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


class DraftFailures:
    """Counts rounds whose drafting raised, and logs the first one with its trace.

    Args:
        metrics_dir: a directory that the front end reads; None counts in this process alone.
    """

    def __init__(self, metrics_dir: str | None) -> None:
        self._total = 0
        self._file: MmapedDict | None = None
        # vLLM's own directory, if it opened one: then its endpoint reads nothing else.
        directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR", metrics_dir) if metrics_dir else None
        if directory and Path(directory).is_dir():
            self._file = MmapedDict(str(Path(directory) / f"counter_magicdec_{os.getpid()}.db"))
            self._write()

    def count(self) -> None:
        """Record a failure; call it where the exception is handled."""
        self._total += 1
        if self._total == 1:
            logger.exception(
                "Drafting failed; the step goes on without drafts and no request is lost. Further "
                "failures are only counted, in %s_total.",
                FAILURES_METRIC,
            )
        self._write()

    def _write(self) -> None:
        if self._file is not None:
            key = mmap_key(FAILURES_METRIC, f"{FAILURES_METRIC}_total", [], [], _FAILURES_HELP)
            self._file.write_value(key, float(self._total), 0.0)
