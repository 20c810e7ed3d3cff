# SPDX-License-Identifier: Apache-2.0
"""Likely continuations of the requests of a worker, from each one's own context."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_magicdec.lookup.calibration import Calibration
from vllm_magicdec.lookup.context_index import ContextIndex, Match
from vllm_magicdec.lookup.history import History

# A continuation ends where it is less likely than this to be right until there: a token that is read in
# vain costs its part of a pass. The number is a guess until passes of several lengths have been timed.
LEAST_CHANCE = 0.1


@dataclass(frozen=True)
class Continuation:
    """What may follow, and how likely each token is if those before it were right."""

    tokens: Sequence[int]
    chances: Sequence[float]
    match: Match

    @classmethod
    def none(cls) -> "Continuation":
        """Nothing was found, or asked for."""
        return cls((), (), Match(0, [], []))


class Lookups:
    """Of all requests of a worker.

    Args:
        max_num_reqs: requests whose contexts are kept, at most.
    """

    def __init__(self, max_num_reqs: int) -> None:
        self._max_num_reqs = max_num_reqs
        self._indexes: dict[str, ContextIndex] = {}
        self._calibration = Calibration()
        self._compile()

    def _compile(self) -> None:
        """Let Numba compile now what would delay the first request."""
        index = ContextIndex()
        index.extend(np.zeros(4, dtype=np.int32))
        index.look_up(np.zeros(1, dtype=np.int32), 1)

    def follow(self, req_ids: Sequence[str], histories: Sequence[History]) -> None:
        """Take note of what was verified since the last round.

        Args:
            req_ids: of a batch.
            histories: theirs.
        """
        if len(self._indexes.keys() | req_ids) > self._max_num_reqs:
            self._indexes = {req_id: self._indexes[req_id] for req_id in req_ids if req_id in self._indexes}
        for req_id, history in zip(req_ids, histories, strict=True):
            index = self._indexes.get(req_id)
            if index is None or len(index) > len(history):  # another request of that name
                index = self._indexes[req_id] = ContextIndex(len(history))
            index.extend(history.after(len(index)))

    def look_up(self, req_id: str, drafted: Sequence[int], most: int) -> Continuation:
        """How a request is likely to go on.

        Args:
            req_id: it was in the latest `follow`.
            drafted: tokens that were drafted after what is verified.
            most: tokens to return.
        """
        if most <= 0:
            return Continuation.none()
        match = self._indexes[req_id].look_up(np.array(drafted, dtype=np.int32), most)
        chances: list[float] = []
        reached = 1.0
        for step, share in enumerate(match.shares):
            chance = self._calibration.chance(match.length + step, share)
            reached *= chance
            if reached < LEAST_CHANCE:
                break
            chances.append(chance)
        return Continuation(match.tokens[: len(chances)], chances, match)

    def learn(self, continuation: Continuation, num_right: int) -> None:
        """What became of a continuation: `num_right` tokens of it were right, and the next one was not."""
        match = continuation.match
        for step in range(min(num_right + 1, len(continuation.tokens))):
            self._calibration.observe(match.length + step, match.shares[step], step < num_right)
