# SPDX-License-Identifier: Apache-2.0
"""Chooses where drafts can be looked up, and how the workers weigh lookups, draft steps and verification.

What a lookup or a draft promises differs from round to round, and only the workers see it. So this
controller chooses whether to draft, and tells the workers what things cost. All of it follows from one
rule: with r tokens per second to be had otherwise, a round of E tokens in T seconds is worth E - r T, and
rounds that are best by that have the highest rate (Dinkelbach 1967). A verified position, a draft step and
a round of its own cost r times their seconds: MagicDec's Eq. 2 (arXiv 2408.11049) at the margin. r is not
the rate of all rounds: text that lookups foresee comes in stretches, and what they bring in one cannot be
had in another, which ends no sooner for short rounds. So rounds are of kinds, by what lookups promise, and
each kind has prices of its own, at the rate of its rounds that are read or of plain decoding, whichever is
higher. A stretch has as many tokens whatever is done: so the rate of all text follows from the kinds'
shares of tokens, not of rounds.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from math import inf
from typing import NamedTuple

from vllm_magicdec.adaptive.controller import (
    CALIBRATION_STEPS,
    CHOSEN,
    PLAIN,
    TRIAL_SHARE,
    TRIAL_STEPS,
    Choice,
    Controller,
    How,
)
from vllm_magicdec.adaptive.draft_plan import KIND_BORDERS, DraftPlan
from vllm_magicdec.adaptive.places import GUESSED, NONE_FOUND, Places, Prices, SeenRounds
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep

# The highest chance that a draft must have: some are verified, whatever that was found to cost.
_MOST_LEAST_CHANCE = 0.9
# What a draft step must promise for each request before it is known what one takes: rounds that are longer
# than they will be say less of what drafts bring.
_FIRST_LEAST_GAIN = 0.3
# Drafts must promise so much more than plain decoding, before it is seen what workers choose.
_LEAST_GAIN_OF_DRAFTS = 1.02
# Steps without a draft of the present choice after which it is tried like another, and between trials of
# one choice; and between two looks at what lookups bring while decoding is plain.
_SELDOM, _STEPS_BETWEEN_LOOKS = 64, 16


class Batch(NamedTuple):
    """That is to be drafted for."""

    num_reqs: int
    context_tokens: int


class LookupController(Controller):
    """A controller for drafts that may be looked up, and of which not all need be made or verified.

    Args:
        max_drafts: of a request's round.
        budget: as for `Controller`.
        times: as for `Controller`, but of sizes after the first less is tried.
    """

    def __init__(self, max_drafts: int, budget: int, times: StepTimes) -> None:
        super().__init__((0, max_drafts), budget, times)
        (self._read,) = self._drafting
        self.unread = Choice(max_drafts, lookups_alone=True)
        """All drafts are looked up. It is tried, but chosen only round by round, by the workers."""
        self._only_tried = [PLAIN, self.unread]
        self._current = PLAIN  # until it is known what else brings
        guesses = (0.2, *KIND_BORDERS)
        self._kinds = [Places(SeenRounds(2.0 * tokens, tokens, 0.0)) for tokens in guesses]
        self._kinds[0].tokens = GUESSED
        self._last_planned: Counter[Choice] = Counter()  # at which step, as a trial

    def plan(self, choice: Choice) -> DraftPlan:
        """See `Controller`."""
        plans = []
        for chance, gain, promise in (places.prices for places in self._kinds):
            # What is tried is tried as it is.
            promise = inf if self.is_planned else promise
            chance, gain = min(chance, _MOST_LEAST_CHANCE), gain if self.budget_of(choice) else 0.0
            plans.append(DraftPlan(choice.drafts, chance, gain, promise, (), choice.lookups_alone))
        return DraftPlan(choice.drafts, by_kind=plans, lookups_alone=choice.lookups_alone)

    def observe(
        self,
        rounds: Collection[tuple[int, int]],
        made: Choice,
        timed: TimedStep | None,
        drafted: Choice,
        how: How = CHOSEN,
    ) -> None:
        """See `Controller`."""
        num_reqs = len(rounds) if timed is None else timed.step.num_reqs
        for places in self._kinds:
            places.fade(num_reqs)
        if timed is not None:
            self._kinds[how.kind].last_made[made] = self._num_steps
        super().observe(rounds, made, timed, drafted, how)

    def _observe_round(self, made: Choice, verified: int, accepted: int, count: int, how: How) -> None:
        """`made` may have no draft at all."""
        for places in self._kinds:
            places.fade_tokens(count)
        places, tokens, seen = self._kinds[how.kind], count * (1.0 + accepted), list[SeenRounds]()
        # While decoding is plain, trials begin at every token alike, whatever they bring.
        places.tokens += count if self._current == PLAIN else tokens
        if made != self.unread:
            seen.append(places.read)
            places.read_tokens += 0.0 if how.is_planned else tokens
        else:
            places.unread_tokens += 0.0 if how.is_planned else tokens
            if not how.is_planned:
                seen.append(places.chosen_unread)
            # Where workers chose, other rounds may have promised less.
            if how.is_planned or places.prices.least_promise <= 0.0:
                seen.append(places.tried_unread)
        for own in seen:
            own.observe(verified, accepted, how.num_passes, count)

    def _is_trial(self, made: Choice, drafted: Choice, how: How) -> bool:
        """A planned round is none if it is what workers do in most places of its kind."""
        if self._current == PLAIN or not {made, drafted} <= {self._current, self.unread}:
            return super()._is_trial(made, drafted, how)
        return how.is_planned and (made == self.unread) != (self._kinds[how.kind].unread_share > 0.5)

    def _usual_seconds_per_token(self, made: Choice, how: How) -> float:
        if made == PLAIN:  # nobody asked what lookups promise
            return self._seconds_per_token
        return self._kinds[how.kind].seconds_per_token

    def _is_seldom(self, choice: Choice) -> bool:
        """Of the two that workers choose from they may have made one for long, in some kind of places."""
        is_look = self._current == PLAIN and choice == self.unread
        pause = _STEPS_BETWEEN_LOOKS if is_look else _SELDOM
        if self._num_steps - self._last_planned[choice] < pause:
            return False  # it may cost next to nothing, but to be learnt from
        if self._current != PLAIN and choice in (self._current, self.unread):
            return self._steps_since(choice) > _SELDOM
        return choice != self._current

    def _steps_since(self, choice: Choice) -> int:
        """It was made; what workers choose from: in each kind of places met since it was planned."""
        latest = self._last_tried[choice]
        if self._current != PLAIN and choice in (self._current, self.unread):
            other = self.unread if choice == self._current else self._current
            for made in (places.last_made for places in self._kinds):
                if made[other] > max(made[choice], self._last_planned[choice]):
                    latest = min(latest, made[choice])
        return self._num_steps - latest

    def _consider_trial(self, rates: dict[Choice, float], num_reqs: int, context_tokens: int) -> None:
        super()._consider_trial(rates, num_reqs, context_tokens)
        for trial in self._trial:
            self._last_planned[trial] = self._num_steps

    def _next_trial(
        self, others: Sequence[Choice], rates: dict[Choice, float], num_reqs: int, context_tokens: int
    ) -> Choice:
        """What is most overdue: due is what the time since its last trial would pay for.

        While that has to wait for credit, others that cost little go before it, for half of what is earned.
        """
        tokens = num_reqs * self._tokens_of(self._current)
        earned = TRIAL_SHARE * tokens / rates[self._current]

        costs = {choice: self._trial_cost(choice, rates, num_reqs, context_tokens) for choice in others}
        paid = {choice: earned * self._steps_since(choice) for choice in others}

        def overdue(choice: Choice) -> float:
            return paid[choice] - costs[choice]

        most = max(others, key=overdue)
        cheap = [choice for choice in others if costs[choice] <= paid[choice] / (2 * len(others))]
        must_wait = costs[most] > self._credit_seconds
        return max(cheap, key=overdue) if must_wait and cheap else most

    def _trial_cost(
        self, trial: Choice, rates: dict[Choice, float], num_reqs: int, context_tokens: int
    ) -> float:
        """What it takes longer than the present choice for the same tokens, in each kind of places."""
        tokens = TRIAL_STEPS * num_reqs * self._tokens_of(trial)
        if trial == PLAIN:
            return max(0.0, tokens / rates[PLAIN] - tokens / rates[self._current])
        batch, longer = Batch(num_reqs, context_tokens), 0.0
        for share, places in self._by_share():
            seconds = self._tried_seconds_per_token(places, trial, batch)
            usual = self._seconds_per_token_where(places, self._current, batch)
            longer += share * max(0.0, seconds - usual)
        return tokens * longer

    def _calibration(self, num_reqs: int, context_tokens: int) -> list[Choice]:
        """Short where something is known: what workers choose by, the times of other sizes tell nearly.

        Beside rounds of their choice a step of anything else is dear. Drafts are tried also where they are
        the present choice: the workers may go on with lookups alone.
        """
        if not len(self.times):
            return super()._calibration(num_reqs, context_tokens)

        choices = (*self._only_tried, self._read)
        return [choice for choice in choices for _ in range(CALIBRATION_STEPS)]

    def _prepare_calibration(self, num_reqs: int, context_tokens: int) -> None:
        if self._first:
            for places in self._kinds:
                places.prices = places.prices._replace(least_gain=_FIRST_LEAST_GAIN * num_reqs)
        else:
            self._weigh(self.rates(num_reqs, context_tokens), num_reqs, context_tokens)

    def _decide(self, num_reqs: int, context_tokens: int) -> None:
        if self._current == PLAIN:
            batch = Batch(num_reqs, context_tokens)
            # Until it is seen what workers choose, it is what may make drafts the choice now.
            for places in self._kinds:
                unread = self._tried_seconds_per_token(places, self.unread, batch)
                read = self._tried_seconds_per_token(places, self._read, batch)
                places.expect(are_read=read < unread)
        super()._decide(num_reqs, context_tokens)

    def _switch(self, rates: dict[Choice, float]) -> None:
        """Where workers leave everything unread and find nothing, drafts are nearly as fast as none."""
        before = self._current
        if self._current != PLAIN or max(rates.values()) > _LEAST_GAIN_OF_DRAFTS * rates[PLAIN]:
            super()._switch(rates)
        if rates[self._current] < rates[PLAIN]:
            self._current = PLAIN
            self.num_switches += 1
        if (before == PLAIN) != (self._current == PLAIN):
            for share, places in self._by_share():  # from now on a round counts otherwise
                places.tokens = share * GUESSED

    def rates(self, num_reqs: int, context_tokens: int) -> dict[Choice, float]:
        """Tokens per second to expect; of drafts, with the rounds among them that are looked up."""
        batch, rates = Batch(num_reqs, context_tokens), {}
        for choice in (PLAIN, self.unread, self._read):
            rates[choice] = 1.0 / sum(
                share * self._seconds_per_token_where(places, choice, batch)
                for share, places in self._by_share()
            )
        return rates

    def _by_share(self) -> list[tuple[float, Places]]:
        """Places of each kind, with their shares of the text."""
        tokens = sum(places.tokens for places in self._kinds)
        return [(places.tokens / tokens, places) for places in self._kinds]

    def _seconds_per_token_where(self, places: Places, choice: Choice, batch: Batch) -> float:
        """Of text of one kind; of drafts: with the rounds that workers would leave unread."""
        if choice != self._read:
            return self._tried_seconds_per_token(places, choice, batch)
        share = places.unread_share
        unread = self._round_seconds(places.chosen_unread, 0, batch) / places.chosen_unread.tokens
        read = self._tried_seconds_per_token(places, choice, batch)
        return share * unread / batch.num_reqs + (1.0 - share) * read

    def _tried_seconds_per_token(self, places: Places, choice: Choice, batch: Batch) -> float:
        """Of text of one kind, if all of it is decoded alike."""
        if choice == PLAIN:
            return self.times.predict(Step(*batch, 0.0, 0.0, 0)) / batch.num_reqs
        seen = places.seen(choice)
        budget = self.budget_of(choice)
        return self._round_seconds(seen, budget, batch) / (batch.num_reqs * seen.tokens)

    def _round_seconds(self, seen: SeenRounds, budget: int, batch: Batch) -> float:
        num_passes = seen.num_passes if budget else 0.0
        return self.times.predict(Step(*batch, seen.verified, num_passes, budget))

    def _seen(self, choice: Choice) -> list[tuple[float, SeenRounds]]:
        """Its rounds in each kind of places, with their shares of the rounds."""
        seen = [(share, places.seen(choice)) for share, places in self._by_share()]
        rounds = sum(share / own.tokens for share, own in seen)
        return [(share / own.tokens / rounds, own) for share, own in seen]

    def _tokens_of(self, choice: Choice) -> float:
        """A request's round."""
        return 1.0 if choice == PLAIN else sum(share * own.tokens for share, own in self._seen(choice))

    def _step(self, num_reqs: int, context_tokens: int, verified: Choice, drafted: Choice) -> Step:
        num_verified = num_passes = 0.0
        if verified.drafts:
            num_verified = sum(share * own.verified for share, own in self._seen(verified))
        if budget := self.budget_of(drafted):
            num_passes = sum(share * own.num_passes for share, own in self._seen(drafted))
        return Step(num_reqs, context_tokens, num_verified, num_passes, budget)

    def _weigh(self, rates: dict[Choice, float], num_reqs: int, context_tokens: int) -> None:
        batch = Batch(num_reqs, context_tokens)
        position = self.times.position_seconds(*batch)
        draft_pass = self.times.pass_seconds(*batch, self.budget)
        for places in self._kinds:
            rate, least_promise = self._worth(places, rates[PLAIN], batch)
            # Also of plain decoding: what drafts bring is tried at these prices.
            places.prices = Prices(rate * position, rate * draft_pass, least_promise)
            places.seconds_per_token = self._seconds_per_token_where(places, self._current, batch)

    def _worth(self, places: Places, plain: float, batch: Batch) -> tuple[float, float]:
        """Tokens per second to be had there, and what lookups must promise to be left unread."""
        rate, worth = plain, 0.0
        if self._current != PLAIN:
            read = places.read
            tokens, seconds = batch.num_reqs * read.tokens, self._round_seconds(read, self.budget, batch)
            rate = max(plain, tokens / seconds)
            worth = inf if read.is_guess else tokens - rate * seconds  # to be seen what it brings here
        none = batch.num_reqs - rate * self.times.predict(Step(*batch, NONE_FOUND, 0.0, 0))
        return rate, worth - none
