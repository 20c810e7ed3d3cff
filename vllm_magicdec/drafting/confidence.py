# SPDX-License-Identifier: Apache-2.0
"""How likely a draft is to stand, by the probability that the draft gave it and by what a lookup said."""

from enum import IntEnum
from math import exp, log
from typing import NamedTuple

_LOWEST, _HIGHEST = -6, 10  # log-odds; what lies beyond counts as these
_LEAST_ODDS = exp(_LOWEST)
_MEMORY = 500  # observations of about the same drafts; older ones fade
_PRIOR_WEIGHT = 4  # observations that the first guess counts for
_PRIOR_USUAL = 0.8  # the first guess of a draft that is still to be made


class Foreseen(IntEnum):
    """What was looked up for a draft's place, after the drafts before it."""

    NOTHING = 0  # none found, none likely enough, or not asked
    ANOTHER = 1  # token
    THE_SAME = 2


class Evidence(NamedTuple):
    """What is known of a draft."""

    probability: float
    """That its model gave it."""
    foreseen: Foreseen


# The first guess, in log-odds: a slope, and offsets. Drafts that their model holds for unlikely stand more
# often than it says, because the target holds the same for unlikely. Fitted to the shipped model on Python
# sources and speeches (6,000 and 4,000 tokens, 512 of them seen by the draft; 16,000 drafts).
_PRIOR_SLOPE = 0.7
_PRIOR_OFFSETS = {Foreseen.NOTHING: 2.4, Foreseen.ANOTHER: 1.5, Foreseen.THE_SAME: 4.2}


class Confidence:
    """Counts, by log-odds of the draft's probability and by what was looked up, how often drafts stand.

    A draft counts where all before it stood. vLLM's `OnlineAcceptanceEstimator` fits a line through the
    same log-odds. What is counted here needs not be one: the surest drafts stand more often than any line
    through the others says. A lookup knows text that the draft does not see: of drafts with a probability
    near 0.5, 99 of 100 stood that a lookup had foreseen, 95 where nothing was found, 72 where it said
    another token (measured where the first guess was fitted).
    """

    def __init__(self) -> None:
        guesses = [
            1 / (1 + exp(-_PRIOR_SLOPE * log_odds - _PRIOR_OFFSETS[foreseen]))
            for foreseen in Foreseen  # 0, 1, 2: see `_place`
            for log_odds in range(_LOWEST, _HIGHEST + 1)
        ]
        self._tried = [float(_PRIOR_WEIGHT)] * len(guesses)
        self._stood = [_PRIOR_WEIGHT * guess for guess in guesses]
        self._unforeseen_tried = float(_PRIOR_WEIGHT)
        self._unforeseen_stood = _PRIOR_WEIGHT * _PRIOR_USUAL

    @property
    def usual(self) -> float:
        """The chance of a draft to come that no lookup foresees, if all before it stand."""
        return self._unforeseen_stood / self._unforeseen_tried

    def chance(self, evidence: Evidence) -> float:
        """That such a draft stands, if all before it do."""
        place = _place(evidence)
        return self._stood[place] / self._tried[place]

    def observe(self, evidence: Evidence, stood: bool) -> None:
        """Whether such a draft stood, when all before it did."""
        place, fade = _place(evidence), 1 - 1 / _MEMORY
        self._tried[place] = fade * self._tried[place] + 1
        self._stood[place] = fade * self._stood[place] + stood
        if evidence.foreseen != Foreseen.THE_SAME:
            self._unforeseen_tried = fade * self._unforeseen_tried + 1
            self._unforeseen_stood = fade * self._unforeseen_stood + stood


def _place(evidence: Evidence) -> int:
    """Of a draft among those that are told apart."""
    return evidence.foreseen * (_HIGHEST - _LOWEST + 1) + _log_odds(evidence.probability) - _LOWEST


def _log_odds(probability: float) -> int:
    if not probability > 0:  # nor is it a number, where the draft's logits overflowed
        return _LOWEST
    odds = probability / max(1 - probability, 1e-9)
    return min(max(round(log(max(odds, _LEAST_ODDS))), _LOWEST), _HIGHEST)
