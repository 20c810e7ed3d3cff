# SPDX-License-Identifier: Apache-2.0
"""Device specifications by name, and the measurement of the present device.

FLOP/s are dense bf16. Interconnect bandwidth is one direction: half of what data sheets state. Their GB of
device memory are taken as GiB; drivers report 1 % (H100, H200) to 7 % (L40 with ECC) less.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_magicdec.planner.console import find_by_name
from vllm_magicdec.planner.performance import GIB, Hardware

if TYPE_CHECKING:
    import torch

THIS_MACHINE = "this"
_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_MI300X = "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
_COPY_BYTES = 2**29  # well above any cache
_MATMUL_SIZE = {"cuda": 8192, "cpu": 2048}
_MIN_MATMUL_SIZE = 512
_LONG_MATMUL_S = 0.1  # long enough to measure the rate
_REPEATS = 5

HARDWARE = {
    device.name: device
    for device in (
        Hardware("A100", 80, 2.039e12, 312e12, 300e9, f"{_NVIDIA}/a100/ (80GB SXM)"),
        Hardware("H100", 80, 3.35e12, 989e12, 450e9, f"{_NVIDIA}/h100/ (SXM)"),
        Hardware("H200", 141, 4.8e12, 989e12, 450e9, f"{_NVIDIA}/h200/ (SXM)"),
        Hardware("L40", 48, 0.864e12, 181e12, 32e9, f"{_NVIDIA}/l40/ (PCIe 4.0 x16)"),
        Hardware("B200", 180, 8e12, 2.25e15, 900e9, f"{_NVIDIA}/dgx-b200/ (an eighth of a DGX)"),
        Hardware("MI300X", 192, 5.3e12, 1307.4e12, 448e9, _MI300X),
    )
}


@contextmanager
def worker_threads() -> Iterator[int]:
    """Set torch's CPU threads to the number that vLLM's worker uses, and yield it.

    vLLM's CPU backend reserves a core for its scheduler (VLLM_CPU_NUM_OF_RESERVED_CPU).
    """
    import torch  # here, because the table above needs no torch and its import takes seconds

    all_threads = torch.get_num_threads()
    threads = max(1, all_threads - int(os.environ.get("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")))
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(all_threads)


def measure_this_machine() -> Hardware:
    """Measure copy bandwidth and bf16 matmul FLOP/s of torch's current device, in about a second.

    These are achieved rates, so memory and compute efficiency are 1; vLLM's attention achieves less on CPUs
    (docs/performance.md). A CPU is measured with `worker_threads`.
    """
    import torch

    with worker_threads() as threads:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            name = torch.cuda.get_device_name()
            memory = torch.cuda.get_device_properties(device).total_memory
        else:
            name = f"CPU with {threads} thread{'s' if threads > 1 else ''}"
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Hardware(
            name=name,
            memory_gib=memory / GIB,
            memory_bytes_per_s=copy_bytes_per_s(device),
            flops=matmul_flops(device, torch.bfloat16),
            interconnect_bytes_per_s=0.0,
            source="measured here",
        )


def copy_bytes_per_s(device: str) -> float:
    """Measure the bytes that a copy beyond any cache reads and writes per second: the best of several runs.

    `device` is "cpu", with torch's current number of threads, or "cuda".
    """
    import torch

    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best_s(device, lambda: target.copy_(source))


def matmul_flops(device: str, dtype: "torch.dtype") -> float:
    """Measure FLOP/s of a large product with a transposed weight: the best of several runs.

    `device` is as for `copy_bytes_per_s`. The size doubles until one product takes 0.1 s, because the full
    size takes seconds on CPUs without instructions for the dtype.
    """
    import torch

    size = _MIN_MATMUL_SIZE
    while True:
        matrix = torch.randn(size, size, device=device).to(dtype)
        product = torch.empty_like(matrix)
        seconds = _best_s(device, lambda: torch.mm(matrix, matrix.T, out=product))  # noqa: B023
        if size >= _MATMUL_SIZE[device] or seconds >= _LONG_MATMUL_S:
            return 2 * size**3 / seconds
        size *= 2


def _best_s(device: str, work: Callable[[], object]) -> float:
    """Return the seconds of the fastest run after a warm-up."""
    import torch

    def run_s() -> float:
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    run_s()
    return min(run_s() for _ in range(_REPEATS))


def find_hardware(name: str) -> Hardware:
    """Return the device of that name, or measure this machine; raise UserError if there is none."""
    if name.lower() == THIS_MACHINE:
        return measure_this_machine()
    return find_by_name(name, HARDWARE, "GPU", [*HARDWARE, f"'{THIS_MACHINE}' for this machine"])
