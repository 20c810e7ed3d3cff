# SPDX-License-Identifier: Apache-2.0
"""Linear layers with weights of 4 or 8 bits on CPUs: packing, and the operator `vllm_magicdec::multiply`.

Weights are rounded to the nearest integer in groups of 32 inputs, with a scale and a minimum per group and
output. torch's `_weight_int4pack_mm_for_cpu` and `_weight_int8pack_mm` take two to three times as long for
up to 8 rows on a CPU with AVX2 (benchmarks/quantised_linear.py).
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

from vllm_magicdec.native.library import QUERY_TYPES, UnreadableError, find_kernel

BITS = {"int4": 4, "int8": 8}
_GROUP, _OUTPUTS, _STEP = 32, 16, 4  # as in quantised_linear.cpp


class _Call(ctypes.Structure):
    """`MagicdecLinear` in quantised_linear.h."""

    _fields_ = [
        ("input", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("type", ctypes.c_int32),
    ]


@functools.cache
def _kernel() -> Callable[[Any], int]:
    return find_kernel().multiply


def pack(weights: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantise the weights of a linear layer.

    Args:
        weights: [out_features, in_features], floating point.
        bits: 4 or 8.

    Returns:
        [ceil(out_features / 16), ceil(in_features / 32), 64 * bits + 64] uint8; see quantised_linear.cpp.
    """
    out_features, in_features = weights.shape
    padding = (0, -in_features % _GROUP, 0, -out_features % _OUTPUTS)
    grouped = torch.nn.functional.pad(weights.float(), padding).unflatten(1, (-1, _GROUP))
    # Rounded outwards, so that every weight lies between the minimum and the largest integer.
    minimum = _to_bfloat16(grouped.amin(2), upwards=False)
    scale = _to_bfloat16((grouped.amax(2) - minimum.float()) / (2**bits - 1), upwards=True)
    scale = torch.where(scale > 0, scale, 1.0)
    integers = ((grouped - minimum.float().unsqueeze(2)) / scale.float().unsqueeze(2)).round_()
    integers = integers.clamp_(0, 2**bits - 1).to(torch.uint8)
    # [tiles, groups, steps, outputs, inputs of a step]
    by_step = integers.unflatten(0, (-1, _OUTPUTS)).unflatten(3, (-1, _STEP)).permute(0, 2, 3, 1, 4)
    if bits == 4:
        by_step = by_step[:, :, 0::2] | (by_step[:, :, 1::2] << 4)

    def as_bytes(numbers: torch.Tensor) -> torch.Tensor:
        by_tile = numbers.to(torch.bfloat16).unflatten(0, (-1, _OUTPUTS)).transpose(1, 2)
        return by_tile.contiguous().view(torch.uint8)

    return torch.cat([by_step.flatten(2), as_bytes(scale), as_bytes(minimum)], dim=2)


def _to_bfloat16(numbers: torch.Tensor, *, upwards: bool) -> torch.Tensor:
    nearest = numbers.to(torch.bfloat16)
    is_beyond = nearest.float() < numbers if upwards else nearest.float() > numbers
    limit = torch.full_like(nearest, torch.inf if upwards else -torch.inf)
    return torch.where(is_beyond, nearest.nextafter(limit), nearest)


def multiply(inputs: torch.Tensor, packed: torch.Tensor, out_features: int, bits: int) -> torch.Tensor:
    """Multiply activations with packed weights.

    Activations are rounded to 8 bits (7 for `bits` = 8 without AVX512_VNNI), with a scale per row and group
    of 32.

    Args:
        inputs: [num_rows, in_features] float32, bfloat16 or float16, contiguous in the last dimension.
        packed: result of `pack` with the same `bits`, for a layer of `out_features`.

    Returns:
        [num_rows, out_features] of the inputs' dtype.
    """
    output = inputs.new_empty(inputs.shape[0], out_features)
    call = _Call(
        input=inputs.data_ptr(),
        input_stride=inputs.stride(0),
        weights=packed.data_ptr(),
        output=output.data_ptr(),
        num_rows=inputs.shape[0],
        in_features=inputs.shape[1],
        out_features=out_features,
        bits=bits,
        type=QUERY_TYPES[inputs.dtype],
    )
    if _kernel()(ctypes.addressof(call)):
        raise UnreadableError(f"the plugin's kernel multiplies with 4 or 8 bits, not {bits}")
    return output


# An operator, so that torch.compile does not look inside. `torch.library.custom_op` takes several times as
# long per call.
_LIBRARY = Library("vllm_magicdec", "FRAGMENT")
_LIBRARY.define("multiply(Tensor inputs, Tensor packed, int out_features, int bits) -> Tensor")
_LIBRARY.impl("multiply", multiply, "CPU")
torch.library.register_fake(
    "vllm_magicdec::multiply",
    lambda inputs, packed, out_features, bits: inputs.new_empty(inputs.shape[0], out_features),
    lib=_LIBRARY,
)
