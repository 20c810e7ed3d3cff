# SPDX-License-Identifier: Apache-2.0
"""What a result was measured on."""

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

# What decides how fast a CPU attends and multiplies.
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def describe_machine() -> dict[str, str | int | float]:
    """Processor or GPU, memory and versions, for a result's JSON."""
    cpu = _cpu()
    kind = [cpu[name] for name in ("cpu family", "model", "stepping") if name in cpu]
    flags = cpu.get("flags", "").split()
    description: dict[str, str | int | float] = {
        "processor": cpu.get("model name", platform.machine()),
        "family_model_stepping": "/".join(kind),
        "instruction_sets": " ".join(name for name in INSTRUCTION_SETS if name in flags),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    # The GPU's kernel layer runs without vLLM, and CPUs have no FlashInfer.
    for package in ("vllm", "vllm-magicdec", "triton", "flashinfer-python"):
        try:
            description[package.replace("-", "_")] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties()
        description["gpu"] = gpu.name
        description["gpu_memory_gib"] = round(gpu.total_memory / 2**30, 1)
        description["cuda"] = torch.version.cuda or ""
        description["driver"] = _driver()
    return description


def device_of(machine: Mapping[str, Any]) -> str:
    """The GPU or processor of a description, in words."""
    return machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores"


def same_machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two descriptions are of the same device."""
    return all(one.get(name) == other.get(name) for name in ("processor", "cores", "gpu"))


def vllm_environment() -> dict[str, str]:
    """What this process tells vLLM by its environment."""
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}


def _driver() -> str:
    """Version of the NVIDIA driver, empty where nobody says."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


def _cpu() -> dict[str, str]:
    """What Linux says of its processors, by name; nothing elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
