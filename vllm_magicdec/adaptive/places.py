# SPDX-License-Identifier: Apache-2.0
"""What was seen of rounds whose drafts may be looked up, kind by kind (`draft_plan.kind_of`)."""

from collections import Counter
from copy import copy
from math import inf
from typing import NamedTuple

from vllm_magicdec.adaptive.controller import Choice

# Drafts verified by a step for which none was found: vLLM samples it like one that has some.
NONE_FOUND = 1e-3
# Requests' rounds after which an observation has lost 63 % of its weight; those a first guess counts for;
# and those that what was known counts for when it is tried again after long.
_MEMORY, GUESSED, _LEAST_WEIGHT = 512.0, 8.0, 32.0


class SeenRounds:
    """Averages over requests' rounds of one kind, the latest of which count most.

    Args:
        verified: drafts per request, as guessed before any was seen.
        accepted: of these, guessed as well.
        num_passes: draft steps, guessed as well.
    """

    def __init__(self, verified: float, accepted: float, num_passes: float) -> None:
        self._weight = GUESSED
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
    def is_guess(self) -> bool:
        """Too little was seen."""
        return self._weight < 1.5 * GUESSED

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


class Prices(NamedTuple):
    """What a round's drafts must promise, as on a `DraftPlan`; at first guesses."""

    least_chance: float = 0.3
    least_gain: float = 0.0
    least_promise: float = inf


class Places:
    """Where rounds of one kind are made: what was seen there.

    Args:
        unread: guess at what lookups bring that it does not read.
    """

    def __init__(self, unread: SeenRounds) -> None:
        self.read = SeenRounds(4.0, 3.0, 4.0)
        self.tried_unread = unread  # wherever it was tried
        self.chosen_unread = copy(self.tried_unread)  # where workers chose it
        # Tokens, of which the latest count most: of all rounds, and of those that workers chose.
        self.tokens = self.read_tokens = self.unread_tokens = 0.0
        self.last_made: Counter[Choice] = Counter()  # at which step
        self.prices = Prices()
        self.seconds_per_token = 0.0  # with the present choice, of the batch that it was decided for

    def fade(self, num_rounds: int) -> None:
        """So many requests' rounds have passed, of whatever kind."""
        for seen in (self.read, self.tried_unread, self.chosen_unread):
            seen.fade(num_rounds)

    def fade_tokens(self, num_rounds: int) -> None:
        """So many requests' rounds were made by drafts."""
        left = (1.0 - 1.0 / _MEMORY) ** num_rounds
        self.tokens *= left
        self.read_tokens *= left
        self.unread_tokens *= left

    def seen(self, choice: Choice) -> SeenRounds:
        """Rounds with such drafts."""
        return self.tried_unread if choice.lookups_alone else self.read

    def expect(self, *, are_read: bool) -> None:
        """Workers begin to choose: until it is seen what, they will do this."""
        self.read_tokens, self.unread_tokens = float(are_read), float(not are_read)
        self.chosen_unread = copy(self.tried_unread)

    @property
    def unread_share(self) -> float:
        """Of their tokens, where workers choose."""
        tokens = self.read_tokens + self.unread_tokens
        return self.unread_tokens / tokens if tokens else 0.0
