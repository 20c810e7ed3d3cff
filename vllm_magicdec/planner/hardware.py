# SPDX-License-Identifier: Apache-2.0
"""Devices by name, with the data sheet that says so, and a measurement of the one that is there.

FLOP/s are dense bf16. Data sheets count a link in both directions, so half of it is here; their GB of
device memory are taken as GiB, of which drivers report 1 % (H100, H200) to 7 % (L40 with ECC) less.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_magicdec.planner.console import look_up
from vllm_magicdec.planner.performance import GIB, Hardware

if TYPE_CHECKING:
    import torch

THIS_MACHINE = "this"
_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_MI300X = "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
_COPY_BYTES = 2**29  # well above any cache
_MATMUL_SIZE = {"cuda": 8192, "cpu": 2048}
_LEAST_MATMUL_SIZE = 512
_LONG_MATMUL_S = 0.1  # says the rate as well as a larger one
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
    """Let torch compute with as many CPU threads as vLLM's worker does: one per core, but for the core that
    vLLM's CPU backend keeps for its scheduler (VLLM_CPU_NUM_OF_RESERVED_CPU)."""
    import torch  # the table above needs no torch, and its import takes seconds

    all_threads = torch.get_num_threads()
    threads = max(1, all_threads - int(os.environ.get("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")))
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(all_threads)


def measure_this_machine() -> Hardware:
    """Copy bandwidth and bf16 matmul FLOP/s of torch's current device: the best of several runs.

    Takes about a second. What is measured is reached, so efficiencies of 1 belong to it, except that vLLM's
    attention reaches less on CPUs (docs/performance.md). A CPU is measured with `worker_threads`.
    """
    with worker_threads() as threads:
        return _measure(threads)


def copy_bytes_per_s(device: str) -> float:
    """Bytes that a copy reads and writes per second, well above any cache; the best of several runs.

    Args:
        device: "cpu", with as many threads as torch has now, or "cuda".
    """
    import torch

    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best_s(device, lambda: target.copy_(source))


def matmul_flops(device: str, dtype: "torch.dtype") -> float:
    """FLOP/s of a large matrix product, as of a layer: by the rows of a weight; the best of several runs.

    The size doubles until a product takes long enough: the full size takes seconds where a CPU has no
    instructions for the dtype.

    Args:
        device: "cpu", with as many threads as torch has now, or "cuda".
        dtype: of the factors and the product.
    """
    import torch

    size = _LEAST_MATMUL_SIZE
    while True:
        matrix = torch.randn(size, size, device=device).to(dtype)
        product = torch.empty_like(matrix)
        seconds = _best_s(device, lambda: torch.mm(matrix, matrix.T, out=product))  # noqa: B023
        if size >= _MATMUL_SIZE[device] or seconds >= _LONG_MATMUL_S:
            return 2 * size**3 / seconds
        size *= 2


def _measure(threads: int) -> Hardware:
    import torch

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


def _best_s(device: str, work: Callable[[], object]) -> float:
    """The shortest of several runs, after one for first touch and the choice of kernels."""
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
    """The device of that name, or this machine measured.

    Raises:
        UserError: there is none.
    """
    if name.lower() == THIS_MACHINE:
        return measure_this_machine()
    return look_up(name, HARDWARE, "GPU", [*HARDWARE, f"'{THIS_MACHINE}' for this machine"])
