# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's V2 runner, whose kernels are Triton's, run on a CPU in Triton's interpreter.

vLLM turns Triton off where it finds no active driver. This adds one for the CPU before vLLM is imported;
with TRITON_INTERPRET=1 no kernel is ever compiled for it.
"""

import types
from typing import Any

import triton.backends
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


class _InterpreterDriver:
    @staticmethod
    def is_active() -> bool:
        return True


triton.backends.backends["cpu"] = types.SimpleNamespace(driver=_InterpreterDriver, compiler=None)

_create_masked_store = InterpreterBuilder.create_masked_store


def _store_with_boolean_mask(self: Any, pointers: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
    """The interpreter's `&` of a block and a scalar is an integer array, which its store refuses."""
    return _create_masked_store(
        self, pointers, value, TensorHandle(mask.data.astype(bool), mask.dtype), cache_policy
    )


InterpreterBuilder.create_masked_store = _store_with_boolean_mask
