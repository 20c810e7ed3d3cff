# SPDX-License-Identifier: Apache-2.0
"""The KV cache in huge pages of the operating system (2 MiB on x86-64).

A KV head's keys of one block are 4 KiB or two, and blocks lie anywhere. So in pages of 4 KiB each of them
begins with a walk through the page tables, as slow as memory is; and in a virtual machine with two.
"""

import ctypes
import mmap
from pathlib import Path

import torch

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")


def on_demand() -> bool:
    """Whether this machine gives huge pages to those that ask, and to nobody else."""
    try:
        return "[madvise]" in (_SETTINGS / "enabled").read_text() and _size() > 0
    except (OSError, ValueError):
        return False


def _size() -> int:
    return int((_SETTINGS / "hpage_pmd_size").read_text())


def move_to_huge_pages(memory: torch.Tensor) -> bool:
    """Have zeros lie in huge pages, as far as they fill them; returns whether the system takes the advice.

    Args:
        memory: on a CPU where they are `on_demand`, new and all zeros: its pages are given back, and made
            anew.
    """
    storage, size = memory.untyped_storage(), _size()
    first = -(-storage.data_ptr() // size) * size
    length = (storage.data_ptr() + storage.nbytes()) // size * size - first
    if length <= 0:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if any(madvise(first, length, advice) for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTNEED)):
        return False
    # As before, memory that is not there is missed now and not in the middle of a request.
    memory.new_empty(0, dtype=torch.uint8).set_(storage).zero_()
    return True
