# SPDX-License-Identifier: Apache-2.0
"""Describe the machine of a measurement."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vllm_magicdec.planner.hardware import copy_bytes_per_s, matmul_flops, worker_threads

# Instruction sets that decide a CPU's speed, the fastest last.
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")

# Cloud providers hide the names of processors: vendor, family, models.
_MICROARCHITECTURES = (
    ("AuthenticAMD", 23, range(0x30), "Zen"),
    ("AuthenticAMD", 23, range(0x30, 0x100), "Zen 2"),
    ("AuthenticAMD", 25, (*range(0x10), *range(0x20, 0x60)), "Zen 3"),
    ("AuthenticAMD", 25, (*range(0x10, 0x20), *range(0x60, 0x100)), "Zen 4"),
    ("AuthenticAMD", 26, range(0x100), "Zen 5"),
    ("GenuineIntel", 6, (0x55,), "Skylake or Cascade Lake"),
    ("GenuineIntel", 6, (0x6A, 0x6C), "Ice Lake"),
    ("GenuineIntel", 6, (0x8F,), "Sapphire Rapids"),
    ("GenuineIntel", 6, (0xCF,), "Emerald Rapids"),
    ("GenuineIntel", 6, (0xAD, 0xAE), "Granite Rapids"),
)
_CPUS = Path("/sys/devices/system/cpu/cpu0")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Run in a separate process, because a library cannot be unloaded.
_PRINT_KERNELS = """
import re
from vllm.platforms import current_platform
current_platform.import_kernels()
print(*sorted(set(re.findall(r"/vllm/(_\\w+)[.\\w]*\\.so", open("/proc/self/maps").read()))))
"""


def describe_machine() -> dict[str, str | int | float]:
    """Return processor or GPU, measured rates, memory and versions for a record, in some seconds.

    Call it before the measurement, because it includes the load average.
    """
    cpu = _cpu()
    family = [cpu[name] for name in ("cpu family", "model", "stepping") if name in cpu]
    description: dict[str, str | int | float] = {
        "load_average": os.getloadavg()[0],
        "processor": cpu.get("model name", platform.machine()),
        "family_model_stepping": "/".join(family),
        "microarchitecture": microarchitecture(cpu),
        "instruction_sets": " ".join(n for n in INSTRUCTION_SETS if n in cpu.get("flags", "").split()),
        "l1d": _cache(1),
        "l2": _cache(2),
        "l3": _cache(3),
        "transparent_huge_pages": _huge_pages(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **_rates(),
    }
    for package in ("vllm", "vllm-magicdec", "triton", "flashinfer-python", "zentorch"):
        try:
            description[package.replace("-", "_")] = version(package)
        except PackageNotFoundError:
            continue
    if "vllm" in description:
        description["vllm_kernels"] = _vllm_kernels()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # frees the buffers of the rates for engines of other processes
        gpu = torch.cuda.get_device_properties()
        description["gpu"] = gpu.name
        description["gpu_memory_gib"] = round(gpu.total_memory / 2**30, 1)
        description["cuda"] = torch.version.cuda or ""
        description["driver"] = _driver()
    return description


def device_of(machine: Mapping[str, Any]) -> str:
    """Name the GPU or processor of a description, such as 'Zen 3, AVX2, 2 cores'."""
    if "gpu" in machine:
        return machine["gpu"]
    # The first records have the processor only.
    name = machine.get("microarchitecture", machine["processor"])
    best = machine.get("instruction_sets", "").upper().split()[-1:]
    return ", ".join([name, *best, f"{machine['cores']} cores"])


def same_machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two descriptions are of the same type of device."""
    names = ("processor", "family_model_stepping", "cores", "gpu")
    return all(one.get(name) == other.get(name) for name in names)


def microarchitecture(cpu: Mapping[str, str]) -> str:
    """Name a processor's microarchitecture ('Zen 3'), or its family and model if unknown.

    Args:
        cpu: fields of /proc/cpuinfo.
    """
    if "cpu family" not in cpu or "model" not in cpu:
        return platform.machine()
    family, model = int(cpu["cpu family"]), int(cpu["model"])
    for vendor, known_family, models, name in _MICROARCHITECTURES:
        if cpu.get("vendor_id") == vendor and family == known_family and model in models:
            return name
    return f"{cpu.get('vendor_id', '')} family {family} model {model}".strip()


def vllm_environment() -> dict[str, str]:
    """Return vLLM's environment variables."""
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}


def measured_rates() -> dict[str, float]:
    """Measure copy bandwidth and matrix products of torch's device, on a CPU with torch's threads."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "copy_gb_per_s": round(copy_bytes_per_s(device) / 1e9, 1),
        "bfloat16_gflops": round(matmul_flops(device, torch.bfloat16) / 1e9, 1),
        "float32_gflops": round(matmul_flops(device, torch.float32) / 1e9, 1),
    }


def _rates() -> dict[str, float]:
    with worker_threads() as threads:
        return {"worker_threads": threads, **measured_rates()}


def _vllm_kernels() -> str:
    command = [sys.executable, "-c", _PRINT_KERNELS]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


def _cpu() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _cache(level: int) -> str:
    """Return the size of the first core's data cache as Linux writes it, or ''."""
    for folder in _CPUS.glob("cache/index*"):
        # Some virtual machines lack these files.
        files = (folder / name for name in ("level", "type", "size"))
        found, content, size = (file.read_text().strip() if file.exists() else "" for file in files)
        if found == str(level) and content != "Instruction":
            return size
    return ""


def _huge_pages() -> str:
    """Return 'always', 'madvise', 'never', or '' if unknown."""
    chosen = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text()) if _HUGE_PAGES.exists() else None
    return chosen[1] if chosen else ""
