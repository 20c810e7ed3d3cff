# SPDX-License-Identifier: Apache-2.0
"""Chooses where drafts can be looked up, and how the workers weigh lookups, draft steps and verification.

What a lookup or a draft promises differs from round to round, and only the workers see it. So this
controller chooses whether to draft and with which budget, and tells the workers what things cost. All of it
follows from one rule: with r tokens per second to be had otherwise, a round of E tokens in T seconds is
worth E - r T, and rounds that are best by that have the highest rate (Dinkelbach 1967). A verified
position, a draft step and a round of its own cost r times their seconds: MagicDec's Eq. 2 (arXiv
2408.11049) at the margin. r is not the rate of all rounds: text that lookups foresee comes in stretches, a
stretch of other text ends no sooner for short rounds, and what lookups bring elsewhere cannot be had there.
It is the rate of rounds that are read or of plain decoding, whichever is higher.
"""

from collections.abc import Collection, Sequence
from copy import copy
from math import inf

from vllm_magicdec.adaptive.controller import CALIBRATION_STEPS, PLAIN, TRIAL_SHARE, Choice, Controller
from vllm_magicdec.adaptive.draft_plan import DraftPlan
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep

# The chance that makes a draft worth verifying before it is known what that costs, and the highest: some
# are verified, whatever it was found to cost.
_FIRST_LEAST_CHANCE, _MOST_LEAST_CHANCE = 0.3, 0.9
# What a draft step must promise for each request before it is known what one takes: rounds that are longer
# than they will be say less of what drafts bring.
_FIRST_LEAST_GAIN = 0.3
# Drafts verified by a step for which none was found: vLLM samples it like one that has some.
NONE_FOUND = 1e-3
# Requests' rounds after which an observation has lost 63 % of its weight; those a first guess counts for;
# and those that what was known counts for when it is tried again after long.
_MEMORY, _GUESSED, _LEAST_WEIGHT = 512.0, 8.0, 32.0
# Steps without a draft of the present choice after which it is tried like another.
_SELDOM = 64


class SeenRounds:
    """Averages over requests' rounds of one kind, the latest of which count most.

    Args:
        verified: drafts per request, as guessed before any was seen.
        accepted: of these, guessed as well.
        num_passes: draft steps, guessed as well.
    """

    def __init__(self, verified: float, accepted: float, num_passes: float) -> None:
        self._weight = _GUESSED
        self._means = [verified, accepted, num_passes]

    def fade(self, num_rounds: int) -> None:
        """So many requests' rounds have passed, of whatever kind."""
        faded = self._weight * (1.0 - 1.0 / _MEMORY) ** num_rounds
        self._weight = max(faded, min(self._weight, _LEAST_WEIGHT))

    def observe(self, verified: int, accepted: int, num_passes: int, count: int) -> None:
        """So many requests' rounds were alike."""
        self._weight += count
        share = count / self._weight
        seen = zip(self._means, (verified, accepted, num_passes), strict=True)
        self._means = [mean + share * (value - mean) for mean, value in seen]

    @property
    def verified(self) -> float:
        """Drafts of a request."""
        return max(self._means[0], NONE_FOUND)

    @property
    def tokens(self) -> float:
        """That a request's round brings."""
        return 1.0 + self._means[1]

    @property
    def num_passes(self) -> float:
        """Draft steps."""
        return self._means[2]


class LookupController(Controller):
    """A controller for drafts that may be looked up, and of which not all need be made or verified.

    Args:
        max_drafts: of a request's round.
        budgets: as for `Controller`.
        times: as for `Controller`, but of sizes after the first less is tried.
    """

    def __init__(self, max_drafts: int, budgets: Sequence[int], times: StepTimes) -> None:
        super().__init__((0, max_drafts), budgets, times)
        self.unread = Choice(max_drafts, 0)
        """All drafts are looked up. It is tried, but chosen only round by round, by the workers."""
        self._only_tried = [PLAIN, self.unread]
        self._current = PLAIN  # until it is known what else brings
        self._seen = {pair: SeenRounds(4.0, 3.0, 4.0) for pair in self._pairs}
        self._seen[self.unread] = SeenRounds(1.0, 0.5, 0.0)
        # Of the rounds in which the workers choose themselves, since they do:
        self._chosen_unread = copy(self._seen[self.unread])  # where lookups promised most
        self._read_share = 0.0  # the share of the others
        self._least_chance, self._least_promise = _FIRST_LEAST_CHANCE, inf
        self._least_gains = dict.fromkeys(self.budgets, 0.0)

    @property
    def least_chance(self) -> float:
        """That a draft must have to stand, to be worth verifying."""
        return min(self._least_chance, _MOST_LEAST_CHANCE)

    def plan(self, choice: Choice) -> DraftPlan:
        """See `Controller`."""
        # What is tried is tried as it is.
        least_promise = inf if self.is_planned else self._least_promise
        least_gain = self._least_gains.get(choice.budget, 0.0)
        return DraftPlan(*choice, self.least_chance, least_gain, least_promise)

    def observe(
        self,
        rounds: Collection[tuple[int, int]],
        made: Choice,
        timed: TimedStep | None,
        drafted: Choice,
        *,
        num_passes: int = 0,
        was_planned: bool = False,
    ) -> None:
        """See `Controller`."""
        num_reqs = len(rounds) if timed is None else timed.step.num_reqs
        for seen in (*self._seen.values(), self._chosen_unread):
            seen.fade(num_reqs)
        super().observe(rounds, made, timed, drafted, num_passes=num_passes, was_planned=was_planned)

    def _observe_round(
        self, made: Choice, verified: int, accepted: int, count: int, *, num_passes: int, was_planned: bool
    ) -> None:
        """`made` may have no draft at all."""
        if not was_planned:
            decay = (1.0 - 1.0 / _MEMORY) ** count
            self._read_share = decay * self._read_share + (1.0 - decay) * (made != self.unread)
            if made == self.unread:
                self._chosen_unread.observe(verified, accepted, num_passes, count)
                if self._least_promise > 0.0:  # other rounds may have promised less
                    return
        self._seen[made].observe(verified, accepted, num_passes, count)

    def _is_trial(self, made: Choice, drafted: Choice) -> bool:
        usual = {self._current, self.unread} if self._current.drafts else {self._current}
        return not {made, drafted} <= usual

    def _is_seldom(self, choice: Choice) -> bool:
        """Of the present choice the workers may have made lookups alone for long."""
        return super()._is_seldom(choice) or self._num_steps - self._last_tried[choice] > _SELDOM

    def _next_trial(
        self, others: Sequence[Choice], rates: dict[Choice, float], num_reqs: int, context_tokens: int
    ) -> Choice:
        """What is most overdue: due is what the time since its last trial would pay for.

        So lookups alone, which cost little, need not wait for drafts.
        """
        earned = TRIAL_SHARE * self._round_seconds(num_reqs, context_tokens, self._current)

        def overdue(choice: Choice) -> float:
            waited = self._num_steps - self._last_tried[choice]
            return earned * waited - self._trial_cost(choice, rates, num_reqs, context_tokens)

        return max(others, key=overdue)

    def _calibration(self, num_reqs: int, context_tokens: int) -> list[Choice]:
        """Short where something is known: what workers choose by, the times of other sizes tell nearly.

        Beside rounds of their choice a step of anything else is dear. Drafts are tried also where they are
        the present choice: the workers may go on with lookups alone.
        """
        if not len(self.times):
            return super()._calibration(num_reqs, context_tokens)
        rates = super().rates(num_reqs, context_tokens)  # of drafts alone
        choices = (*self._only_tried, max(self._pairs, key=rates.__getitem__))
        return [choice for choice in choices for _ in range(CALIBRATION_STEPS)]

    def _prepare_calibration(self, num_reqs: int, context_tokens: int) -> None:
        if self._first:
            self._least_gains = dict.fromkeys(self.budgets, _FIRST_LEAST_GAIN * num_reqs)
        else:
            self._weigh(self.rates(num_reqs, context_tokens), num_reqs, context_tokens)

    def _switch(self, rates: dict[Choice, float]) -> None:
        before = self._current
        super()._switch(rates)
        if before == PLAIN != self._current:
            # What the workers choose is to be seen. Until then it is what made drafts the choice, or the
            # next look at it could find them worse than plain decoding again.
            self._read_share = float(rates[self._current] > rates[self.unread])
            self._chosen_unread = copy(self._seen[self.unread])

    def rates(self, num_reqs: int, context_tokens: int) -> dict[Choice, float]:
        """Tokens per second to expect; of drafts, with the rounds among them that are looked up."""
        rates = super().rates(num_reqs, context_tokens)
        share, unread = self._read_share, self._chosen_unread
        for pair in self._pairs:
            if self._current == PLAIN:  # what the workers would choose has not been seen
                rates[pair] = max(rates[pair], rates[self.unread])
                continue
            seconds = share * self._round_seconds(num_reqs, context_tokens, pair)
            seconds += (1 - share) * self.times.predict(Step(num_reqs, context_tokens, unread.verified, 0))
            tokens = share * self._seen[pair].tokens + (1 - share) * unread.tokens
            rates[pair] = num_reqs * tokens / seconds
        return rates

    def _round_seconds(self, num_reqs: int, context_tokens: int, choice: Choice) -> float:
        return self.times.predict(self._step(num_reqs, context_tokens, choice, choice))

    def _tokens_per_round(self) -> dict[Choice, float]:
        return {PLAIN: 1.0, **{choice: seen.tokens for choice, seen in self._seen.items()}}

    def _step(self, num_reqs: int, context_tokens: int, verified: Choice, drafted: Choice) -> Step:
        num_verified = self._seen[verified].verified if verified.drafts else 0.0
        num_passes = self._seen[drafted].num_passes if drafted.budget else 0.0
        return Step(num_reqs, context_tokens, num_verified, num_passes, drafted.budget)

    def _weigh(self, rates: dict[Choice, float], num_reqs: int, context_tokens: int) -> None:
        pair, plain = self._current, rates[PLAIN]
        read_tokens, read_seconds = 0.0, inf
        if pair != PLAIN:
            read_tokens = num_reqs * self._seen[pair].tokens
            read_seconds = self._round_seconds(num_reqs, context_tokens, pair)
        rate = max(plain, read_tokens / read_seconds)
        self._least_chance = rate * self.times.position_seconds(num_reqs, context_tokens)
        # Also of plain decoding: what drafts bring is tried at these prices.
        self._least_gains = {
            budget: rate * self.times.pass_seconds(num_reqs, context_tokens, budget)
            for budget in self.budgets
        }
        if pair == PLAIN:
            return
        none = num_reqs - rate * self.times.predict(Step(num_reqs, context_tokens, NONE_FOUND, 0))
        self._least_promise = (read_tokens - rate * read_seconds) - none
