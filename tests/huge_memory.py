# SPDX-License-Identifier: Apache-2.0
"""The share of a tensor's memory that may be in huge pages."""

import re
from pathlib import Path

import torch

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: ([a-z0-9 ]+)$", re.DOTALL | re.MULTILINE)


def share_in_huge_pages(memory: torch.Tensor) -> float:
    """Return the share of the tensor's storage advised to use huge pages; finding any is luck."""
    first, size = memory.untyped_storage().data_ptr(), memory.untyped_storage().nbytes()
    mappings = (found.groups() for found in _MAPPING.finditer(Path("/proc/self/smaps").read_text()))
    advised = (
        min(int(stop, 16), first + size) - max(int(start, 16), first)
        for start, stop, flags in mappings
        if "hg" in flags.split()
    )
    return sum(max(0, length) for length in advised) / size
