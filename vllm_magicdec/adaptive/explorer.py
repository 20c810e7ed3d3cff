# SPDX-License-Identifier: Apache-2.0
"""Steps whose choice serves learning: a calibration of each size of batch, then trials within a budget."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from vllm_magicdec.adaptive.step_times import Batch, StepTimes, TimedStep
from vllm_magicdec.adaptive.value import PLAIN, Choice, RoundInfo, Value

# Share of the time that trials may cost, measured in decode-only steps.
_TRIAL_SHARE = 0.005
# Credit for trials is capped at that of so many steps, so that cheap phases do not pay for expensive ones.
_MAX_CREDIT_STEPS = 10_000
# A hiccup in a trial is charged as at most this multiple of the step's predicted time.
_MAX_MISS = 10
# Steps per trial: the first makes the drafts, the others also verify them.
_TRIAL_STEPS = 2
# The first calibration step verifies other drafts; a hiccup among the other three is not the median.
_CALIBRATION_STEPS = 4
# Later calibrations leave out drafts that are expected to take more than this multiple of the least time
# per token.
_PROMISING = 1.25
# Steps from a choice until its drafts' verification is learned, with asynchronous scheduling.
_STEPS_UNTIL_LEARNED = 3
# Steps without a choice after which it counts as rare.
_RARE_AFTER = 64


class Decision(NamedTuple):
    """The choice of regular steps, and what it costs."""

    choice: Choice
    batch: Batch  # for which it was made
    seconds: Sequence[float]  # usual ones per token of the batch, by bucket
    seconds_per_token: float  # over all buckets


class Explorer:
    """Plans calibrations and trials, and keeps account of their cost.

    Args:
        times: step times. The first steps of each batch size and context length (by factors of two) that
            they lack are a calibration.
    """

    def __init__(self, value: Value, times: StepTimes) -> None:
        self.is_planned = False  # whether the latest choice is a trial or a calibration step
        self.has_ended = False  # whether a calibration or trial has been chosen to its end: fit at once
        self.credit_seconds = 0.0  # that trials may lose
        self.decision: Decision | None = None  # the current one; None during a calibration
        self._value, self._times = value, times
        # Choices to try, last first: in the next steps, before anything is known, and by region of batches.
        self._trial: list[Choice] = []
        self._first: list[Choice] = []
        self._calibrations: dict[tuple[int, int], list[Choice]] = {}
        self._upcoming = self._trial  # the one of these lists that the latest choice was taken from
        self._num_free = 0  # steps that are not charged as trials
        self._num_steps = 0  # that were timed; the numbers below are of these
        self._seen: defaultdict[int, Counter[Choice]] = defaultdict(Counter)  # last verified, by bucket
        self._planned: Counter[Choice] = Counter()  # last planned as a trial

    @property
    def is_first(self) -> bool:
        """Whether the first calibration, before anything is known, has not ended."""
        return bool(self._first)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is planned."""
        return not (self._upcoming or self._trial or self._first)

    def look_ahead(self, batch: Batch, *, is_timed: bool) -> bool:
        """Find what is planned for the next step; return whether it belongs to a calibration."""
        self._upcoming = self._trial
        if self._upcoming or not is_timed:
            return False
        self._upcoming = self._calibration(batch)
        if self._upcoming:
            self._num_free = _STEPS_UNTIL_LEARNED
            self.decision = None  # decide anew afterwards
        return bool(self._upcoming)

    def take(self) -> Choice | None:
        """Return the choice that is planned for the next step, if there is one."""
        self._upcoming = self._upcoming or self._trial
        self.is_planned = bool(self._upcoming)
        self.has_ended |= len(self._upcoming) == 1
        return self._upcoming.pop() if self._upcoming else None

    def _calibration(self, batch: Batch) -> list[Choice]:
        """Return the calibration steps left for such a batch.

        Lists are kept by region, so that a small batch does not consume the calibration of a large one.
        The first list, before anything is known, is the longest and serves any batch.
        """
        region = batch.num_reqs.bit_length(), batch.context_tokens.bit_length()  # equal up to a factor of 2
        if not self._first and region not in self._calibrations:
            if not len(self._times):
                self._first = self._repeat(self._value.calibrated)
            means = map(self._value.mean, self._value.tried)
            is_known = any(self._times.count(batch.step(mean, mean)) for mean in means)
            if self._first or is_known:
                self._calibrations[region] = []
            elif self.has_ended:
                return []  # until the times are fitted
            else:
                self._calibrations[region] = self._repeat(self._promising(batch))
        return self._first or self._calibrations[region]

    @staticmethod
    def _repeat(choices: Sequence[Choice]) -> list[Choice]:
        return [choice for choice in choices for _ in range(_CALIBRATION_STEPS)]

    def _promising(self, batch: Batch) -> list[Choice]:
        """Return plain decoding and the drafts that the times of other batches suggest."""
        plain, *drafting = self._value.calibrated
        expected = [self._times.seconds_per_token(batch, self._value.mean(choice)) for choice in drafting]
        most = _PROMISING * min(expected)
        return [plain, *(choice for choice, own in zip(drafting, expected, strict=True) if own <= most)]

    def observe(
        self, timed: TimedStep, num_accepted: int, verified: Choice, drafted: Choice, info: RoundInfo
    ) -> None:
        """Earn credit by a step's time, and pay what a trial lost; arguments as in `Controller.observe`."""
        decision = self.decision
        self._num_steps += 1
        self._seen[info.bucket][verified] = self._num_steps
        if self._num_free:
            self._num_free -= 1
        # The time per token is that of one batch size, and a step in flight may have the previous size.
        elif (
            decision is not None
            and decision.batch.num_reqs == timed.step.num_reqs
            and self._is_trial(verified, drafted, info, decision.choice)
        ):
            self.credit_seconds -= self._lost_seconds(timed, num_accepted, verified, info, decision)
        self.credit_seconds += _TRIAL_SHARE * timed.seconds
        self.credit_seconds = min(self.credit_seconds, _MAX_CREDIT_STEPS * _TRIAL_SHARE * timed.seconds)

    def _is_trial(self, verified: Choice, drafted: Choice, info: RoundInfo, current: Choice) -> bool:
        """Return whether a step is none that workers would make of the current choice."""
        shares = self._value.mix(current, info.bucket)
        # A planned round that workers choose in most cases of its bucket costs nothing.
        is_unusual = info.is_planned and verified != max(shares, key=shares.__getitem__)
        return is_unusual or not {verified, drafted} <= shares.keys()

    def _lost_seconds(
        self, timed: TimedStep, num_accepted: int, verified: Choice, info: RoundInfo, decision: Decision
    ) -> float:
        """Return the extra seconds of a trial step over the current choice for the same tokens."""
        pace = self._times.pace
        seconds = min(timed.seconds, _MAX_MISS * pace * self._times.predict(timed.step))
        # The bucket of a plain step is unknown.
        usual = decision.seconds_per_token if verified == PLAIN else decision.seconds[info.bucket]
        return seconds - (timed.step.num_reqs + num_accepted) * usual * pace

    def plan(self, decision: Decision) -> None:
        """Plan a trial of the choice that was not seen for the longest time, unless credit is lacking.

        The credit must cover the predicted cost; the measured cost is charged later.
        """
        self.decision = decision
        rare = [choice for choice in self._value.tried if self._is_rare(choice, decision.choice)]
        if rare:
            trial = min(rare, key=self._last_seen)
            if self.credit_seconds >= self._cost(trial, decision):
                self._trial = [trial] * _TRIAL_STEPS
                self._planned[trial] = self._num_steps

    def _last_seen(self, choice: Choice) -> int:
        return max(numbers[choice] for numbers in (self._planned, *self._seen.values()))

    def _is_rare(self, choice: Choice, current: Choice) -> bool:
        """Return whether regular steps give no information about a choice."""
        if self._num_steps - self._planned[choice] < self._value.pause(choice, current):
            return False
        regular = self._value.mix(current, 0).keys()
        if choice not in regular:
            return True
        # Workers leave it out: in some bucket another one was made since, and it was not for long.
        return any(
            self._num_steps - seen[choice] > _RARE_AFTER
            and max(seen[other] for other in regular) > max(seen[choice], self._planned[choice])
            for seen in self._seen.values()
        )

    def _cost(self, trial: Choice, decision: Decision) -> float:
        """Return the seconds predicted to be lost until the last drafts of a trial are verified."""
        predict, batch = self._times.predict, decision.batch
        usual, tried = self._value.mean(decision.choice), self._value.mean(trial)
        rounds = [usual, *[tried] * _TRIAL_STEPS, usual]
        seconds = sum(predict(batch.step(verified, drafted)) for verified, drafted in pairwise(rounds))
        tokens = _TRIAL_STEPS * batch.num_reqs * tried.tokens
        worth = predict(batch.step(usual, usual)) + tokens * decision.seconds_per_token
        return max(0.0, seconds - worth)
