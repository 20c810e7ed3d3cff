# SPDX-License-Identifier: Apache-2.0
"""Acceptance probabilities of looked-up tokens, learned online, and the choice among sources by these.

SSSD (arXiv 2411.05894) fits probabilities offline, by source and length of the match, prefers exact matches
of the context and fills up from the datastore. Here they are counted online, and the source with the most
expected accepted tokens wins; at a tie the first, so the context comes first. All sources learn from what
followed, so that one with a bad start can recover.
"""

from collections.abc import Sequence

import numpy as np

from vllm_magicdec.lookup.context_index import MAX_MATCH, Match
from vllm_magicdec.lookup.continuation import Continuation

_MEMORY = 1000  # observations per match length until the weight of one decays to 1/e
_PRIOR_WEIGHT = 8  # observations that the prior counts for


class Calibration:
    """Acceptance probability of a token of one source by the length of the match before it.

    Each right token of a continuation makes the match one longer.
    """

    def __init__(self) -> None:
        lengths = np.arange(MAX_MATCH + 1)
        # Laplace's rule of succession for one more equal token after `length` ones.
        self._right = (_PRIOR_WEIGHT * (lengths + 1) / (lengths + 2)).tolist()
        self._expected = [float(_PRIOR_WEIGHT)] * len(lengths)

    def chances(
        self, length: int, shares: Sequence[float], min_acceptance: float
    ) -> tuple[list[float], float]:
        """Return the probability of each token of a continuation, given the tokens before it.

        Args:
            length: matched tokens before the first one.
            shares: see `Match.shares`.
            min_acceptance: the continuation ends where its probability as a whole falls below this.

        Returns:
            The probabilities, and the expected number of accepted tokens.
        """
        right, expected = self._right, self._expected
        chances: list[float] = []
        reached, tokens = 1.0, 0.0
        for matched, share in enumerate(shares, length):
            known = matched if matched < MAX_MATCH else MAX_MATCH
            chance = share * right[known] / expected[known]
            chance = chance if chance < 1.0 else 1.0
            reached *= chance
            if reached < min_acceptance:
                break
            tokens += reached
            chances.append(chance)
        return chances, tokens

    def observe(self, length: int, share: float, is_right: bool) -> None:
        """Learn whether a token with this share was right after `length` matched tokens."""
        length = min(length, MAX_MATCH)
        decay = 1 - 1 / _MEMORY
        self._right[length] = self._right[length] * decay + is_right
        self._expected[length] = self._expected[length] * decay + share


def choose(
    matches: Sequence[Match], calibrations: Sequence[Calibration], min_acceptance: float
) -> tuple[int, Continuation]:
    """Return the source and the continuation with the most expected tokens.

    `matches` of one text and `calibrations` are by source; for `min_acceptance` see `Calibration.chances`.
    """
    best, most_expected = (0, Continuation([], [])), 0.0
    for source, (match, calibration) in enumerate(zip(matches, calibrations, strict=True)):
        chances, expected = calibration.chances(match.length, match.shares, min_acceptance)
        if expected > most_expected:
            best, most_expected = (source, Continuation(match.tokens[: len(chances)], chances)), expected
    return best


def learn(matches: Sequence[Match], calibrations: Sequence[Calibration], followed: Sequence[int]) -> None:
    """Update the calibrations with the tokens that followed a lookup, up to each source's first error."""
    for match, calibration in zip(matches, calibrations, strict=True):
        known = zip(match.tokens, match.shares, followed, strict=False)
        for step, (token, share, true) in enumerate(known):
            calibration.observe(match.length + step, share, token == true)
            if token != true:
                break
