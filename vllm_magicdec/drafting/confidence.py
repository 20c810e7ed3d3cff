# SPDX-License-Identifier: Apache-2.0
"""Estimated acceptance of a draft, given its probability and a lookup."""

from enum import IntEnum
from math import exp, log
from typing import NamedTuple

_LOWEST, _HIGHEST = -6, 10  # log-odds; values beyond are clamped
_MIN_ODDS = exp(_LOWEST)
_MEMORY = 500  # observations of a bucket; older ones fade
_PRIOR_WEIGHT = 4  # observations
_PRIOR_USUAL = 0.8  # acceptance of a draft not sampled yet


class Predicted(IntEnum):
    """Lookup for the position of a draft, compared with the draft."""

    NOTHING = 0  # no lookup, or none found
    ANOTHER = 1  # a token other than the draft
    THE_SAME = 2


class Evidence(NamedTuple):
    """Predictors of a draft's acceptance."""

    probability: float  # in the draft's distribution
    predicted: Predicted


# Prior in log-odds: slope and offsets. Unlikely drafts are accepted more often than their probability says,
# because they are unlikely for the target too. Fitted on 16,000 drafts of the shipped model.
_PRIOR_SLOPE = 0.7
_PRIOR_OFFSETS = {Predicted.NOTHING: 2.4, Predicted.ANOTHER: 1.5, Predicted.THE_SAME: 4.2}


class Confidence:
    """Acceptance rates by bucket of log-odds and lookup, of drafts whose predecessors were all accepted.

    vLLM's `OnlineAcceptanceEstimator` fits a line through the same log-odds; that line misfits
    the most confident drafts, buckets do not. Lookups see text that the draft does not: at a probability
    near 0.5, acceptance was 0.99 if the lookup agreed, 0.95 without one, and 0.72 if it disagreed.
    """

    def __init__(self) -> None:
        guesses = [
            1 / (1 + exp(-_PRIOR_SLOPE * log_odds - _PRIOR_OFFSETS[predicted]))
            for predicted in Predicted  # in the order of `_bucket`
            for log_odds in range(_LOWEST, _HIGHEST + 1)
        ]
        self._tried = [float(_PRIOR_WEIGHT)] * len(guesses)
        self._accepted = [_PRIOR_WEIGHT * guess for guess in guesses]
        self._unpredicted_tried = float(_PRIOR_WEIGHT)
        self._unpredicted_accepted = _PRIOR_WEIGHT * _PRIOR_USUAL

    @property
    def usual(self) -> float:
        """Acceptance of drafts without an agreeing lookup."""
        return self._unpredicted_accepted / self._unpredicted_tried

    def chance(self, evidence: Evidence) -> float:
        """Return the chance of acceptance if all drafts before are accepted."""
        bucket = _bucket(evidence)
        return self._accepted[bucket] / self._tried[bucket]

    def observe(self, evidence: Evidence, is_accepted: bool) -> None:
        """Record the verification of a draft whose predecessors were all accepted."""
        bucket, fade = _bucket(evidence), 1 - 1 / _MEMORY
        self._tried[bucket] = fade * self._tried[bucket] + 1
        self._accepted[bucket] = fade * self._accepted[bucket] + is_accepted
        if evidence.predicted != Predicted.THE_SAME:
            self._unpredicted_tried = fade * self._unpredicted_tried + 1
            self._unpredicted_accepted = fade * self._unpredicted_accepted + is_accepted


def _bucket(evidence: Evidence) -> int:
    return evidence.predicted * (_HIGHEST - _LOWEST + 1) + _log_odds(evidence.probability) - _LOWEST


def _log_odds(probability: float) -> int:
    if not probability > 0:  # also NaN, if the draft's logits overflowed
        return _LOWEST
    odds = probability / max(1 - probability, 1e-9)
    return min(max(round(log(max(odds, _MIN_ODDS))), _LOWEST), _HIGHEST)
