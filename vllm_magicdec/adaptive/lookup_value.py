# SPDX-License-Identifier: Apache-2.0
"""Value of drafts that may be looked up: the engine core sets thresholds, workers apply them by round.

The expected acceptance of lookups and drafts differs between rounds, and only the workers know it. So the
controller chooses whether to draft, and gives the workers thresholds, which follow from one rule: if r
tokens per second can be had otherwise, a round of E tokens in T seconds is worth E - r T, and choosing by
that worth maximizes the rate (Dinkelbach 1967). A verified position, a draft step and a whole round each
cost r times their seconds: MagicDec's Eq. 2 (arXiv 2408.11049) at the margin.

r is not the global rate. Text that lookups predict comes in stretches, and short rounds do not make a
stretch end sooner. So rounds fall into buckets of expected lookup acceptance, and each bucket has its own
thresholds, at the rate of its checked rounds or of plain decoding, whichever is higher. A stretch has the
same number of tokens however it is decoded, so the global rate weights buckets by tokens, not by rounds.
"""

from collections import Counter
from collections.abc import Collection
from math import inf
from typing import NamedTuple

from typing_extensions import override

from vllm_magicdec.adaptive.draft_plan import BUCKET_BOUNDS, DraftPlan
from vllm_magicdec.adaptive.step_times import Batch, Rounds, StepTimes
from vllm_magicdec.adaptive.value import NONE_FOUND, PLAIN, Choice, RoundInfo, Value

# Upper bound of `min_acceptance`: likely drafts are verified however expensive that seemed.
_MAX_MIN_ACCEPTANCE = 0.9
# `min_gain` per request before step times are known. Longer rounds would tell less about drafts.
_FIRST_MIN_GAIN = 0.3
# Steps between trials of one choice, and of lookups alone during plain decoding.
_PAUSE, _LOOKUP_PAUSE = 64, 16
_PLAIN_ROUNDS = Rounds(1.0)
# Rounds of single requests after which an observation has lost 63 % of its weight, the weight of the first
# guess, and the weight that old observations keep.
_MEMORY, _GUESS_WEIGHT, _MIN_WEIGHT = 512.0, 8.0, 32.0


class RoundAverages:
    """Decaying averages over rounds of single requests, which begin with first guesses."""

    def __init__(self, verified: float, accepted: float, num_passes: float) -> None:
        self._weight = _GUESS_WEIGHT
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
        return self._weight < 1.5 * _GUESS_WEIGHT

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


class LookupValue(Value):
    """Value of plain decoding, of checked drafts, and of unchecked lookups alone."""

    def __init__(self, max_drafts: int, budget: int) -> None:
        self.budget = budget
        self.checked, self.unchecked = Choice(max_drafts), Choice(max_drafts, lookups_alone=True)
        self.choices = (PLAIN, self.checked)  # workers replace checked rounds by unchecked ones
        self.tried = self.calibrated = (PLAIN, self.unchecked, self.checked)
        self.start = self._current = PLAIN
        self._buckets = [BucketStats(accepted) for accepted in (0.2, *BUCKET_BOUNDS)]
        self._buckets[0].tokens = _GUESS_WEIGHT

    @override
    def observe(
        self, rounds: Collection[tuple[int, int]], choice: Choice, num_reqs: int, info: RoundInfo
    ) -> None:
        for stats in self._buckets:
            stats.fade(num_reqs, len(rounds))
        own = self._buckets[info.bucket]
        for (verified, accepted), count in Counter(rounds).items():
            # During plain decoding a trial begins at every token with equal probability.
            own.tokens += count if self._current == PLAIN else count * (1.0 + accepted)
            own.observe(verified, accepted, count, info, is_checked=choice != self.unchecked)

    @override
    def shares(self) -> list[float]:
        tokens = sum(stats.tokens for stats in self._buckets)
        return [stats.tokens / tokens for stats in self._buckets]

    @override
    def pure(self, choice: Choice) -> list[Rounds]:
        if choice == PLAIN:
            return [_PLAIN_ROUNDS] * len(self._buckets)
        if choice == self.unchecked:
            return [stats.unchecked.rounds(0) for stats in self._buckets]
        return [stats.checked.rounds(self.budget) for stats in self._buckets]

    @override
    def mean(self, choice: Choice) -> Rounds:
        pure = self.pure(choice)
        weights = [share / own.tokens for share, own in zip(self.shares(), pure, strict=True)]
        tokens, verified, drafted, _ = (
            sum(w * number for w, number in zip(weights, numbers, strict=True)) / sum(weights)
            for numbers in zip(*pure, strict=True)
        )
        return Rounds(tokens, verified, drafted, pure[0].budget)

    @override
    def mix(self, choice: Choice, bucket: int) -> dict[Choice, float]:
        if choice != self.checked:
            return {choice: 1.0}
        unchecked = self._buckets[bucket].unchecked_share
        return {self.checked: 1.0 - unchecked, self.unchecked: unchecked}

    @override
    def pause(self, choice: Choice, current: Choice) -> int:
        return _LOOKUP_PAUSE if current == PLAIN and choice == self.unchecked else _PAUSE

    @override
    def settle(self, current: Choice, batch: Batch, times: StepTimes | None) -> None:
        if times is None:
            for stats in self._buckets:
                stats.thresholds = stats.thresholds._replace(min_gain=_FIRST_MIN_GAIN * batch.num_reqs)
            return
        for share, stats in zip(self.shares(), self._buckets, strict=True):
            if (current == PLAIN) != (self._current == PLAIN):  # tokens are counted differently from now on
                stats.tokens = share * _GUESS_WEIGHT
            if current == PLAIN:  # workers choose nothing: assume the better
                unchecked = times.seconds_per_token(batch, stats.unchecked.rounds(0))
                checked = times.seconds_per_token(batch, stats.checked.rounds(self.budget))
                stats.assume(are_checked=checked < unchecked)
        self._current = current
        position, draft_step = times.marginal_seconds(batch, self.budget)
        for stats in self._buckets:
            rate, min_expected_accepted = self._rate_and_threshold(stats, batch, times)
            # Also during plain decoding: trials of drafts use these thresholds.
            stats.thresholds = Thresholds(rate * position, rate * draft_step, min_expected_accepted)

    def _rate_and_threshold(
        self, stats: BucketStats, batch: Batch, times: StepTimes
    ) -> tuple[float, float]:
        """Return the tokens per second available in a bucket, and its `min_expected_accepted`."""
        rate, worth = 1.0 / times.seconds_per_token(batch, _PLAIN_ROUNDS), 0.0
        if self._current != PLAIN:
            checked = stats.checked.rounds(self.budget)
            seconds = times.predict(batch.step(checked, checked))
            tokens = batch.num_reqs * checked.tokens
            rate = max(rate, tokens / seconds)
            # First learn what checks bring.
            worth = inf if stats.checked.is_guess else tokens - rate * seconds
        none_found = Rounds(1.0, NONE_FOUND)
        return rate, worth - batch.num_reqs + rate * times.predict(batch.step(none_found, none_found))

    @override
    def plan(self, choice: Choice, *, is_planned: bool) -> DraftPlan:
        plans = [
            DraftPlan(
                choice.drafts,
                min(own.min_acceptance, _MAX_MIN_ACCEPTANCE),
                own.min_gain if choice == self.checked else 0.0,
                inf if is_planned else own.min_expected_accepted,
                lookups_alone=choice.lookups_alone,
            )
            for own in (stats.thresholds for stats in self._buckets)
        ]
        return DraftPlan(choice.drafts, by_bucket=plans, lookups_alone=choice.lookups_alone)
