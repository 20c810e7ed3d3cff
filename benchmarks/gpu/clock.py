# SPDX-License-Identifier: Apache-2.0
"""How long a function takes: CUDA events around a replayed graph, or a clock on the wall of a CPU."""

import statistics
from collections.abc import Callable

import torch

from benchmarks.common.clock import seconds

MIN_FLUSH_BYTES = 256 * 2**20  # reading it takes longer than it takes to queue what is timed
CPU_FLUSH_BYTES = 64 * 2**20


class Clock:
    """Medians in microseconds, the caches flushed before every run.

    Args:
        device: where the functions run.
        repeats: runs that count.
        warmup: runs before them.
    """

    def __init__(self, device: torch.device, *, repeats: int, warmup: int) -> None:
        self._is_cuda = device.type == "cuda"
        self._repeats = repeats
        self._warmup = warmup
        flush_bytes = CPU_FLUSH_BYTES
        if self._is_cuda:
            flush_bytes = max(MIN_FLUSH_BYTES, 4 * torch.cuda.get_device_properties(device).L2_cache_size)
        self._flushed = torch.zeros(flush_bytes // 4, device=device)

    @property
    def description(self) -> dict[str, str | int]:
        return {
            "timer": "CUDA events around the replay of a CUDA graph" if self._is_cuda else "perf_counter",
            "repeats": self._repeats,
            "warmup": self._warmup,
            "flush_bytes": self._flushed.numel() * 4,
        }

    def median_us(self, function: Callable[[], object]) -> float:
        """Time a function that launches the same work at each call."""
        times = self._cuda_times_us(function) if self._is_cuda else self._cpu_times_us(function)
        return statistics.median(times[self._warmup :])

    def host_us(self, function: Callable[[], object], repeats: int) -> float:
        """The host's time for a function that finds the device idle."""
        times = []
        for _ in range(repeats):
            if self._is_cuda:
                torch.cuda.synchronize()
            times.append(1e6 * seconds(function))
        return statistics.median(times)

    def _flush(self) -> None:
        # Read, not written: lines that have to be written back would be paid for by what is timed.
        self._flushed.sum()

    def _cuda_times_us(self, function: Callable[[], object]) -> list[float]:
        graph = _capture(function)
        events = []
        for _ in range(self._warmup + self._repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush()
            start.record()
            graph.replay()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return [1000 * start.elapsed_time(end) for start, end in events]

    def _cpu_times_us(self, function: Callable[[], object]) -> list[float]:
        times = []
        for _ in range(self._warmup + self._repeats):
            self._flush()
            times.append(1e6 * seconds(function))
        return times


def _capture(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    # What is compiled or allocated at a first call must not be captured.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph
