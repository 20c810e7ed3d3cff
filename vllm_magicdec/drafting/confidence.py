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
    """What a lookup had said of a draft's place. The draft sees little of the text, a lookup all of it."""

    NOTHING = 0
    ANOTHER = 1
    THE_SAME = 2


class Drawn(NamedTuple):
    """What is known of a draft."""

    probability: float
    """That its model gave it."""
    foreseen: Foreseen = Foreseen.NOTHING


# The first guess, in log-odds: a slope, and an offset. Drafts that their model holds for unlikely stand
# more often than it says, because the target holds the same for unlikely. Fitted to the shipped model on
# Python sources and speeches (6,000 and 4,000 tokens, 512 of them seen by the draft; 16,000 drafts).
_PRIORS = {Foreseen.NOTHING: (1.2, 3.1), Foreseen.ANOTHER: (0.5, 1.3), Foreseen.THE_SAME: (0.9, 4.4)}


class Confidence:
    """Counts, by log-odds of the draft's probability and by what was looked up, how often drafts stand.

    A draft counts where all before it stood. vLLM's `OnlineAcceptanceEstimator` fits a line through the
    same log-odds. What is counted here needs not be one: the surest drafts stand more often than any line
    through the others says. Of drafts that lookups foresaw nearly all stand, of those that they contradict
    three in four, at the same probability: a lookup knows text that the draft does not see.
    """

    def __init__(self) -> None:
        guesses = [
            1 / (1 + exp(-slope * log_odds - offset))
            for slope, offset in (_PRIORS[foreseen] for foreseen in Foreseen)
            for log_odds in range(_LOWEST, _HIGHEST + 1)
        ]
        self._tried = [float(_PRIOR_WEIGHT)] * len(guesses)
        self._stood = [_PRIOR_WEIGHT * guess for guess in guesses]
        self._all_tried = float(_PRIOR_WEIGHT)
        self._all_stood = _PRIOR_WEIGHT * _PRIOR_USUAL

    @property
    def usual(self) -> float:
        """The chance of a draft of which nothing is known yet, if all before it stand."""
        return self._all_stood / self._all_tried

    def chance(self, drawn: Drawn) -> float:
        """That such a draft stands, if all before it do."""
        place = _place(drawn)
        return self._stood[place] / self._tried[place]

    def observe(self, drawn: Drawn, stood: bool) -> None:
        """Whether such a draft stood, when all before it did."""
        place, fade = _place(drawn), 1 - 1 / _MEMORY
        self._tried[place] = fade * self._tried[place] + 1
        self._stood[place] = fade * self._stood[place] + stood
        self._all_tried = fade * self._all_tried + 1
        self._all_stood = fade * self._all_stood + stood


def _place(drawn: Drawn) -> int:
    """Of a draft among those that are told apart."""
    return int(drawn.foreseen) * (_HIGHEST - _LOWEST + 1) + _log_odds(drawn.probability) - _LOWEST


def _log_odds(probability: float) -> int:
    if not probability > 0:  # nor is it a number, where the draft's logits overflowed
        return _LOWEST
    odds = probability / max(1 - probability, 1e-9)
    return min(max(round(log(max(odds, _LEAST_ODDS))), _LOWEST), _HIGHEST)
