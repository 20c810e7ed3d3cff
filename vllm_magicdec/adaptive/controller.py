# SPDX-License-Identifier: Apache-2.0
"""Choice of the speculation length from acceptance counts and step times.

The rule is MagicDec's Eq. 2 (arXiv 2408.11049) with measured times. Of all speculation lengths gamma,
including 0, take the one with the highest expected tokens per second for the current batch,

    rate(gamma) = n * Omega(gamma) / T(n, C, verified=gamma, drafted=gamma)

where Omega(gamma) is the expected number of tokens per round at the recent acceptance. The choice changes
only for a clear gain. Lengths that look worse are tried occasionally, for a fixed share of the time: there
is no other way to know their times and acceptance.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from vllm_magicdec.adaptive.draft_plan import DraftPlan
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep

# Smallest ratio of rates for which the choice changes, so that noise does not make it flap.
_CLEAR_GAIN = 1.01
# Share of the time that trials may cost, measured in decode-only steps.
TRIAL_SHARE = 0.005
# Credit for trials is capped at that of so many steps, so that cheap phases do not pay for expensive ones.
_MAX_CREDIT_STEPS = 10_000
# A hiccup in a trial is charged as at most this multiple of the step's predicted time.
_MAX_MISS = 10
# Steps per trial: the first makes the drafts, the others also verify them.
TRIAL_STEPS = 2
# The choice is revised after so many steps, and whenever the batch size changes.
_STEPS_PER_CHOICE = 4
_STEPS_PER_FIT = 64
# The first calibration step verifies other drafts; a hiccup among the other three is not the median.
CALIBRATION_STEPS = 4
# Steps from a choice until its drafts' verification is learned, with asynchronous scheduling.
_STEPS_UNTIL_LEARNED = 3
# Decay per step of the achieved speedup.
_SPEEDUP_DECAY = 0.99


class Choice(NamedTuple):
    """The drafts of the next step."""

    drafts: int  # per request, at most; 0 is plain decoding
    lookups_alone: bool = False  # all drafts are looked up and no draft step is made


PLAIN = Choice(0)


class RoundInfo(NamedTuple):
    """How a step's drafts were made, beside the choice."""

    num_passes: int = 0  # draft steps
    is_planned: bool = False  # `Controller.is_planned` of the choice
    bucket: int = 0  # `DraftLists.bucket`


UNPLANNED = RoundInfo()


class Acceptance:
    """Decaying acceptance rates by draft position.

    Args:
        max_tokens: maximum drafts per round.
        memory: rounds of single requests after which an observation has lost 63 % of its weight.
    """

    def __init__(self, max_tokens: int, memory: float = 128.0) -> None:
        self._decay = 1.0 - 1.0 / memory
        self._tried = [0.0] * max_tokens
        self._accepted = [0.0] * max_tokens

    def observe(self, drafted: int, accepted: int, count: int = 1) -> None:
        """Add `count` rounds of single requests in which `accepted` of `drafted` tokens were accepted."""
        decay = self._decay**count
        for position in range(drafted):
            # Drafts after the first rejected one carry no information.
            self._tried[position] = decay * self._tried[position] + count * (position <= accepted)
            self._accepted[position] = decay * self._accepted[position] + count * (position < accepted)

    def rates(self) -> list[float]:
        """Return P(draft i is accepted | all before it were) for each i.

        Positions with few observations are smoothed towards the overall mean, which has a cautious prior.
        """
        overall = (sum(self._accepted) + 3.0) / (sum(self._tried) + 4.0)
        return [
            (accepted + 4.0 * overall) / (tried + 4.0)
            for accepted, tried in zip(self._accepted, self._tried, strict=True)
        ]

    def tokens_per_round(self) -> list[float]:
        """Return Omega(gamma), the expected tokens of a round, for gamma = 0, 1, ... max_tokens."""
        expected, reached = [1.0], 1.0
        for rate in self.rates():
            reached *= rate
            expected.append(expected[-1] + reached)
        return expected


class Forecast(NamedTuple):
    """Expected effect of the current choice."""

    choice: Choice
    speedup: float  # over plain decoding of the same batch
    draft_share: float  # of a round's time, spent in draft steps


class Controller:
    """Chooses the speculation length of every step of one engine.

    Args:
        lengths: possible numbers of drafts, ascending. Plain decoding is tried occasionally even if 0 is
            not among them, so that the speedup is known.
        budget: maximum K/V entries that each draft step reads per request.
        times: times of a profile, or empty ones. If empty, the first steps of each batch size and context
            length (by factors of two) try a few lengths.
    """

    def __init__(self, lengths: Sequence[int], budget: int, times: StepTimes) -> None:
        self.times = times
        self.acceptance = Acceptance(lengths[-1])
        self.num_switches = 0
        self.lengths = tuple(length for length in lengths if length)
        self.budget = budget
        self.is_planned = False  # whether the latest choice is a trial or a calibration step
        self._drafting = [Choice(length) for length in self.lengths]
        self._choices = [PLAIN, *self._drafting] if 0 in lengths else self._drafting
        self._only_tried = [PLAIN]  # in addition to `_drafting`, even if never chosen
        self._current = Choice(self._length_up_to(4))
        # Choices to try, last first: in the next steps, before anything is known, and by region of batches.
        self._trial: list[Choice] = []
        self._first: list[Choice] = []
        self._calibrations: dict[tuple[int, int], list[Choice]] = {}
        self._upcoming = self._trial  # the one of these lists that the latest choice was taken from
        self._num_free = 0  # steps that are not charged as trials
        self._seconds_per_token = 0.0  # of the current choice and the batch that it was made for
        self._has_tried = False  # a list of trials has ended: fit at once
        self._credit_seconds = 0.0
        self._last_tried: Counter[Choice] = Counter()  # step number
        self._num_steps = 0
        self._plain_seconds = self._seconds = 0.0
        self._decided_at = -_STEPS_PER_CHOICE
        self._decided_for = 0  # requests; 0 if no decision is valid

    def choose(self, num_reqs: int, context_tokens: int, *, is_timed: bool = True) -> Choice:
        """Choose the drafts of the next step.

        Args:
            num_reqs: requests in the batch.
            context_tokens: K/V entries of all requests.
            is_timed: whether the step's time will be usable, i.e. it prefills nothing and does the same
                for every request.
        """
        self._upcoming = self._trial
        if is_timed and not self._upcoming:
            self._upcoming = self._calibration_for(num_reqs, context_tokens)
        if not (self._upcoming or self._first) and len(self.times) and num_reqs != self._decided_for:
            self._decide(num_reqs, context_tokens)
            self._upcoming = self._trial
        self.is_planned = bool(self._upcoming)
        if not self._upcoming:
            return self._current
        self._has_tried |= len(self._upcoming) == 1
        return self._upcoming.pop()

    def _decide(self, num_reqs: int, context_tokens: int) -> None:
        self._decided_at, self._decided_for = self._num_steps, num_reqs
        rates = self.rates(num_reqs, context_tokens)
        self._switch(rates)
        self._seconds_per_token = 1.0 / rates[self._current]
        self._update_thresholds(num_reqs, context_tokens)
        self._plan_trial(rates, num_reqs, context_tokens)

    def _update_thresholds(self, num_reqs: int, context_tokens: int) -> None:
        """Update the thresholds of `plan`; there are none without lookups."""

    def plan(self, choice: Choice) -> DraftPlan:
        """Return the message to the workers for the latest choice."""
        return DraftPlan(choice.drafts, lookups_alone=choice.lookups_alone)

    def observe(
        self,
        rounds: Collection[tuple[int, int]],
        verified: Choice,
        timed: TimedStep | None,
        drafted: Choice,
        info: RoundInfo = UNPLANNED,
    ) -> None:
        """Learn from a step that has ended.

        Args:
            rounds: (verified, accepted) drafts of each request that had some.
            verified: choice that made these drafts; `PLAIN` if there were none.
            timed: the step and its time; None if it prefilled or differed between requests, in which case
                only acceptance is learned.
            drafted: choice by which the timed step drafted.
            info: how the verified drafts were made.
        """
        # A large batch has few different outcomes.
        for (num_verified, num_accepted), count in Counter(rounds).items():
            self._observe_round(verified, num_verified, num_accepted, count, info)
        if timed is not None:
            self._num_steps += 1
            is_first = len(self.times) == 0
            self.times.add(timed)
            if is_first or self._has_tried or self._num_steps % _STEPS_PER_FIT == 0:
                self.times.fit()
                self._has_tried = False
            self._last_tried[verified] = self._num_steps
            self._account(rounds, timed)
            is_trial = self._is_trial(verified, drafted, info) and not self._num_free
            self._num_free = max(0, self._num_free - 1)
            lost = self._lost_seconds(rounds, verified, timed, info) if is_trial else 0.0
            self._credit_seconds += TRIAL_SHARE * timed.seconds - lost
            max_credit = _MAX_CREDIT_STEPS * TRIAL_SHARE * timed.seconds
            self._credit_seconds = min(self._credit_seconds, max_credit)
            # Decide here, while a step is computed, and not in `choose`, which delays the next one.
            is_planned = self._upcoming or self._trial or self._first
            if not is_planned and self._num_steps - self._decided_at >= _STEPS_PER_CHOICE:
                self._decide(timed.step.num_reqs, timed.step.context_tokens)

    def _observe_round(
        self, choice: Choice, num_verified: int, num_accepted: int, count: int, info: RoundInfo
    ) -> None:
        self.acceptance.observe(num_verified, num_accepted, count)

    def _is_trial(self, verified: Choice, drafted: Choice, info: RoundInfo) -> bool:
        return info.is_planned or {verified, drafted} != {self._current}

    def _lost_seconds(
        self, rounds: Collection[tuple[int, int]], verified: Choice, timed: TimedStep, info: RoundInfo
    ) -> float:
        """Return the extra seconds of a trial step over the current choice for the same tokens."""
        step = timed.step
        # The time per token is that of one batch size, and a step in flight may have the previous size.
        if step.num_reqs != self._decided_for:
            return 0.0
        tokens = step.num_reqs + sum(accepted for _, accepted in rounds)
        seconds = min(timed.seconds, _MAX_MISS * self.times.pace * self.times.predict(step))
        return seconds - tokens * self._usual_seconds_per_token(verified, info) * self.times.pace

    def _usual_seconds_per_token(self, verified: Choice, info: RoundInfo) -> float:
        return self._seconds_per_token

    def _account(self, rounds: Collection[tuple[int, int]], timed: TimedStep) -> None:
        """Compare with the time that plain decoding would have taken for the same tokens."""
        step = timed.step
        plain_step = self._step(step.num_reqs, step.context_tokens, PLAIN, PLAIN)
        tokens = 1.0 + sum(accepted for _, accepted in rounds) / step.num_reqs
        plain = tokens * self.times.pace * self.times.predict(plain_step)
        self._plain_seconds = _SPEEDUP_DECAY * self._plain_seconds + plain
        self._seconds = _SPEEDUP_DECAY * self._seconds + timed.seconds

    @property
    def achieved_speedup(self) -> float:
        """Recent speedup over plain decoding; 1 before the first step."""
        return self._plain_seconds / self._seconds if self._seconds else 1.0

    def rates(self, num_reqs: int, context_tokens: int) -> dict[Choice, float]:
        """Return the expected tokens per second of plain decoding and of every length."""
        return {
            choice: num_reqs * tokens / self._predict(num_reqs, context_tokens, choice, choice)
            for choice, tokens in self._tokens_per_round().items()
        }

    def _tokens_per_round(self) -> dict[Choice, float]:
        expected = self.acceptance.tokens_per_round()
        return {choice: expected[choice.drafts] for choice in (PLAIN, *self._drafting)}

    def _step(self, num_reqs: int, context_tokens: int, verified: Choice, drafted: Choice) -> Step:
        """Return the step that verifies drafts of one choice and drafts by another."""
        return Step(num_reqs, context_tokens, verified.drafts, drafted.drafts, self.budget_of(drafted))

    def _predict(self, num_reqs: int, context_tokens: int, verified: Choice, drafted: Choice) -> float:
        return self.times.predict(self._step(num_reqs, context_tokens, verified, drafted))

    def budget_of(self, choice: Choice) -> int:
        """Return the maximum K/V entries that each draft step reads per request; 0 without draft steps."""
        return self.budget if choice.drafts and not choice.lookups_alone else 0

    def forecast(self, num_reqs: int, context_tokens: int) -> Forecast:
        """Predict the effect of the current choice for a batch."""
        rates = self.rates(num_reqs, context_tokens)
        choice = self._current
        whole = self._predict(num_reqs, context_tokens, choice, choice)
        verification = self._predict(num_reqs, context_tokens, choice, PLAIN)
        return Forecast(choice, rates[choice] / rates[PLAIN], max(0.0, 1.0 - verification / whole))

    def min_context(self, num_reqs: int, max_context: int) -> int | None:
        """Return the tokens per request above which speculation pays (the paper's S_inflection).

        Returns:
            None if it does not pay at any context up to `max_context`.
        """
        low, high = 0, max_context

        def pays(context: int) -> bool:
            rates = self.rates(num_reqs, num_reqs * context)
            return max(rates.values()) > _CLEAR_GAIN * rates[PLAIN]

        if not pays(high):
            return None
        while high - low > max(1, high // 64):
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle, high)
        return high

    def _switch(self, rates: dict[Choice, float]) -> None:
        best = max(self._choices, key=rates.__getitem__)
        if rates[best] > _CLEAR_GAIN * rates[self._current]:
            self._current = best
            self.num_switches += 1

    def _plan_trial(self, rates: dict[Choice, float], num_reqs: int, context_tokens: int) -> None:
        """Plan a trial if the credit covers its predicted cost; the measured cost is charged later."""
        others = [choice for choice in (*self._only_tried, *self._drafting) if self._is_rare(choice)]
        if not others:
            return
        trial = self._next_trial(others, rates, num_reqs, context_tokens)
        if self._credit_seconds >= self._trial_cost(trial, rates, num_reqs, context_tokens):
            self._trial = [trial] * TRIAL_STEPS
            self._last_tried[trial] = self._num_steps

    def _next_trial(
        self, others: Sequence[Choice], rates: dict[Choice, float], num_reqs: int, context_tokens: int
    ) -> Choice:
        return min(others, key=lambda choice: self._last_tried[choice])

    def _is_rare(self, choice: Choice) -> bool:
        """Return whether regular steps give no information about this choice."""
        return choice != self._current

    def _trial_cost(
        self, trial: Choice, rates: dict[Choice, float], num_reqs: int, context_tokens: int
    ) -> float:
        """Return the seconds lost by a trial's steps and the next one, which verifies its last drafts."""
        choices = [self._current, *[trial] * TRIAL_STEPS, self._current]
        seconds = sum(
            self._predict(num_reqs, context_tokens, verified, drafted)
            for verified, drafted in pairwise(choices)
        )
        expected = self._tokens_per_round()
        tokens = num_reqs * sum(expected[verified] for verified in choices[:-1])
        return max(0.0, seconds - tokens / rates[self._current])

    def _length_up_to(self, limit: int) -> int:
        """Return the largest length up to `limit`, or else the smallest one."""
        return max((n for n in self.lengths if n <= limit), default=self.lengths[0])

    def _calibration_for(self, num_reqs: int, context_tokens: int) -> list[Choice]:
        """Return the list of calibration steps left for such a batch; the caller pops from it.

        Lists are kept by region, so that a small batch does not consume the calibration of a large one.
        The first list, before anything is known, serves any batch.
        """
        region = num_reqs.bit_length(), context_tokens.bit_length()  # equal up to a factor of two
        if not self._first and region not in self._calibrations:
            is_known = any(
                self.times.count(self._step(num_reqs, context_tokens, choice, choice))
                for choice in (PLAIN, *self._drafting)
            )
            calibration = [] if is_known else self._calibration(num_reqs, context_tokens)
            if not len(self.times):
                self._first, calibration = calibration, []
            self._calibrations[region] = calibration
        left = self._first or self._calibrations[region]
        if left:
            self._update_thresholds(num_reqs, context_tokens)
            self._num_free = _STEPS_UNTIL_LEARNED
            self._decided_for = 0  # decide anew afterwards
        return left

    def _calibration(self, num_reqs: int, context_tokens: int) -> list[Choice]:
        """Return a few steps each of plain decoding, few drafts and many."""
        lengths = sorted({self._length_up_to(2), self._length_up_to(4), self.lengths[-1]})
        choices = (*self._only_tried, *map(Choice, lengths))
        return [choice for choice in choices for _ in range(CALIBRATION_STEPS)]
