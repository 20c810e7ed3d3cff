# SPDX-License-Identifier: Apache-2.0
"""What a result was measured on."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch


def describe_machine() -> dict[str, str | int | float]:
    """Processor or GPU, memory and versions, for a result's JSON."""
    description: dict[str, str | int | float] = {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": version("vllm"),
        "vllm_magicdec": version("vllm-magicdec"),
    }
    if torch.cuda.is_available():
        description["gpu"] = torch.cuda.get_device_name()
        description["cuda"] = torch.version.cuda or ""
    return description


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
