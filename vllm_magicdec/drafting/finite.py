# SPDX-License-Identifier: Apache-2.0
"""Logits that drafts are drawn from."""

import math

import torch

_LARGEST = 1e4  # within every type, and divided by a low temperature within float32


def make_finite(logits: torch.Tensor) -> torch.Tensor:
    """Make a distribution of logits that have overflowed, in place.

    Verification keeps the output's distribution whatever the draft's is, as long as it is one; with NaN in
    it the rejection sampler would draw from nothing. Minus infinity stays: a token without a chance.

    Args:
        logits: [num_tokens, vocab_size], of any floating type.
    """
    return torch.nan_to_num_(logits, nan=-_LARGEST, posinf=_LARGEST, neginf=-math.inf)
