# SPDX-License-Identifier: Apache-2.0
"""Finite draft logits."""

import math

import torch

_LARGEST = 1e4  # below float16's maximum, and finite in float32 after division by a low temperature


def make_finite(logits: torch.Tensor) -> torch.Tensor:
    """Replace NaN and plus infinity in place, so that softmax yields a distribution.

    Verification is exact for any draft distribution without NaN. Minus infinity stays: it masks tokens.

    Args:
        logits: [num_tokens, vocab_size], any floating dtype.
    """
    return torch.nan_to_num_(logits, nan=-_LARGEST, posinf=_LARGEST, neginf=-math.inf)
