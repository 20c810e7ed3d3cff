# SPDX-License-Identifier: Apache-2.0
"""How often a match goes on as it did before, learned from what became of the lookups before."""

from collections.abc import Sequence

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

    def chances(self, length: int, shares: Sequence[float], least: float) -> tuple[list[float], float]:
        """That each token of a continuation follows those before it.

        Args:
            length: tokens that matched before the first.
            shares: for each token, of the occurrences that had gone on so far those that went on with it.
            least: it ends where it is less likely than this to be right until there.

        Returns:
            Chances of the tokens up to there, and how many of these are expected to be right in a row.
        """
        right, expected = self._right, self._expected
        chances: list[float] = []
        reached, tokens = 1.0, 0.0
        for place, share in enumerate(shares, length):
            known = place if place < MAX_MATCH else MAX_MATCH
            chance = share * right[known] / expected[known]
            chance = chance if chance < 1.0 else 1.0
            reached *= chance
            if reached < least:
                break
            tokens += reached
            chances.append(chance)
        return chances, tokens

    def observe(self, length: int, share: float, is_right: bool) -> None:
        """What became of a token after so many that matched, which had this share."""
        length = min(length, MAX_MATCH)
        fade = 1 - 1 / _MEMORY
        self._right[length] = self._right[length] * fade + is_right
        self._expected[length] = self._expected[length] * fade + share
