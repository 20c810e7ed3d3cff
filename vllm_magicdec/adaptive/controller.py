# SPDX-License-Identifier: Apache-2.0
"""Choice of the speculation length from step times and the value of drafts.

The rule is MagicDec's Eq. 2 (arXiv 2408.11049) with measured times. Of all choices, plain decoding
included, take the one with the highest expected tokens per second for the current batch,

    rate(gamma) = n * Omega(gamma) / T(n, C, verified=gamma, drafted=gamma)

where Omega(gamma) is the expected number of tokens per round at the recent acceptance. `step_times.py`
predicts T, `value.py` and with lookups `lookup_value.py` give Omega, and `explorer.py` plans steps that
learn both. The choice changes only for a clear gain.
"""

from collections.abc import Collection
from typing import NamedTuple

from vllm_magicdec.adaptive.draft_plan import DraftPlan
from vllm_magicdec.adaptive.explorer import Decision, Explorer
from vllm_magicdec.adaptive.step_times import Batch, StepTimes, TimedStep
from vllm_magicdec.adaptive.value import PLAIN, UNPLANNED, Choice, RoundInfo, Value

# Smallest ratio of rates for which the choice changes, so that noise does not make it flap.
_CLEAR_GAIN = 1.01
# The choice is revised after so many steps, and whenever the batch size changes.
_STEPS_PER_CHOICE = 4
_STEPS_PER_FIT = 64
# Decay per step of the achieved speedup.
_SPEEDUP_DECAY = 0.99


class Forecast(NamedTuple):
    """Expected effect of the current choice."""

    choice: Choice
    speedup: float  # over plain decoding of the same batch
    draft_share: float  # of a round's time, spent in draft steps


class Controller:
    """Chooses the drafts of every step of one engine."""

    def __init__(self, value: Value, times: StepTimes) -> None:
        self.value, self.times = value, times
        self.explorer = Explorer(value, times)
        self.num_switches = 0
        self._current = value.start
        self._num_steps, self._decided_at = 0, -_STEPS_PER_CHOICE  # that were timed
        self._plain_seconds = self._seconds = 0.0

    @property
    def is_planned(self) -> bool:
        """Whether the latest choice is a trial or a calibration step."""
        return self.explorer.is_planned

    def choose(self, num_reqs: int, context_tokens: int, *, is_timed: bool = True) -> Choice:
        """Choose the drafts of the next step.

        Args:
            context_tokens: K/V entries of all requests.
            is_timed: whether the step's time will be usable, i.e. it prefills nothing and does the same
                for every request.
        """
        batch = Batch(num_reqs, context_tokens)
        if self.explorer.look_ahead(batch, is_timed=is_timed):
            self.value.settle(self._current, batch, None if self.explorer.is_first else self.times)
        decision = self.explorer.decision
        is_decided = decision is not None and decision.batch.num_reqs == num_reqs
        if self.explorer.is_idle and len(self.times) and not is_decided:
            self._decide(batch)
        planned = self.explorer.take()
        return self._current if planned is None else planned

    def _decide(self, batch: Batch) -> None:
        self._decided_at = self._num_steps
        rates = self._rates(batch)
        best = max(rates, key=rates.__getitem__)
        if rates[best] > _CLEAR_GAIN * rates[self._current]:
            self._current = best
            self.num_switches += 1
        seconds = self.value.seconds_per_token(self._current, batch, self.times)
        self.value.settle(self._current, batch, self.times)
        self.explorer.plan(Decision(self._current, batch, seconds, 1.0 / rates[self._current]))

    def plan(self, choice: Choice) -> DraftPlan:
        """Return the message to the workers for the latest choice."""
        return self.value.plan(choice, is_planned=self.is_planned)

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
        self.value.observe(rounds, verified, len(rounds) if timed is None else timed.step.num_reqs, info)
        if timed is None:
            return
        self._num_steps += 1
        is_first = not len(self.times)
        self.times.add(timed)
        if is_first or self.explorer.has_ended or self._num_steps % _STEPS_PER_FIT == 0:
            self.times.fit()
            self.explorer.has_ended = False
        batch = Batch(timed.step.num_reqs, timed.step.context_tokens)
        num_accepted = sum(accepted for _, accepted in rounds)
        self._account(num_accepted, timed.seconds, batch)
        self.explorer.observe(timed, num_accepted, verified, drafted, info)
        # Decide here, while a step is computed, and not in `choose`, which delays the next one.
        if self.explorer.is_idle and self._num_steps - self._decided_at >= _STEPS_PER_CHOICE:
            self._decide(batch)

    def _account(self, num_accepted: int, seconds: float, batch: Batch) -> None:
        """Compare with the time that plain decoding would have taken for the same tokens."""
        usual = self.times.seconds_per_token(batch, self.value.mean(PLAIN))
        plain = (batch.num_reqs + num_accepted) * usual * self.times.pace
        self._plain_seconds = _SPEEDUP_DECAY * self._plain_seconds + plain
        self._seconds = _SPEEDUP_DECAY * self._seconds + seconds

    @property
    def achieved_speedup(self) -> float:
        """Recent speedup over plain decoding; 1 before the first step."""
        return self._plain_seconds / self._seconds if self._seconds else 1.0

    def _rates(self, batch: Batch) -> dict[Choice, float]:
        """Return the expected tokens per second of the batch by choice."""
        shares, rates = self.value.shares(), {}
        for choice in self.value.choices:
            seconds = self.value.seconds_per_token(choice, batch, self.times)
            rates[choice] = 1.0 / sum(share * own for share, own in zip(shares, seconds, strict=True))
        return rates

    def forecast(self, num_reqs: int, context_tokens: int) -> Forecast:
        """Predict the effect of the current choice for a batch."""
        batch = Batch(num_reqs, context_tokens)
        rates, drafts, plain = self._rates(batch), self.value.mean(self._current), self.value.mean(PLAIN)
        whole, verification = (self.times.predict(batch.step(drafts, own)) for own in (drafts, plain))
        speedup = rates[self._current] / rates[PLAIN]
        return Forecast(self._current, speedup, max(0.0, 1.0 - verification / whole))
