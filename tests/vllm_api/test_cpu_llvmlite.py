# SPDX-License-Identifier: Apache-2.0
"""vLLM's search for kernels skips llvmlite's library, and Numba still works."""

from llvmlite.binding import ffi
from numba import njit
from vllm.triton_utils.dispatcher import _rebind_kernels

from vllm_magicdec.vllm_api import cpu_llvmlite


def test_a_worker_starts_after_numba_was_loaded():
    cpu_llvmlite.patch()
    cpu_llvmlite.patch()
    assert not hasattr(ffi.lib, "__dict__")
    _rebind_kernels([])
    assert njit(lambda number: number + 1)(1) == 2
