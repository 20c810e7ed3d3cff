# SPDX-License-Identifier: Apache-2.0
"""What of this process's memory lies in huge pages."""

import re
from pathlib import Path

import torch

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*?^AnonHugePages: +(\d+) kB", re.DOTALL | re.MULTILINE)


def bytes_in_huge_pages(memory: torch.Tensor) -> int:
    """Of the mappings that hold the tensor's storage, as Linux counts them."""
    first = memory.untyped_storage().data_ptr()
    end = first + memory.untyped_storage().nbytes()
    return sum(
        1024 * int(kib)
        for start, stop, kib in (found.groups() for found in _MAPPING.finditer(_mappings()))
        if int(start, 16) < end and int(stop, 16) > first
    )


def _mappings() -> str:
    return Path("/proc/self/smaps").read_text()
