# SPDX-License-Identifier: Apache-2.0
"""Fix for vLLM 0.32.0 that allows a second CPU engine in a process that has loaded Numba.

Without Triton, a starting CPU worker inspects every attribute of all loaded modules for kernels to replace
(`vllm.triton_utils.dispatcher`). One object of llvmlite, which Numba uses, returns a wrapped function for
`__dict__`, and the worker fails. With one engine per process, Numba is loaded later.
"""

from collections.abc import Callable
from typing import Any

from vllm_magicdec.hooking import instead


def patch() -> None:
    """Hide `__dict__` of llvmlite's library; call it in the worker."""
    from llvmlite.binding import ffi

    library_class = type(ffi.lib)
    original = library_class.__getattr__
    if hasattr(original, "__wrapped__"):
        return

    library_class.__getattr__ = instead(_find)(library_class, original)


def _find(original: Callable[..., Any], library: Any, name: str) -> Any:
    if name == "__dict__":
        raise AttributeError(name)
    return original(library, name)
