# SPDX-License-Identifier: Apache-2.0
"""The KV cache in huge pages of the operating system (2 MiB on x86-64).

A KV head's keys of one block are 4 or 8 KiB at random addresses, so with pages of 4 KiB each block costs a
page-table walk, and two in a virtual machine.
"""

import ctypes
import mmap
from pathlib import Path

import torch

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")


def on_demand() -> bool:
    """Whether the system provides transparent huge pages on request only."""
    try:
        return "[madvise]" in (_SETTINGS / "enabled").read_text() and _size() > 0
    except (OSError, ValueError):
        return False


def _size() -> int:
    return int((_SETTINGS / "hpage_pmd_size").read_text())


def move_to_huge_pages(memory: torch.Tensor) -> bool:
    """Reallocate the whole huge pages within new, zeroed CPU memory; return whether the system agrees."""
    storage, size = memory.untyped_storage(), _size()
    first = -(-storage.data_ptr() // size) * size
    length = (storage.data_ptr() + storage.nbytes()) // size * size - first
    if length <= 0:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if any(madvise(first, length, advice) for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTNEED)):
        return False
    # Touch all pages, so that missing memory fails here and not during a request.
    memory.new_empty(0, dtype=torch.uint8).set_(storage).zero_()
    return True
