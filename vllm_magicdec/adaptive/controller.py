# SPDX-License-Identifier: Apache-2.0
"""Chooses how many tokens to draft, from counts and times alone.

The rule is MagicDec's Eq. 2 (arXiv 2408.11049) with measured times: of all speculation lengths gamma,
0 included, take the one that promises the most tokens per second for the batch at hand,

    rate(gamma) = n * Omega(gamma) / T(n, C, verified=gamma, drafted=gamma)

Omega(gamma) is the expected tokens of a round at the acceptance seen lately. Two things keep the choice
calm and honest: it changes only for a clear gain, and lengths that look worse are tried now and then, for a
fixed share of the time, because their times and their acceptance can be known in no other way.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from vllm_magicdec.adaptive.draft_plan import DraftPlan
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep

# A change must promise at least this much more, so that noise does not make the choice flap.
_CLEAR_GAIN = 1.01
# Share of the time that trying other lengths may cost, as measured in steps that only decode.
TRIAL_SHARE = 0.005
# Steps whose share is kept for trials, at most: those that cost nothing must not pay for dear ones to come.
_MOST_STEPS_OF_CREDIT = 10_000
# A hiccup in a trial counts for at most so many times what its step was predicted to take.
_MAX_MISS = 10
# Steps of one trial: the first sees the drafts made, the others see them verified too.
TRIAL_STEPS = 2
# The choice is looked at again after so many steps, and whenever the batch changes.
_STEPS_PER_CHOICE = 4
_STEPS_PER_FIT = 64
# The first of them verifies other drafts; of three alike, one hiccup does not make the median. Fewer are
# alike where other batches come between.
CALIBRATION_STEPS = 4
# From the choice of one to the lesson of the step that verified its drafts, if steps are scheduled ahead.
_STEPS_UNTIL_LEARNT = 3
# What a step still counts for in the achieved speedup after the next one.
_FORGET = 0.99


class Choice(NamedTuple):
    """What the next step drafts."""

    drafts: int
    """Per request, at most; 0 is plain decoding."""
    lookups_alone: bool = False
    """All drafts are looked up and no draft step is made."""


PLAIN = Choice(0)


class How(NamedTuple):
    """How a step's drafts came to be, beside what was chosen."""

    num_passes: int = 0
    """Draft steps."""
    is_planned: bool = False
    """`Controller.is_planned` of the choice."""
    kind: int = 0
    """`DraftLists.kind`."""


CHOSEN = How()  # as a choice's drafts usually do, where nobody looks anything up


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
        """P(draft i is accepted | all before it were), for each i.

        Positions seldom reached lean on the mean over all positions, and that one on a cautious guess.
        """
        overall = (sum(self._accepted) + 3.0) / (sum(self._tried) + 4.0)
        return [
            (accepted + 4.0 * overall) / (tried + 4.0)
            for accepted, tried in zip(self._accepted, self._tried, strict=True)
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

    choice: Choice
    speedup: float
    """Over plain decoding of the same batch."""
    draft_share: float
    """Draft steps' share of a round's time."""


class Controller:
    """Chooses speculation lengths for one engine.

    Args:
        lengths: numbers of drafts to choose among, ascending. Plain decoding is tried now and then even
            where 0 is not among them: what is gained over it is to be known.
        budget: K/V entries that each draft step reads per request, at most.
        times: a profile's times, or empty ones: then the first steps of every batch size and context
            length that is new by a factor of two try a few lengths.
    """

    def __init__(self, lengths: Sequence[int], budget: int, times: StepTimes) -> None:
        self.times = times
        self.acceptance = Acceptance(lengths[-1])
        self.num_switches = 0
        self.lengths = tuple(length for length in lengths if length)
        self.budget = budget
        self._drafting = [Choice(length) for length in self.lengths]
        self._choices = [PLAIN, *self._drafting] if 0 in lengths else self._drafting
        self._only_tried = [PLAIN]  # to know what it brings, also where it is not chosen
        self._current = Choice(self._length_up_to(4))
        # What is to be tried, last first: in the steps that come next; before anything is known; and in
        # batches of a region.
        self._trial: list[Choice] = []
        self._first: list[Choice] = []
        self._calibrations: dict[tuple[int, int], list[Choice]] = {}
        self._upcoming = self._trial  # the one of these that the latest choice was taken from, if any
        self._num_free = 0  # steps whose cost is no trial's
        self.is_planned = False
        """Whether the latest choice is a trial, or made to learn times."""
        self._seconds_per_token = 0.0  # with the present choice, of the batch that it was decided for
        self._has_tried = False  # a plan has ended: what it showed is to be learnt at once
        self._credit_seconds = 0.0
        self._last_tried: Counter[Choice] = Counter()  # at which step
        self._num_steps = 0
        self._plain_seconds = self._seconds = 0.0
        self._decided_at = -_STEPS_PER_CHOICE
        self._decided_for = 0  # requests; 0: for none

    def choose(self, num_reqs: int, context_tokens: int, *, is_timed: bool = True) -> Choice:
        """What the next step drafts.

        Args:
            num_reqs: requests that will be drafted for.
            context_tokens: K/V entries they hold together.
            is_timed: whether the step's time will say something: it prefills nothing and does the same for
                every request.
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
        self._weigh(rates, num_reqs, context_tokens)
        self._consider_trial(rates, num_reqs, context_tokens)

    def _weigh(self, rates: dict[Choice, float], num_reqs: int, context_tokens: int) -> None:
        """Find what drafts must promise to be made and verified: here, nothing."""

    def plan(self, choice: Choice) -> DraftPlan:
        """What the workers are told of the latest choice."""
        return DraftPlan(choice.drafts, lookups_alone=choice.lookups_alone)

    def observe(
        self,
        rounds: Collection[tuple[int, int]],
        made: Choice,
        timed: TimedStep | None,
        drafted: Choice,
        how: How = CHOSEN,
    ) -> None:
        """A step has been made.

        Args:
            rounds: (verified, accepted) drafts of each request that had some.
            made: how they were drafted; `PLAIN`: there were none.
            timed: what the step did and how long it took; None if it did not do the same for every
                request, or prefilled some: such steps tell of acceptance only.
            drafted: how the timed step drafted.
            how: the drafts of `made` came to be.
        """
        # A large batch has few different outcomes.
        for (verified, accepted), count in Counter(rounds).items():
            self._observe_round(made, verified, accepted, count, how)
        if timed is not None:
            self._observe_time(timed)
            self._last_tried[made] = self._num_steps
            self._account(rounds, timed)
            is_trial = self._is_trial(made, drafted, how) and not self._num_free
            self._num_free = max(0, self._num_free - 1)
            lost = self._lost_seconds(rounds, made, timed, how) if is_trial else 0.0
            self._credit_seconds += TRIAL_SHARE * timed.seconds - lost
            most = _MOST_STEPS_OF_CREDIT * TRIAL_SHARE * timed.seconds
            self._credit_seconds = min(self._credit_seconds, most)
            # Not when it has to choose: that is before a step, this while one is computed.
            is_planned = self._upcoming or self._trial or self._first
            if not is_planned and self._num_steps - self._decided_at >= _STEPS_PER_CHOICE:
                self._decide(timed.step.num_reqs, timed.step.context_tokens)

    def _observe_round(self, made: Choice, verified: int, accepted: int, count: int, how: How) -> None:
        """Of so many requests alike."""
        self.acceptance.observe(verified, accepted, count)

    def _is_trial(self, made: Choice, drafted: Choice, how: How) -> bool:
        """Whether a step verified or drafted otherwise than the present choice wants."""
        return how.is_planned or {made, drafted} != {self._current}

    def _lost_seconds(
        self, rounds: Collection[tuple[int, int]], made: Choice, timed: TimedStep, how: How
    ) -> float:
        """What a step of a trial took longer than the present choice takes for the same tokens."""
        step = timed.step
        # What a token takes was found for a batch of one size; a step in flight may be of the size before.
        if step.num_reqs != self._decided_for:
            return 0.0
        tokens = step.num_reqs + sum(accepted for _, accepted in rounds)
        seconds = min(timed.seconds, _MAX_MISS * self.times.pace * self.times.predict(step))
        return seconds - tokens * self._usual_seconds_per_token(made, how) * self.times.pace

    def _usual_seconds_per_token(self, made: Choice, how: How) -> float:
        """Of the present choice, where a step was made."""
        return self._seconds_per_token

    def _observe_time(self, timed: TimedStep) -> None:
        self._num_steps += 1
        is_first = len(self.times) == 0
        self.times.add(timed)
        if is_first or self._has_tried or self._num_steps % _STEPS_PER_FIT == 0:
            self.times.fit()
            self._has_tried = False

    def _account(self, rounds: Collection[tuple[int, int]], timed: TimedStep) -> None:
        """Compare with the time that plain decoding would have taken for the same tokens."""
        step = timed.step
        plain = self.times.pace * self.times.predict(
            self._step(step.num_reqs, step.context_tokens, PLAIN, PLAIN)
        )
        tokens = 1.0 + sum(accepted for _, accepted in rounds) / step.num_reqs
        self._plain_seconds = _FORGET * self._plain_seconds + tokens * plain
        self._seconds = _FORGET * self._seconds + timed.seconds

    @property
    def achieved_speedup(self) -> float:
        """Over plain decoding, in the latest steps; 1 before the first."""
        return self._plain_seconds / self._seconds if self._seconds else 1.0

    def rates(self, num_reqs: int, context_tokens: int) -> dict[Choice, float]:
        """Tokens per second to expect of plain decoding and of every length."""
        tokens = self._tokens_per_round()
        return {
            choice: num_reqs
            * expected
            / self.times.predict(self._step(num_reqs, context_tokens, choice, choice))
            for choice, expected in tokens.items()
        }

    def _tokens_per_round(self) -> dict[Choice, float]:
        expected = self.acceptance.tokens_per_round()
        return {choice: expected[choice.drafts] for choice in (PLAIN, *self._drafting)}

    def _step(self, num_reqs: int, context_tokens: int, verified: Choice, drafted: Choice) -> Step:
        """That verifies the drafts of one choice and drafts as another."""
        return Step(num_reqs, context_tokens, verified.drafts, drafted.drafts, self.budget_of(drafted))

    def budget_of(self, choice: Choice) -> int:
        """K/V entries that each draft step reads per request, at most; 0 where none is made."""
        return self.budget if choice.drafts and not choice.lookups_alone else 0

    def forecast(self, num_reqs: int, context_tokens: int) -> Forecast:
        """What to expect of the current choice for such a batch."""
        rates = self.rates(num_reqs, context_tokens)
        choice = self._current
        whole = self.times.predict(self._step(num_reqs, context_tokens, choice, choice))
        verification = self.times.predict(self._step(num_reqs, context_tokens, choice, PLAIN))
        share = max(0.0, 1.0 - verification / whole)
        return Forecast(choice, rates[choice] / rates[PLAIN], share)

    def least_context(self, num_reqs: int, max_context: int) -> int | None:
        """The context per request above which speculation pays (the paper's S_inflection), in tokens.

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

    def _consider_trial(self, rates: dict[Choice, float], num_reqs: int, context_tokens: int) -> None:
        """Plan a trial, if there is credit for it.

        What the trial then costs is taken from the credit as it is measured.
        """
        others = [choice for choice in (*self._only_tried, *self._drafting) if self._is_seldom(choice)]
        if not others:
            return
        trial = self._next_trial(others, rates, num_reqs, context_tokens)
        cost = self._trial_cost(trial, rates, num_reqs, context_tokens)
        if self._credit_seconds >= cost:
            self._trial = [trial] * TRIAL_STEPS
            self._last_tried[trial] = self._num_steps

    def _next_trial(
        self, others: Sequence[Choice], rates: dict[Choice, float], num_reqs: int, context_tokens: int
    ) -> Choice:
        """What was not tried for the longest time."""
        return min(others, key=lambda choice: self._last_tried[choice])

    def _is_seldom(self, choice: Choice) -> bool:
        """Whether the steps that the present choice makes show nothing of this one."""
        return choice != self._current

    def _trial_cost(
        self, trial: Choice, rates: dict[Choice, float], num_reqs: int, context_tokens: int
    ) -> float:
        """Seconds lost by a trial: its steps and the one after, which has the trial's drafts to verify."""
        choices = [self._current, *[trial] * TRIAL_STEPS, self._current]
        seconds = sum(
            self.times.predict(self._step(num_reqs, context_tokens, verified, drafted))
            for verified, drafted in pairwise(choices)
        )
        expected = self._tokens_per_round()
        tokens = num_reqs * sum(expected[verified] for verified in choices[:-1])
        return max(0.0, seconds - tokens / rates[self._current])

    def _length_up_to(self, limit: int) -> int:
        """The largest number of drafts that is no larger, else the least."""
        return max((n for n in self.lengths if n <= limit), default=self.lengths[0])

    def _calibration_for(self, num_reqs: int, context_tokens: int) -> list[Choice]:
        """What is left to be tried in such a batch to know times; the caller takes the next from it.

        It waits for batches of about this size, so that a small batch does not make the large one that
        follows try what tells of small ones. The first, before anything is known, is for whatever comes.
        """
        region = _region(num_reqs, context_tokens)
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
            self._prepare_calibration(num_reqs, context_tokens)
            self._num_free = _STEPS_UNTIL_LEARNT
            self._decided_for = 0  # what follows is to be decided anew
        return left

    def _prepare_calibration(self, num_reqs: int, context_tokens: int) -> None:
        """For its next step in such a batch."""

    def _calibration(self, num_reqs: int, context_tokens: int) -> list[Choice]:
        """A few steps each of plain decoding, few drafts and many."""
        lengths = sorted({self._length_up_to(2), self._length_up_to(4), self.lengths[-1]})
        choices = (*self._only_tried, *map(Choice, lengths))
        return [choice for choice in choices for _ in range(CALIBRATION_STEPS)]


def _region(num_reqs: int, context_tokens: int) -> tuple[int, int]:
    """Of batches whose size and contexts differ by less than a factor of two."""
    return num_reqs.bit_length(), context_tokens.bit_length()
