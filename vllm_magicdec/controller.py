# SPDX-License-Identifier: Apache-2.0
"""Chooses how many tokens to draft, step by step, from counts and times alone.

The rule is MagicDec's Eq. 2 (arXiv 2408.11049) with measured times: of all speculation lengths gamma,
0 included, take the one that promises the most tokens per second for the batch at hand,

    rate(gamma) = n * Omega(gamma) / T(n, C, verified=gamma, drafted=gamma)

Omega(gamma) is the expected tokens of a round at the acceptance seen lately. Two things keep the choice
calm and honest: it changes only for a clear gain, and lengths that look worse are tried now and then, for
a fixed share of the time, because their times and their acceptance can be known in no other way.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from vllm_magicdec.step_times import Step, StepTimes, TimedStep

# A change must promise at least this much more, so that noise does not make the choice flap.
_CLEAR_GAIN = 1.02
# Share of the time that trying other lengths may cost.
_TRIAL_SHARE = 0.005
# Steps of one trial: the first sees the drafts made, the others see them verified too.
_TRIAL_STEPS = 2
# The choice is looked at again after so many steps, and whenever the batch changes.
_STEPS_PER_CHOICE = 4
_STEPS_PER_FIT = 64
_CALIBRATION_STEPS = 3
# What a step still counts for in the achieved speedup after the next one.
_FORGET = 0.99


class Acceptance:
    """How far drafts get, from the rounds seen lately.

    Args:
        max_tokens: most drafts of a round.
        memory: rounds of single requests after which an observation has lost 63 % of its weight.
    """

    def __init__(self, max_tokens: int, memory: float = 128.0) -> None:
        self._decay = 1.0 - 1.0 / memory
        self._tried = [0.0] * max_tokens
        self._accepted = [0.0] * max_tokens

    def observe(self, drafted: int, accepted: int, count: int = 1) -> None:
        """In `count` requests' rounds `accepted` of `drafted` tokens stood."""
        decay = self._decay**count
        for place in range(drafted):
            # A draft behind the first rejected one says nothing.
            tried, stood = count * (place <= accepted), count * (place < accepted)
            self._tried[place] = decay * self._tried[place] + tried
            self._accepted[place] = decay * self._accepted[place] + stood

    def rates(self) -> list[float]:
        """P(draft i stands | all before it stood), for each place i."""
        # Places seldom reached lean on all places together; those on a cautious guess.
        overall = (sum(self._accepted) + 3.0) / (sum(self._tried) + 4.0)
        return [
            (stood + 4.0 * overall) / (tried + 4.0)
            for stood, tried in zip(self._accepted, self._tried, strict=True)
        ]

    def tokens_per_round(self) -> list[float]:
        """Omega(gamma), expected tokens of a round, for gamma = 0, 1, ... max_tokens."""
        expected, reached = [1.0], 1.0
        for rate in self.rates():
            reached *= rate
            expected.append(expected[-1] + reached)
        return expected


@dataclass(frozen=True)
class Forecast:
    """What the controller expects of its choice."""

    num_drafts: int
    speedup: float
    """Over plain decoding of the same batch."""
    draft_share: float
    """Draft steps' share of a round's time."""


class Controller:
    """Chooses speculation lengths for one engine.

    Args:
        max_tokens: most drafts of a round.
        times: a profile's times, or empty ones: then the first steps of every batch size and context
            length that is new by a factor of two try a few lengths each.
    """

    def __init__(self, max_tokens: int, times: StepTimes) -> None:
        self.times = times
        self.acceptance = Acceptance(max_tokens)
        self.num_switches = 0
        self._lengths = range(max_tokens + 1)
        self._current = min(4, max_tokens)
        self._plan: list[int] = []  # lengths of the steps that come next, last first
        self._has_tried = False  # a plan has ended: what it showed is to be learnt at once
        self._credit_seconds = 0.0
        self._last_tried = [0] * (max_tokens + 1)
        self._num_steps = 0
        self._plain_seconds = self._seconds = 0.0
        self._decided_at = -_STEPS_PER_CHOICE
        self._decided_for = 0
        self._regions: set[tuple[int, int]] = set()

    def choose(self, num_reqs: int, context_tokens: int) -> int:
        """The number of drafts for the next step.

        Args:
            num_reqs: requests that will be drafted for.
            context_tokens: K/V entries they hold together.
        """
        if not self._plan and self._is_unknown(num_reqs, context_tokens):
            self._plan = self._calibration()
        if self._plan:
            self._has_tried = len(self._plan) == 1
            return self._plan.pop()
        due = self._num_steps - self._decided_at >= _STEPS_PER_CHOICE or num_reqs != self._decided_for
        if due and len(self.times):
            self._decided_at, self._decided_for = self._num_steps, num_reqs
            rates = self.rates(num_reqs, context_tokens)
            self._switch(rates)
            self._consider_trial(rates, num_reqs, context_tokens)
            if self._plan:
                return self._plan.pop()
        return self._current

    def observe(self, rounds: Collection[tuple[int, int]], timed: TimedStep | None) -> None:
        """A step has been made.

        Args:
            rounds: (drafted, accepted) of each request that verified drafts.
            timed: what the step did and how long it took; None if it did not do the same for every
                request, or prefilled some: such steps tell of acceptance only.
        """
        # A large batch has few different outcomes.
        for (drafted, accepted), count in Counter(rounds).items():
            self.acceptance.observe(drafted, accepted, count)
        if timed is not None:
            self._observe_time(timed)
            self._account(rounds, timed)

    def _observe_time(self, timed: TimedStep) -> None:
        self._num_steps += 1
        self._last_tried[timed.step.verified] = self._num_steps
        self._credit_seconds += _TRIAL_SHARE * timed.seconds
        is_first = len(self.times) == 0
        self.times.add(timed)
        if is_first or self._has_tried or self._num_steps % _STEPS_PER_FIT == 0:
            self.times.fit()
            self._has_tried = False

    def _account(self, rounds: Collection[tuple[int, int]], timed: TimedStep) -> None:
        """Compare with the time that plain decoding would have taken for the same tokens."""
        step = timed.step
        plain = self.times.predict(Step(step.num_reqs, step.context_tokens, 0, 0))
        tokens = 1.0 + sum(accepted for _, accepted in rounds) / step.num_reqs
        self._plain_seconds = _FORGET * self._plain_seconds + tokens * plain
        self._seconds = _FORGET * self._seconds + timed.seconds

    @property
    def achieved_speedup(self) -> float:
        """Over plain decoding, in the latest steps; 1 before the first."""
        return self._plain_seconds / self._seconds if self._seconds else 1.0

    def rates(self, num_reqs: int, context_tokens: int) -> list[float]:
        """Tokens per second to expect of each length, 0 included."""
        return [
            num_reqs * tokens / self.times.predict(Step(num_reqs, context_tokens, length, length))
            for length, tokens in zip(self._lengths, self.acceptance.tokens_per_round(), strict=True)
        ]

    def forecast(self, num_reqs: int, context_tokens: int) -> Forecast:
        """What to expect of the current choice for such a batch."""
        rates = self.rates(num_reqs, context_tokens)
        length = self._current
        whole = self.times.predict(Step(num_reqs, context_tokens, length, length))
        verification = self.times.predict(Step(num_reqs, context_tokens, length, 0))
        share = max(0.0, 1.0 - verification / whole)
        return Forecast(length, rates[length] / rates[0], share)

    def least_context(self, num_reqs: int, max_context: int) -> int | None:
        """The context per request above which speculation pays (the paper's S_inflection), in tokens.

        Returns:
            None if it does not pay at any context up to `max_context`.
        """
        low, high = 0, max_context

        def pays(context: int) -> bool:
            rates = self.rates(num_reqs, num_reqs * context)
            return max(rates) > _CLEAR_GAIN * rates[0]

        if not pays(high):
            return None
        while high - low > max(1, high // 64):
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle, high)
        return high

    def _switch(self, rates: list[float]) -> None:
        best = max(self._lengths, key=rates.__getitem__)
        if best != self._current and rates[best] > _CLEAR_GAIN * rates[self._current]:
            self._current = best
            self.num_switches += 1

    def _consider_trial(self, rates: list[float], num_reqs: int, context_tokens: int) -> None:
        """Plan a trial of the length that was not tried for the longest time, if there is credit for it."""
        others = [length for length in self._lengths if length != self._current]
        stalest = min(others, key=self._last_tried.__getitem__)
        cost = self._trial_cost(stalest, rates, num_reqs, context_tokens)
        if self._credit_seconds >= cost:
            self._credit_seconds -= cost
            self._plan = [stalest] * _TRIAL_STEPS
            self._last_tried[stalest] = self._num_steps

    def _trial_cost(self, length: int, rates: list[float], num_reqs: int, context_tokens: int) -> float:
        """Seconds lost by a trial: its steps and the one after, which has the trial's drafts to verify."""
        current = self._current
        lengths = [current, *[length] * _TRIAL_STEPS, current]
        seconds = sum(
            self.times.predict(Step(num_reqs, context_tokens, verified, drafted))
            for verified, drafted in pairwise(lengths)
        )
        expected = self.acceptance.tokens_per_round()
        tokens = num_reqs * sum(expected[verified] for verified in lengths[:-1])
        return max(0.0, seconds - tokens / rates[current])

    def _is_unknown(self, num_reqs: int, context_tokens: int) -> bool:
        """Whether no batch of about this size and context has been met; it has now."""
        region = (num_reqs.bit_length(), context_tokens.bit_length())
        if region in self._regions:
            return False
        self._regions.add(region)
        return not any(
            self.times.count(Step(num_reqs, context_tokens, length, length)) for length in self._lengths
        )

    def _calibration(self) -> list[int]:
        """A few steps each of plain decoding, few drafts and many."""
        lengths = sorted({0, min(2, self._lengths[-1]), min(4, self._lengths[-1]), self._lengths[-1]})
        return [length for length in lengths for _ in range(_CALIBRATION_STEPS)]
