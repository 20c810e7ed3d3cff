# SPDX-License-Identifier: Apache-2.0
"""Choice of drafting with lookups: the controller sets thresholds, the workers apply them in each round.

The expected acceptance of lookups and drafts differs between rounds, and only the workers know it. So this
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
from collections.abc import Collection, Sequence
from math import inf
from typing import NamedTuple

from typing_extensions import override

from vllm_magicdec.adaptive.bucket_stats import (
    GUESS_WEIGHT,
    NONE_FOUND,
    BucketStats,
    RoundAverages,
    Thresholds,
)
from vllm_magicdec.adaptive.controller import (
    CALIBRATION_STEPS,
    PLAIN,
    TRIAL_SHARE,
    TRIAL_STEPS,
    UNPLANNED,
    Choice,
    Controller,
    RoundInfo,
)
from vllm_magicdec.adaptive.draft_plan import BUCKET_BOUNDS, DraftPlan
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep

# Upper bound of `min_acceptance`: likely drafts are verified however expensive that seemed.
_MAX_MIN_ACCEPTANCE = 0.9
# `min_gain` per request before step times are known. Longer rounds would tell less about drafts.
_FIRST_MIN_GAIN = 0.3
# Ratio of rates from which on drafting replaces plain decoding, before worker choices were observed.
_MIN_SPEEDUP = 1.02
# Steps without a choice after which it counts as rare, and minimum steps between trials of one choice; and
# the minimum between trials of lookups during plain decoding.
_RARE_AFTER, _STEPS_BETWEEN_LOOKUP_TRIALS = 64, 16


class _Batch(NamedTuple):
    num_reqs: int
    context_tokens: int


class LookupController(Controller):
    """Controller for drafts that may be looked up, and of which not all need be made or verified.

    Args:
        max_drafts: maximum drafts per request and round.
        budget: see `Controller`.
        times: see `Controller`; batch sizes after the first are calibrated with fewer steps.
    """

    def __init__(self, max_drafts: int, budget: int, times: StepTimes) -> None:
        super().__init__((0, max_drafts), budget, times)
        (self._checked,) = self._drafting
        # All drafts are looked up. The controller only tries it; workers choose it round by round.
        self.unchecked = Choice(max_drafts, lookups_alone=True)
        self._only_tried = [PLAIN, self.unchecked]
        self._current = PLAIN  # until something is known about the others
        guesses = (0.2, *BUCKET_BOUNDS)
        self._buckets = [BucketStats(RoundAverages(2.0 * tokens, tokens, 0.0)) for tokens in guesses]
        self._buckets[0].tokens = GUESS_WEIGHT
        self._last_planned: Counter[Choice] = Counter()  # step number of the latest trial

    @override
    def plan(self, choice: Choice) -> DraftPlan:
        plans = [
            DraftPlan(
                choice.drafts,
                min(own.min_acceptance, _MAX_MIN_ACCEPTANCE),
                own.min_gain if self.budget_of(choice) else 0.0,
                inf if self.is_planned else own.min_expected_accepted,  # workers must not replace a trial
                lookups_alone=choice.lookups_alone,
            )
            for own in (stats.thresholds for stats in self._buckets)
        ]
        return DraftPlan(choice.drafts, by_bucket=plans, lookups_alone=choice.lookups_alone)

    @override
    def observe(
        self,
        rounds: Collection[tuple[int, int]],
        verified: Choice,
        timed: TimedStep | None,
        drafted: Choice,
        info: RoundInfo = UNPLANNED,
    ) -> None:
        num_reqs = len(rounds) if timed is None else timed.step.num_reqs
        for stats in self._buckets:
            stats.fade(num_reqs)
        if timed is not None:
            self._buckets[info.bucket].last_made[verified] = self._num_steps
        super().observe(rounds, verified, timed, drafted, info)

    def _observe_round(
        self, choice: Choice, num_verified: int, num_accepted: int, count: int, info: RoundInfo
    ) -> None:
        for each in self._buckets:
            each.fade_tokens(count)
        stats, tokens = self._buckets[info.bucket], count * (1.0 + num_accepted)
        # During plain decoding trials begin at every token with equal probability, whatever they bring.
        stats.tokens += count if self._current == PLAIN else tokens
        chosen_tokens = 0.0 if info.is_planned else tokens
        observed = list[RoundAverages]()
        if choice != self.unchecked:
            observed.append(stats.checked)
            stats.checked_tokens += chosen_tokens
        else:
            stats.unchecked_tokens += chosen_tokens
            if not info.is_planned:
                observed.append(stats.chosen_unchecked)
            # Rounds that workers chose are a biased sample, unless they choose all.
            if info.is_planned or stats.thresholds.min_expected_accepted <= 0.0:
                observed.append(stats.tried_unchecked)
        for averages in observed:
            averages.observe(num_verified, num_accepted, info.num_passes, count)

    def _is_trial(self, verified: Choice, drafted: Choice, info: RoundInfo) -> bool:
        # A planned round that workers choose in most cases of its bucket costs nothing.
        if self._current == PLAIN or not {verified, drafted} <= {self._current, self.unchecked}:
            return super()._is_trial(verified, drafted, info)
        are_mostly_unchecked = self._buckets[info.bucket].unchecked_share > 0.5
        return info.is_planned and (verified == self.unchecked) != are_mostly_unchecked

    def _usual_seconds_per_token(self, verified: Choice, info: RoundInfo) -> float:
        if verified == PLAIN:  # the bucket is unknown
            return self._seconds_per_token
        return self._buckets[info.bucket].seconds_per_token

    def _is_chosen_by_workers(self, choice: Choice) -> bool:
        return self._current != PLAIN and choice in (self._current, self.unchecked)

    def _is_rare(self, choice: Choice) -> bool:
        is_lookup_trial = self._current == PLAIN and choice == self.unchecked
        pause = _STEPS_BETWEEN_LOOKUP_TRIALS if is_lookup_trial else _RARE_AFTER
        if self._num_steps - self._last_planned[choice] < pause:
            return False  # a trial may cost next to nothing, but its result has to be learned
        if self._is_chosen_by_workers(choice):
            return self._steps_since(choice) > _RARE_AFTER
        return choice != self._current

    def _steps_since(self, choice: Choice) -> int:
        """Return the steps since the choice was last made.

        For the two that workers choose between: in the bucket where that is longest ago, among those in
        which the other one was made since.
        """
        latest = self._last_tried[choice]
        if self._is_chosen_by_workers(choice):
            other = self.unchecked if choice == self._current else self._current
            for last_made in (stats.last_made for stats in self._buckets):
                if last_made[other] > max(last_made[choice], self._last_planned[choice]):
                    latest = min(latest, last_made[choice])
        return self._num_steps - latest

    def _plan_trial(self, rates: dict[Choice, float], num_reqs: int, context_tokens: int) -> None:
        super()._plan_trial(rates, num_reqs, context_tokens)
        for trial in self._trial:
            self._last_planned[trial] = self._num_steps

    def _next_trial(
        self, others: Sequence[Choice], rates: dict[Choice, float], num_reqs: int, context_tokens: int
    ) -> Choice:
        # The most overdue one: the credit of the time since its last trial exceeds its cost by the most.
        # While that waits for credit, cheap ones go first, for half of what is earned.
        tokens = num_reqs * self._tokens_of(self._current)
        earned = TRIAL_SHARE * tokens / rates[self._current]
        costs = {choice: self._trial_cost(choice, rates, num_reqs, context_tokens) for choice in others}
        paid = {choice: earned * self._steps_since(choice) for choice in others}
        overdue = {choice: paid[choice] - costs[choice] for choice in others}
        most = max(others, key=overdue.__getitem__)
        cheap = [choice for choice in others if costs[choice] <= paid[choice] / (2 * len(others))]
        must_wait = costs[most] > self._credit_seconds
        return max(cheap, key=overdue.__getitem__) if must_wait and cheap else most

    def _trial_cost(
        self, trial: Choice, rates: dict[Choice, float], num_reqs: int, context_tokens: int
    ) -> float:
        tokens = TRIAL_STEPS * num_reqs * self._tokens_of(trial)
        if trial == PLAIN:
            return max(0.0, tokens / rates[PLAIN] - tokens / rates[self._current])
        batch, longer = _Batch(num_reqs, context_tokens), 0.0
        for share, stats in self._by_share():
            tried = self._tried_seconds_per_token(stats, trial, batch)
            longer += share * max(0.0, tried - self._bucket_seconds_per_token(stats, self._current, batch))
        return tokens * longer

    def _calibration(self, num_reqs: int, context_tokens: int) -> list[Choice]:
        # Short once times of other sizes are known, as other steps are expensive beside the chosen rounds.
        # Checked drafts are tried even if they are the current choice: workers may use lookups alone.
        if not len(self.times):
            return super()._calibration(num_reqs, context_tokens)
        choices = (*self._only_tried, self._checked)
        return [choice for choice in choices for _ in range(CALIBRATION_STEPS)]

    def _decide(self, num_reqs: int, context_tokens: int) -> None:
        if self._current == PLAIN:
            batch = _Batch(num_reqs, context_tokens)
            # No worker feedback yet: assume the cheaper of the two.
            for stats in self._buckets:
                unchecked = self._tried_seconds_per_token(stats, self.unchecked, batch)
                checked = self._tried_seconds_per_token(stats, self._checked, batch)
                stats.expect(are_checked=checked < unchecked)
        super()._decide(num_reqs, context_tokens)

    def _switch(self, rates: dict[Choice, float]) -> None:
        # Drafting without checks and without lookup results is nearly as fast as plain decoding.
        before = self._current
        if self._current != PLAIN or max(rates.values()) > _MIN_SPEEDUP * rates[PLAIN]:
            super()._switch(rates)
        if rates[self._current] < rates[PLAIN]:
            self._current = PLAIN
            self.num_switches += 1
        if (before == PLAIN) != (self._current == PLAIN):
            for share, stats in self._by_share():  # rounds are weighted differently from now on
                stats.tokens = share * GUESS_WEIGHT

    @override
    def rates(self, num_reqs: int, context_tokens: int) -> dict[Choice, float]:
        batch, rates = _Batch(num_reqs, context_tokens), {}
        for choice in (PLAIN, self.unchecked, self._checked):
            rates[choice] = 1.0 / sum(
                share * self._bucket_seconds_per_token(stats, choice, batch)
                for share, stats in self._by_share()
            )
        return rates

    def _by_share(self) -> list[tuple[float, BucketStats]]:
        """Return the buckets with their shares of all tokens."""
        tokens = sum(stats.tokens for stats in self._buckets)
        return [(stats.tokens / tokens, stats) for stats in self._buckets]

    def _bucket_seconds_per_token(self, stats: BucketStats, choice: Choice, batch: _Batch) -> float:
        """Return the seconds per token in a bucket, including rounds that workers leave unchecked."""
        tried = self._tried_seconds_per_token(stats, choice, batch)
        if choice != self._checked:
            return tried
        share, averages = stats.unchecked_share, stats.chosen_unchecked
        unchecked = self._round_seconds(averages, 0, batch) / averages.tokens
        return share * unchecked / batch.num_reqs + (1.0 - share) * tried

    def _tried_seconds_per_token(self, stats: BucketStats, choice: Choice, batch: _Batch) -> float:
        """Return the seconds per token in a bucket if all rounds are drafted by `choice`."""
        if choice == PLAIN:
            return self.times.predict(Step(*batch, 0.0, 0.0, 0)) / batch.num_reqs
        averages = stats.averages(choice)
        seconds = self._round_seconds(averages, self.budget_of(choice), batch)
        return seconds / (batch.num_reqs * averages.tokens)

    def _round_seconds(self, averages: RoundAverages, budget: int, batch: _Batch) -> float:
        num_passes = averages.num_passes if budget else 0.0
        return self.times.predict(Step(*batch, averages.verified, num_passes, budget))

    def _averages(self, choice: Choice) -> list[tuple[float, RoundAverages]]:
        """Return the choice's averages in each bucket, with the bucket's share of the rounds."""
        averages = [(share, stats.averages(choice)) for share, stats in self._by_share()]
        rounds = sum(share / own.tokens for share, own in averages)
        return [(share / own.tokens / rounds, own) for share, own in averages]

    def _tokens_of(self, choice: Choice) -> float:
        """Return the mean tokens per request and round."""
        if choice == PLAIN:
            return 1.0
        return sum(share * own.tokens for share, own in self._averages(choice))

    def _step(self, num_reqs: int, context_tokens: int, verified: Choice, drafted: Choice) -> Step:
        num_verified = num_passes = 0.0
        if verified.drafts:
            num_verified = sum(share * own.verified for share, own in self._averages(verified))
        if budget := self.budget_of(drafted):
            num_passes = sum(share * own.num_passes for share, own in self._averages(drafted))
        return Step(num_reqs, context_tokens, num_verified, num_passes, budget)

    def _update_thresholds(self, num_reqs: int, context_tokens: int) -> None:
        if self._first:  # step times are unknown
            for stats in self._buckets:
                stats.thresholds = stats.thresholds._replace(min_gain=_FIRST_MIN_GAIN * num_reqs)
            return
        batch = _Batch(num_reqs, context_tokens)
        position = self.times.position_seconds(*batch)
        draft_pass = self.times.pass_seconds(*batch, self.budget)
        for stats in self._buckets:
            rate, min_expected_accepted = self._rate_and_threshold(stats, batch)
            # Also during plain decoding: trials of drafts use these thresholds.
            stats.thresholds = Thresholds(rate * position, rate * draft_pass, min_expected_accepted)
            stats.seconds_per_token = self._bucket_seconds_per_token(stats, self._current, batch)

    def _rate_and_threshold(self, stats: BucketStats, batch: _Batch) -> tuple[float, float]:
        """Return the tokens per second available in a bucket, and its `min_expected_accepted`."""
        rate, worth = batch.num_reqs / self.times.predict(Step(*batch, 0.0, 0.0, 0)), 0.0
        if self._current != PLAIN:
            checked = stats.checked
            tokens = batch.num_reqs * checked.tokens
            seconds = self._round_seconds(checked, self.budget, batch)
            rate = max(rate, tokens / seconds)
            worth = inf if checked.is_guess else tokens - rate * seconds  # first learn what checks bring
        without_drafts = batch.num_reqs - rate * self.times.predict(Step(*batch, NONE_FOUND, 0.0, 0))
        return rate, worth - without_drafts
