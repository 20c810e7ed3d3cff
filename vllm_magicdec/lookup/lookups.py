# SPDX-License-Identifier: Apache-2.0
"""Likely continuations of the requests of a worker, from each one's own context and from other sources."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from vllm_magicdec.lookup.calibration import Calibration
from vllm_magicdec.lookup.context_index import ContextIndex, Match
from vllm_magicdec.lookup.continuation import LEAST_CHANCE, Continuation
from vllm_magicdec.lookup.history import History
from vllm_magicdec.lookup.merging import choose, learn

# Tokens of one step that lookups are judged by, or as many as a round brings if that is more: a step that
# brings more was no round of drafts.
_MOST_JUDGED = 32


class Source(Protocol):
    """Texts of others, by their tokens."""

    def look_up(self, latest: np.ndarray, most: int) -> Match:
        """How such texts went on after the longest occurrences of the latest tokens.

        Args:
            latest: [num] int32, tokens of a request, at least its last MAX_MATCH if it has as many.
            most: tokens to return, at most.
        """
        ...

    def add(self, tokens: np.ndarray) -> None:
        """Take note of a request's output, [num] int32, when it has ended."""
        ...


class Lookups:
    """Of all requests of a worker.

    Args:
        max_num_reqs: requests whose contexts are kept, at most.
        vocab_size: a continuation ends before what is no token of the vocabulary (an image's placeholder).
        max_drafts: of a request's round.
        sources: beside each request's own context, which of equals is believed first.
        in_context: whether a request's own context counts.
    """

    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        max_drafts: int,
        sources: Sequence[Source] = (),
        *,
        in_context: bool = True,
    ) -> None:
        self._max_num_reqs = max_num_reqs
        self._vocab_size = vocab_size
        self._most_judged = max(_MOST_JUDGED, max_drafts + 1)
        self._sources = sources
        self._in_context = in_context
        self._indexes: dict[str, ContextIndex] = {}
        self._prompt_lens: dict[str, int] = {}
        self._calibrations = [Calibration() for _ in range(in_context + len(sources))]
        self._compile()

    def _compile(self) -> None:
        """Let Numba compile now what would delay the first request."""
        index = ContextIndex()
        index.extend(np.zeros(4, dtype=np.int32))
        self._matches(index, np.zeros(1, dtype=np.int32), 1)

    def follow(self, req_ids: Sequence[str], histories: Sequence[History]) -> None:
        """Take note of what was verified since the last round, and of what lookups would have said of it.

        Args:
            req_ids: of a batch.
            histories: theirs.
        """
        if self._sources or len(self._indexes.keys() | req_ids) > self._max_num_reqs:
            self._forget_all_but(req_ids)
        for req_id, history in zip(req_ids, histories, strict=True):
            index = self._indexes.get(req_id)
            if index is None or not history.goes_on_after(index.tokens):  # another request of that name
                index = self._indexes[req_id] = ContextIndex(len(history))
                self._prompt_lens[req_id] = len(history) - 1
            verified = history.after(len(index))
            if len(index) and len(verified) <= self._most_judged:
                matches = self._matches(index, verified[:0], len(verified))
                learn(matches, self._calibrations, verified.tolist())
            index.extend(verified)

    def _forget_all_but(self, req_ids: Sequence[str]) -> None:
        kept = set(req_ids)
        # In the order in which they came, which tensor-parallel ranks share; a set's is each process's own.
        for req_id in [known for known in self._indexes if known not in kept]:
            index, prompt_len = self._indexes.pop(req_id), self._prompt_lens.pop(req_id)
            for source in self._sources:
                source.add(index.tokens[prompt_len:])

    def forget(self) -> None:
        """Begin anew with every request, whatever a failure has left of them."""
        self._indexes.clear()
        self._prompt_lens.clear()

    def _matches(self, index: ContextIndex, ahead: np.ndarray, most: int) -> list[Match]:
        """By source; `ahead` [num_ahead] int32 are supposed to follow the request's context."""
        matches = [index.look_up(ahead, most)] if self._in_context else []
        if self._sources:
            latest = index.latest(ahead)
            matches += [source.look_up(latest, most) for source in self._sources]
        return matches

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
        matches = self._matches(self._indexes[req_id], np.array(drafted, dtype=np.int32), most)
        choice = choose(matches, self._calibrations, least_chance)
        strange = (place for place, token in enumerate(choice.tokens) if not 0 <= token < self._vocab_size)
        end = next(strange, len(choice.tokens))
        return Continuation(choice.tokens[:end], choice.chances[:end])
