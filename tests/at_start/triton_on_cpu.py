# SPDX-License-Identifier: Apache-2.0
"""Lets Triton's kernels run in its interpreter: vLLM turns Triton off where it finds no active driver."""

import types
from typing import Any

import numpy as np
import triton.backends
import triton.language as tl
from triton.language.extra import libdevice
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

_create_dot = InterpreterBuilder.create_dot


def _dot_of_floats(self: Any, a: TensorHandle, b: TensorHandle, *args: Any) -> Any:
    """The interpreter of Triton 3.9 keeps bfloat16 as integers, and its dot product multiplies those."""
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _create_dot(self, a, b, *args)


InterpreterBuilder.create_dot = _dot_of_floats

_create_fp_to_fp = InterpreterBuilder.create_fp_to_fp


def _to_e4m3(self: Any, value: TensorHandle, dtype: tl.dtype, rounding: Any) -> Any:
    """The interpreter of Triton 3.9 drops the carry where rounding to fp8 reaches a power of two."""
    if value.dtype.scalar != tl.float32 or dtype.scalar != tl.float8e4nv:
        return _create_fp_to_fp(self, value, dtype, rounding)
    import torch  # slow, and this module is loaded in every process

    rounded = torch.tensor(value.data).to(torch.float8_e4m3fn)
    return TensorHandle(rounded.view(torch.uint8).numpy(), dtype.scalar)


InterpreterBuilder.create_fp_to_fp = _to_e4m3


def _log1p(x: tl.tensor) -> tl.tensor:
    """The interpreter has no device library; vLLM's rejection kernel asks for this of it."""
    with np.errstate(divide="ignore", invalid="ignore"):  # tl.where drops what is not a number
        return tl.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)


libdevice.log1p = _log1p
