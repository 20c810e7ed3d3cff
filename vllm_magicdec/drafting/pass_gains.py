# SPDX-License-Identifier: Apache-2.0
"""What drafts of a fixed number have to promise, and how many wide passes a round gets.

The host knows what a staged pass promises (`staged.py`); what wide ones gain (`wide_passes.py`) is learned.
Times are not measured here. That a pass for one draft of every request is worth it, the user's number of
drafts says; so a pass that gains far less is left out.
"""

from collections.abc import Iterable, Sequence

# Drafts of a request that a pass has to gain in the mean. With 1 it does what a pass of one token does,
# which the user's number of drafts says is worth it; at half of that it is left out.
LEAST_GAIN = 0.5
# The chance of standing below which a request's draft is left out, with those after it. So low that the
# user's number still brings about as many tokens. Where half of the drafts fall, half of the passes are
# spared.
LEAST_STANDING = 0.05
# Wide passes take a little longer than those of one token, and so have to be fewer, by this share.
_MOST_PASSES = 0.75
# Requests' rounds after which what a pass gained has lost 63 % of its weight, and rounds after which what
# one that was left out is supposed to gain has replaced as much of what was expected of it.
_MEMORY, _DOUBT = 32, 50
# What the next pass of a round gains of what the one before did, but for the draft that every pass makes of
# a request that lacks some: a guess, until more passes than one were made.
_FADING = 0.7
# Rounds after which rounds of another number of drafts know better what lookups bring.
_STALE = 64


class Gains:
    """Drafts that each pass of a round adds to a request's, in the mean; learned, and slowly forgotten.

    Args:
        num_steps: drafts of each request.
        num_others: passes that a round of wide ones takes beside them.
    """

    def __init__(self, num_steps: int, num_others: int = 0) -> None:
        self._num_steps = num_steps
        self._num_others = num_others
        self._expected = [1.0] * num_steps  # until something is known, no more than passes of one token
        self._num_seen = 0  # requests' rounds
        self._heard_at = -_STALE  # a round

    def begin_as(self, others: Iterable["Gains"]) -> None:
        """Expect what rounds of another number of drafts show, unless those of this one did so lately."""
        freshest = max(others, key=lambda gains: gains._heard_at)
        if freshest._num_seen and freshest._heard_at - self._heard_at >= _STALE:
            known, self._heard_at = freshest._expected[: self._num_steps], freshest._heard_at
            self._expected = self._suppose([*known, *[known[-1]] * (self._num_steps - len(known))])

    def _suppose(self, gains: Sequence[float]) -> list[float]:
        """These, as far as drafts are lacking."""
        lacking, supposed = float(self._num_steps), []
        for gain in gains:
            supposed.append(min(gain, lacking))
            lacking -= supposed[-1]
        return supposed

    def next(self) -> int:
        """Passes of a round; 0: `num_steps` of one token do as well."""
        too_little = (index for index, gain in enumerate(self._expected) if gain < LEAST_GAIN)
        number = max(1, next(too_little, self._num_steps))
        return number if number + self._num_others <= _MOST_PASSES * self._num_steps else 0

    def learn(self, gained: Sequence[float], num_reqs: int, round_: int) -> None:
        """What the passes of a round have gained; of those that it left out something is supposed.

        Args:
            gained: drafts of a request, in the mean, by pass.
            num_reqs: of the round.
            round_: at which this is heard.
        """
        weight = self._weigh(num_reqs, round_)
        supposed = self._suppose([*gained, *[gained[-1]] * (self._num_steps - len(gained))])
        for index, gain in enumerate(supposed):
            own_weight = weight if index < len(gained) else 1 / _DOUBT
            self._expected[index] += own_weight * (gain - self._expected[index])

    def look(self, gained: float, num_reqs: int, round_: int) -> None:
        """What the first pass of a round would have gained; of the others something is supposed."""
        first = self._expected[0] + self._weigh(num_reqs, round_) * (gained - self._expected[0])
        gains = (max(1.0, first * _FADING**index) for index in range(1, self._num_steps))
        self._expected = self._suppose([first, *gains])

    def _weigh(self, num_reqs: int, round_: int) -> float:
        """Of a round of so many requests, beside what is known."""
        self._num_seen += num_reqs
        self._heard_at = round_
        return max(1 - (1 - 1 / _MEMORY) ** num_reqs, num_reqs / self._num_seen)
