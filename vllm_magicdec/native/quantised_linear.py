# SPDX-License-Identifier: Apache-2.0
"""Linear layers with weights of 4 or 8 bits on CPUs: packing, and the operator `vllm_magicdec::multiply`.

Weights are rounded to the nearest integer in groups of 32 inputs, with a scale and a minimum per group and
output. 8 bits cover the range of a group; 4 bits take the scale and minimum of the smallest squared error
among a few. torch's `_weight_int4pack_mm_for_cpu` and `_weight_int8pack_mm` take two to three times as long
for up to 8 rows on a CPU with AVX2 (benchmarks/quantised_linear.py).
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
_CUTS = (0.1, 0.2)  # parts of a group's range that 4 bits are also tried without
_TINY = 1e-6  # added to every input's relative importance, so that none is zero
_TILES_AT_ONCE = 4  # so that a search stays in the processor's cache


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


def pack(weights: torch.Tensor, bits: int, importance: torch.Tensor | None = None) -> torch.Tensor:
    """Quantise the weights of a linear layer.

    Args:
        weights: [out_features, in_features], floating point.
        bits: 4 or 8.
        importance: [in_features], the factors of the squared errors that 4 bits minimise; ones if None.
            With the inputs' mean squares, errors of the layer's output.

    Returns:
        [ceil(out_features / 16), ceil(in_features / 32), 64 * bits + 64] uint8; see quantised_linear.cpp.
    """
    out_features, in_features = weights.shape
    if importance is None or not importance.isfinite().all():
        importance = torch.ones(in_features, dtype=torch.float32)
    importance = importance / importance.mean().clamp(min=_TINY) + _TINY
    inputs_padding = (0, -in_features % _GROUP)
    by_group = torch.nn.functional.pad(importance, inputs_padding).view(-1, _GROUP)
    padding = (*inputs_padding, 0, -out_features % _OUTPUTS)
    tiles = torch.nn.functional.pad(weights, padding).split(_OUTPUTS * _TILES_AT_ONCE)
    return torch.cat(
        [_pack_tiles(rows.float().unflatten(1, (-1, _GROUP)), bits, by_group) for rows in tiles]
    )


def _pack_tiles(groups: torch.Tensor, bits: int, importance: torch.Tensor) -> torch.Tensor:
    """Pack [outputs, groups, 32] float32; `importance` is [groups, 32]."""
    integers, scale, minimum = _fit(groups, bits, importance)
    # [tiles, groups, steps, outputs, inputs of a step]
    by_step = integers.to(torch.uint8).unflatten(0, (-1, _OUTPUTS)).unflatten(3, (-1, _STEP))
    by_step = by_step.permute(0, 2, 3, 1, 4)
    if bits == 4:
        by_step = by_step[:, :, 0::2] | (by_step[:, :, 1::2] << 4)

    def as_bytes(numbers: torch.Tensor) -> torch.Tensor:
        by_tile = numbers.squeeze(2).to(torch.bfloat16).unflatten(0, (-1, _OUTPUTS)).transpose(1, 2)
        return by_tile.contiguous().view(torch.uint8)

    return torch.cat([by_step.flatten(2), as_bytes(scale), as_bytes(minimum)], dim=2)


def _fit(groups: torch.Tensor, bits: int, importance: torch.Tensor) -> list[torch.Tensor]:
    """Return integers [outputs, groups, 32], then scales and minima [outputs, groups, 1], as float32."""
    largest = 2**bits - 1

    def rounded(scale: torch.Tensor, minimum: torch.Tensor) -> list[torch.Tensor]:
        scale, minimum = scale.bfloat16().float(), minimum.bfloat16().float()
        scale = torch.where(scale > 0, scale, 1.0)
        return [((groups - minimum) / scale).round_().clamp_(0, largest), scale, minimum]

    def error(integers: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
        squares = (integers * scale).add_(minimum).sub_(groups).square_()
        return squares.mul_(importance).sum(2, keepdim=True)

    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    # Rounded outwards, so that every weight lies between the minimum and the largest integer.
    minimum = _to_bfloat16(low, upwards=False)
    scale = _to_bfloat16((high - minimum) / largest, upwards=True)
    whole = best = rounded(scale, minimum)
    if bits == 8:
        return best
    least = error(*best)
    total = importance.sum(1, keepdim=True)
    centre = (groups * importance).sum(2, keepdim=True) / total
    weighted = (groups - centre) * importance
    narrower = (rounded(scale * (1 - cut), minimum + (high - low) * (cut / 2)) for cut in _CUTS)
    for start in (whole, *narrower):
        # The scale and minimum that fit these integers best.
        integers = start[0]
        middle = (integers * importance).sum(2, keepdim=True) / total
        variance = (integers - middle).square_().mul_(importance).sum(2, keepdim=True)
        slope = (weighted * integers).sum(2, keepdim=True) / variance
        for tried in (start, rounded(slope, centre - slope * middle)):
            tried_error = error(*tried)
            # False for the fit to equal integers, which is not a number.
            is_better = tried_error < least
            least = torch.where(is_better, tried_error, least)
            best = [torch.where(is_better, new, old) for new, old in zip(tried, best, strict=True)]
    return best


def _to_bfloat16(numbers: torch.Tensor, *, upwards: bool) -> torch.Tensor:
    """Return bfloat16 numbers as float32."""
    nearest = numbers.bfloat16()
    is_beyond = nearest.float() < numbers if upwards else nearest.float() > numbers
    limit = torch.full_like(nearest, torch.inf if upwards else -torch.inf)
    return torch.where(is_beyond, nearest.nextafter(limit), nearest).float()


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
