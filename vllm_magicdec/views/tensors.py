# SPDX-License-Identifier: Apache-2.0
"""Small helpers for tensors of indices."""

from collections.abc import Sequence

import numpy as np
import torch

# vLLM's cache-write kernels skip this slot.
PAD_SLOT = -1


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels prepare rounds on the device, rather than torch operations."""
    return device.type == "cuda"


def on_device(
    numbers: Sequence | np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copy the numbers to the device without waiting for it; indexing with a list waits."""
    host = torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()  # the driver may wait for the stream before it stages other memory
    return host.to(device, non_blocking=True)


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide and round up."""
    return -(-numerator // denominator)
