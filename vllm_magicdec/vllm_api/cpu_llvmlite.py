# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM 0.32.0 start another CPU engine in a process that has loaded Numba.

Without Triton, a CPU worker that starts looks into every attribute of every loaded module for kernels to
replace (`vllm.triton_utils.dispatcher`). llvmlite, which Numba compiles with, has one that answers for
`__dict__` with a wrapped function instead of a dictionary, and the worker fails. A process that holds one
engine loads Numba when its worker has started, and never notices.
"""

import functools
from typing import Any

_MARK = "_vllm_magicdec_original"


def mend() -> None:
    """Let llvmlite's library have no `__dict__`; call it in the worker."""
    from llvmlite.binding import ffi

    kind = type(ffi.lib)
    original = kind.__getattr__
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def find(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return original(self, name)

    setattr(find, _MARK, original)
    kind.__getattr__ = find
