# SPDX-License-Identifier: Apache-2.0
"""Chooses where drafts can be looked up, and how the workers weigh lookups, draft steps and verification.

What a lookup or a draft promises differs from round to round, and only the workers see it. So this
controller chooses whether to draft and with which budget, and tells the workers what things cost. All of it
follows from one rule: with r the tokens per second achieved, a round of E tokens in T seconds is worth
E - r T, and rounds that are best by that have the highest rate (Dinkelbach 1967). A verified position, a
draft step and a round of its own cost r times their seconds: MagicDec's Eq. 2 (arXiv 2408.11049) at the
margin.
"""

from collections.abc import Sequence
from math import inf

from vllm_magicdec.adaptive.controller import PLAIN, Choice, Controller
from vllm_magicdec.adaptive.draft_plan import DraftPlan
from vllm_magicdec.adaptive.step_times import Step, StepTimes

# The chance that makes a draft worth verifying before it is known what that costs, and the highest: some
# are verified, whatever it was found to cost.
_FIRST_LEAST_CHANCE, _MOST_LEAST_CHANCE = 0.3, 0.9
# Drafts verified by a step for which none was found: vLLM samples it like one that has some.
NONE_FOUND = 1e-3
# Requests' rounds after which an observation has lost 63 % of its weight; those a first guess counts for.
_MEMORY, _GUESSED = 512.0, 8.0


class SeenRounds:
    """Averages over requests' rounds of one kind, the latest of which count most.

    Args:
        verified: drafts per request, as guessed before any was seen.
        accepted: of these, guessed as well.
        num_passes: draft steps, guessed as well.
    """

    def __init__(self, verified: float, accepted: float, num_passes: float) -> None:
        self._weight = _GUESSED
        self._sums = [_GUESSED * guess for guess in (verified, accepted, num_passes)]

    def observe(self, verified: int, accepted: int, num_passes: int, count: int) -> None:
        """So many requests' rounds were alike."""
        decay = (1.0 - 1.0 / _MEMORY) ** count
        self._weight = decay * self._weight + count
        seen = zip(self._sums, (verified, accepted, num_passes), strict=True)
        self._sums = [decay * before + count * value for before, value in seen]

    @property
    def verified(self) -> float:
        """Drafts of a request."""
        return max(self._sums[0] / self._weight, NONE_FOUND)

    @property
    def tokens(self) -> float:
        """That a request's round brings."""
        return 1.0 + self._sums[1] / self._weight

    @property
    def num_passes(self) -> float:
        """Draft steps."""
        return self._sums[2] / self._weight


class LookupController(Controller):
    """A controller for drafts that may be looked up, and of which not all need be made or verified.

    Args:
        max_drafts: of a request's round.
        budgets: as for `Controller`.
        times: as for `Controller`.
    """

    def __init__(self, max_drafts: int, budgets: Sequence[int], times: StepTimes) -> None:
        super().__init__((0, max_drafts), budgets, times)
        self.unread = Choice(max_drafts, 0)
        """All drafts are looked up. It is tried, but chosen only round by round, by the workers."""
        self._only_tried = [PLAIN, self.unread]
        self._seen = {pair: SeenRounds(4.0, 3.0, 4.0) for pair in self._pairs}
        self._seen[self.unread] = SeenRounds(1.0, 0.5, 0.0)
        self._chosen_unread = SeenRounds(1.0, 0.5, 0.0)  # by the workers: where lookups promised most
        self._read_share = 0.5  # of the rounds in which they may choose
        self._least_chance, self._least_gain, self._least_promise = _FIRST_LEAST_CHANCE, 0.0, inf

    @property
    def least_chance(self) -> float:
        """That a draft must have to stand, to be worth verifying."""
        return min(self._least_chance, _MOST_LEAST_CHANCE)

    def plan(self, choice: Choice) -> DraftPlan:
        """See `Controller`."""
        # What is tried is tried as it is.
        least_promise = inf if self.is_planned else self._least_promise
        return DraftPlan(*choice, self.least_chance, self._least_gain, least_promise)

    def _observe_round(
        self, made: Choice, verified: int, accepted: int, count: int, *, num_passes: int, was_planned: bool
    ) -> None:
        """`made` may have no draft at all."""
        if not was_planned:
            decay = (1.0 - 1.0 / _MEMORY) ** count
            self._read_share = decay * self._read_share + (1.0 - decay) * (made != self.unread)
        seen = self._seen[made]
        if made == self.unread and not was_planned:
            seen = self._chosen_unread
        seen.observe(verified, accepted, num_passes, count)

    def _is_trial(self, made: Choice, drafted: Choice) -> bool:
        usual = {self._current, self.unread} if self._current.drafts else {self._current}
        return not {made, drafted} <= usual

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
        super()._weigh(rates, num_reqs, context_tokens)
        rate, pair = rates[self._current], self._current
        if pair == PLAIN:
            return
        self._least_gain = rate * self.times.pass_seconds(num_reqs, context_tokens, pair.budget)
        read = num_reqs * self._seen[pair].tokens
        read -= rate * self._round_seconds(num_reqs, context_tokens, pair)
        none = num_reqs - rate * self.times.predict(Step(num_reqs, context_tokens, NONE_FOUND, 0))
        self._least_promise = read - none
