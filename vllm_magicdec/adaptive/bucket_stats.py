# SPDX-License-Identifier: Apache-2.0
"""Statistics of rounds with lookups, by bucket (`draft_plan.bucket_of`)."""

from collections import Counter
from copy import copy
from math import inf
from typing import NamedTuple

from vllm_magicdec.adaptive.controller import Choice

# Verified drafts of a speculative step without any: vLLM samples it in the same way as one with drafts.
NONE_FOUND = 1e-3
# Rounds of single requests after which an observation has lost 63 % of its weight, the weight of the first
# guess, and the weight that old observations keep.
_MEMORY, GUESS_WEIGHT, _MIN_WEIGHT = 512.0, 8.0, 32.0


class RoundAverages:
    """Decaying averages over rounds of single requests.

    Args:
        verified: first guess at the verified drafts per request.
        accepted: first guess at the accepted ones among them.
        num_passes: first guess at the draft steps.
    """

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

    @property
    def verified(self) -> float:
        """Verified drafts per request."""
        return max(self._means[0], NONE_FOUND)

    @property
    def tokens(self) -> float:
        """Tokens per request, the target's own included."""
        return 1.0 + self._means[1]

    @property
    def num_passes(self) -> float:
        """Draft steps."""
        return self._means[2]


class Thresholds(NamedTuple):
    """Thresholds of a `DraftPlan`, with first guesses."""

    min_acceptance: float = 0.3
    min_gain: float = 0.0
    min_expected_accepted: float = inf


class BucketStats:
    """Statistics of rounds whose expected lookup acceptance falls in one bucket.

    Args:
        unchecked: first guess at rounds with unchecked lookups only.
    """

    def __init__(self, unchecked: RoundAverages) -> None:
        self.checked = RoundAverages(4.0, 3.0, 4.0)
        self.tried_unchecked = unchecked  # including trials
        self.chosen_unchecked = copy(unchecked)  # only where workers chose it
        # Decaying sums of tokens: of all rounds, and of those that were no trials.
        self.tokens = self.checked_tokens = self.unchecked_tokens = 0.0
        self.last_made: Counter[Choice] = Counter()  # step number
        self.thresholds = Thresholds()
        self.seconds_per_token = 0.0  # of the current choice and batch

    def fade(self, num_rounds: int) -> None:
        """Reduce the weight of the averages by `num_rounds` rounds of any bucket."""
        for averages in (self.checked, self.tried_unchecked, self.chosen_unchecked):
            averages.fade(num_rounds)

    def fade_tokens(self, num_rounds: int) -> None:
        """Reduce the token sums by `num_rounds` rounds with drafts of any bucket."""
        left = (1.0 - 1.0 / _MEMORY) ** num_rounds
        self.tokens *= left
        self.checked_tokens *= left
        self.unchecked_tokens *= left

    def averages(self, choice: Choice) -> RoundAverages:
        """Return the averages of rounds drafted by `choice`."""
        return self.tried_unchecked if choice.lookups_alone else self.checked

    def expect(self, *, are_checked: bool) -> None:
        """Reset the observed worker choices to an assumption."""
        self.checked_tokens, self.unchecked_tokens = float(are_checked), float(not are_checked)
        self.chosen_unchecked = copy(self.tried_unchecked)

    @property
    def unchecked_share(self) -> float:
        """Share of the tokens for which workers chose unchecked lookups."""
        tokens = self.checked_tokens + self.unchecked_tokens
        return self.unchecked_tokens / tokens if tokens else 0.0
