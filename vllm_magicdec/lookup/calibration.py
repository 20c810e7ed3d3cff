# SPDX-License-Identifier: Apache-2.0
"""How often a match goes on as it did before, learned from what became of the lookups before."""

import numpy as np

from vllm_magicdec.lookup.context_index import MAX_MATCH

_MEMORY = 1000  # observations of one length; older ones fade
_PRIOR_WEIGHT = 8  # observations that the first guess counts for


class Calibration:
    """The chance that a token follows, by how many tokens matched before it; of one source.

    SSSD (arXiv 2411.05894) fits the probability by source and length of the match beforehand; here both
    are counted online. Of a continuation, each token that proved right makes the match one longer.
    """

    def __init__(self) -> None:
        lengths = np.arange(MAX_MATCH + 1)
        # Laplace's rule of succession: after `length` tokens alike, one more is.
        self._right = (_PRIOR_WEIGHT * (lengths + 1) / (lengths + 2)).tolist()
        self._expected = [float(_PRIOR_WEIGHT)] * len(lengths)

    def chance(self, length: int, share: float) -> float:
        """That a token follows.

        Args:
            length: tokens that matched before it.
            share: of the occurrences, those that went on with it.
        """
        length = min(length, MAX_MATCH)
        return min(1.0, share * self._right[length] / self._expected[length])

    def observe(self, length: int, share: float, is_right: bool) -> None:
        """What became of a token with these arguments of `chance`."""
        length = min(length, MAX_MATCH)
        fade = 1 - 1 / _MEMORY
        self._right[length] = self._right[length] * fade + is_right
        self._expected[length] = self._expected[length] * fade + share
