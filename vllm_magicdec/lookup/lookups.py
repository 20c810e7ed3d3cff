# SPDX-License-Identifier: Apache-2.0
"""Likely continuations of the requests of a worker, from each one's own context."""

from collections.abc import Sequence

import numpy as np

from vllm_magicdec.lookup.calibration import Calibration
from vllm_magicdec.lookup.context_index import ContextIndex
from vllm_magicdec.lookup.continuation import LEAST_CHANCE, Continuation
from vllm_magicdec.lookup.history import History

# Tokens of one step that lookups are judged by; a step that brings more was not a round of drafts.
_MOST_JUDGED = 32


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
        """Take note of what was verified since the last round, and of what lookups would have said of it.

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
            verified = history.after(len(index))
            if len(index) and len(verified) <= _MOST_JUDGED:
                self._learn(index, verified)
            index.extend(verified)

    def _learn(self, index: ContextIndex, verified: np.ndarray) -> None:
        """From the tokens, [num_verified] int32, that followed a context."""
        match = index.look_up(verified[:0], len(verified))
        for step, (token, share) in enumerate(zip(match.tokens, match.shares, strict=True)):
            is_right = token == verified[step]
            self._calibration.observe(match.length + step, share, is_right)
            if not is_right:
                break

    def look_up(
        self, req_id: str, drafted: Sequence[int], most: int, least_chance: float = LEAST_CHANCE
    ) -> Continuation:
        """How a request is likely to go on.

        Args:
            req_id: it was in the latest `follow`.
            drafted: tokens that were drafted after what is verified.
            most: tokens to return.
            least_chance: that all tokens up to the last one returned are right.
        """
        if most <= 0:
            return Continuation()
        match = self._indexes[req_id].look_up(np.array(drafted, dtype=np.int32), most)
        chances: list[float] = []
        reached = 1.0
        for step, share in enumerate(match.shares):
            chance = self._calibration.chance(match.length + step, share)
            reached *= chance
            if reached < least_chance:
                break
            chances.append(chance)
        return Continuation(match.tokens[: len(chances)], chances)
