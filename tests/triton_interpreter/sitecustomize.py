# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's V2 runner, whose kernels are Triton's, run on a CPU in Triton's interpreter.

vLLM turns Triton off where it finds no active driver. This adds one for the CPU before vLLM is imported;
with TRITON_INTERPRET=1 no kernel is ever compiled for it.
"""

import types

import triton.backends


class _InterpreterDriver:
    @staticmethod
    def is_active() -> bool:
        return True


triton.backends.backends["cpu"] = types.SimpleNamespace(driver=_InterpreterDriver, compiler=None)
