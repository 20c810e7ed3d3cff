# SPDX-License-Identifier: Apache-2.0
"""How likely a draft is to stand, by the probability that the draft gave it."""

from math import exp, log

_LOWEST, _HIGHEST = -6, 10  # log-odds; what lies beyond counts as these
_LEAST_ODDS = exp(_LOWEST)
_MEMORY = 500  # observations of about the same log-odds; older ones fade
_PRIOR_WEIGHT = 4  # observations that the first guess counts for
# The first guess, in log-odds: drafts that their model holds for unlikely stand more often than it says,
# because the target holds the same for unlikely. Fitted to the shipped model at 4,000 tokens of context.
_PRIOR_SLOPE, _PRIOR_OFFSET = 0.8, 2.4
_PRIOR_USUAL = 0.8  # the first guess of a draft that is still to be made


class Confidence:
    """Counts, by log-odds of the draft's probability, how often drafts stand; after those before them.

    vLLM's `OnlineAcceptanceEstimator` fits a line through the same log-odds. What is counted here needs not
    be one: the surest drafts stand more often than any line through the others says.
    """

    def __init__(self) -> None:
        guesses = [
            1 / (1 + exp(-_PRIOR_SLOPE * log_odds - _PRIOR_OFFSET))
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

    def chance(self, probability: float) -> float:
        """That a draft of this probability stands, if all before it do."""
        place = _place(probability)
        return self._stood[place] / self._tried[place]

    def observe(self, probability: float, stood: bool) -> None:
        """Whether a draft of this probability stood, when all before it did."""
        place, fade = _place(probability), 1 - 1 / _MEMORY
        self._tried[place] = fade * self._tried[place] + 1
        self._stood[place] = fade * self._stood[place] + stood
        self._all_tried = fade * self._all_tried + 1
        self._all_stood = fade * self._all_stood + stood


def _place(probability: float) -> int:
    """Of a probability's log-odds among those that are told apart."""
    if not probability > 0:  # nor is it a number, where the draft's logits overflowed
        return 0
    odds = probability / max(1 - probability, 1e-9)
    return min(max(round(log(max(odds, _LEAST_ODDS))), _LOWEST), _HIGHEST) - _LOWEST
