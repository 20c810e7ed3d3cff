# SPDX-License-Identifier: Apache-2.0
"""Statistics of rounds with lookups, by bucket (`draft_plan.bucket_of`)."""

from math import inf
from typing import NamedTuple

from vllm_magicdec.adaptive.step_times import Rounds
from vllm_magicdec.adaptive.value import NONE_FOUND, RoundInfo

# Rounds of single requests after which an observation has lost 63 % of its weight, the weight of the first
# guess, and the weight that old observations keep.
_MEMORY, GUESS_WEIGHT, _MIN_WEIGHT = 512.0, 8.0, 32.0


class RoundAverages:
    """Decaying averages over rounds of single requests, which begin with first guesses."""

    def __init__(self, verified: float, accepted: float, num_passes: float) -> None:
        self._weight = GUESS_WEIGHT
        self._means = [verified, accepted, num_passes]

    def fade(self, num_rounds: int) -> None:
        """Reduce the weight of the past by `num_rounds` rounds of any bucket."""
        faded = self._weight * (1.0 - 1.0 / _MEMORY) ** num_rounds
        self._weight = max(faded, min(self._weight, _MIN_WEIGHT))

    def observe(self, verified: int, accepted: int, num_passes: int, count: int) -> None:
        """Add `count` equal rounds."""
        self._weight += count
        share = count / self._weight
        values = zip(self._means, (verified, accepted, num_passes), strict=True)
        self._means = [mean + share * (value - mean) for mean, value in values]

    @property
    def is_guess(self) -> bool:
        """Whether the first guess still dominates."""
        return self._weight < 1.5 * GUESS_WEIGHT

    def rounds(self, budget: int) -> Rounds:
        """Return the mean round; `budget`: most K/V entries per request and draft step, or 0."""
        verified, accepted, num_passes = self._means
        return Rounds(1.0 + accepted, max(verified, NONE_FOUND), num_passes if budget else 0.0, budget)


class Thresholds(NamedTuple):
    """Thresholds of a `DraftPlan`, with first guesses."""

    min_acceptance: float = 0.3
    min_gain: float = 0.0
    min_expected_accepted: float = inf


class BucketStats:
    """Statistics of rounds whose expected lookup acceptance falls in one bucket.

    Args:
        accepted: first guess at the accepted tokens of unchecked lookups, per request and round.
    """

    def __init__(self, accepted: float) -> None:
        self.checked = RoundAverages(4.0, 3.0, 4.0)
        self.unchecked = RoundAverages(2.0 * accepted, accepted, 0.0)
        # Decaying sums of tokens: of all rounds, and of those that workers chose.
        self.tokens = self._checked_tokens = self._unchecked_tokens = 0.0
        self.thresholds = Thresholds()

    def fade(self, num_reqs: int, num_rounds: int) -> None:
        """Reduce the weight of the past by a step of `num_reqs` requests, `num_rounds` with drafts."""
        self.checked.fade(num_reqs)
        self.unchecked.fade(num_reqs)
        left = (1.0 - 1.0 / _MEMORY) ** num_rounds
        self.tokens *= left
        self._checked_tokens *= left
        self._unchecked_tokens *= left

    def observe(
        self, verified: int, accepted: int, count: int, info: RoundInfo, *, is_checked: bool
    ) -> None:
        """Add `count` equal rounds of single requests, but not to `tokens`.

        `is_checked` says whether draft steps made or checked the drafts.
        """
        averages = self.checked if is_checked else self.unchecked
        averages.observe(verified, accepted, info.num_passes, count)
        chosen_tokens = 0.0 if info.is_planned else count * (1.0 + accepted)
        self._checked_tokens += chosen_tokens * is_checked
        self._unchecked_tokens += chosen_tokens * (not is_checked)

    def assume(self, *, are_checked: bool) -> None:
        """Reset the observed worker choices to an assumption."""
        self._checked_tokens, self._unchecked_tokens = float(are_checked), float(not are_checked)

    @property
    def unchecked_share(self) -> float:
        """Share of the tokens for which workers chose unchecked lookups."""
        tokens = self._checked_tokens + self._unchecked_tokens
        return self._unchecked_tokens / tokens if tokens else 0.0
