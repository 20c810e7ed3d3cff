# SPDX-License-Identifier: Apache-2.0
"""Likely continuations of the requests of a worker, from each one's own context and from other sources."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vllm_magicdec.lookup.calibration import Calibration
from vllm_magicdec.lookup.context_index import ContextIndex, Match
from vllm_magicdec.lookup.continuation import MIN_ACCEPTANCE, Continuation
from vllm_magicdec.lookup.history import History
from vllm_magicdec.lookup.merging import choose, learn

# Tokens of one step that lookups are judged by, or as many as a round brings if that is more: a step that
# brings more was no round of drafts.
_MOST_JUDGED = 32
_NO_TOKENS = np.zeros(0, dtype=np.int32)


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
        """Take note of a request's answer, [num] int32, when it has ended."""
        ...


@dataclass(frozen=True)
class _Asked:
    """What the sources said of how a request goes on after what is verified."""

    most: int  # tokens that were asked for
    matches: list[Match]


class Lookups:
    """Of all requests of a worker.

    After what is verified of a request its sources are asked once in a round: whoever else asks, and the
    next round, which learns from it, is told the same.

    Args:
        max_num_reqs: requests in a batch; of as many contexts are kept, at most.
        vocab_size: a continuation ends before what is no token of the vocabulary (an image's placeholder).
        max_drafts: of a request's round.
        sources: by name, beside each request's own context, which of equals is believed first.
        in_context: whether a request's own context counts.
    """

    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        max_drafts: int,
        sources: Mapping[str, Source] | None = None,
        *,
        in_context: bool = True,
    ) -> None:
        self._max_num_reqs = max_num_reqs
        self._vocab_size = vocab_size
        self._most_verified = max_drafts + 1  # of a request, in a round
        self._most_judged = max(_MOST_JUDGED, self._most_verified)
        self._sources = dict(sources or {})
        self._resting = set[str]()
        self._answered = set[str]()
        self._on_failure: Callable[[str], None] = _raise_again
        self._in_context = in_context
        self._indexes: dict[str, ContextIndex] = {}
        self._asked: dict[str, _Asked] = {}
        self._calibrations = [Calibration() for _ in range(in_context + len(self._sources))]
        self._compile()

    def _compile(self) -> None:
        """Let Numba compile now what would delay the first request."""
        index = ContextIndex()
        index.extend(np.zeros(4, dtype=np.int32))
        self._matches(index, np.zeros(1, dtype=np.int32), 1)

    @property
    def source_names(self) -> Sequence[str]:
        """Of the sources beside the requests' own contexts."""
        return list(self._sources)

    @property
    def answered(self) -> Set[str]:
        """The sources that were asked in this round, of which none has failed."""
        return self._answered

    def begin_round(self, resting: Iterable[str], on_failure: Callable[[str], None]) -> None:
        """Say who is asked, until the next round.

        Args:
            resting: sources that are not.
            on_failure: is called with the name of a source that fails, where the exception is handled. If
                it returns, that source rests as well.
        """
        self._resting, self._answered = set(resting), set()
        self._on_failure = on_failure

    def follow(self, req_ids: Sequence[str], histories: Sequence[History]) -> None:
        """Take note of what was verified since the last round, and of what lookups would have said of it.

        Args:
            req_ids: of a batch.
            histories: theirs.
        """
        if len(self._indexes.keys() | req_ids) > self._max_num_reqs:  # some wait for their turn
            for req_id in self._indexes.keys() - req_ids:
                self._drop(req_id)
        for req_id, history in zip(req_ids, histories, strict=True):
            index = self._indexes.get(req_id)
            if index is None or not history.goes_on_after(index.tokens):  # another request of that name
                self._drop(req_id)
                index = self._indexes[req_id] = ContextIndex(len(history))
            verified = history.after(len(index))
            if len(index) and 0 < len(verified) <= self._most_judged:
                learn(self._ahead(req_id, len(verified)), self._calibrations, verified.tolist())
            self._asked.pop(req_id, None)
            index.extend(verified)

    def finish(self, req_id: str, answer: np.ndarray) -> None:
        """A request has ended. To be called in the same order by all tensor-parallel ranks.

        Args:
            req_id: it need not have been in a batch.
            answer: [num] int32, all tokens that it was answered.
        """
        self._drop(req_id)
        for name, source in self._sources.items():
            if len(answer) and name not in self._resting:
                try:
                    source.add(answer)
                except Exception:
                    self._rest(name)

    def forget(self) -> None:
        """Begin anew with every request, whatever a failure has left of them."""
        self._indexes.clear()
        self._asked.clear()

    def _drop(self, req_id: str) -> None:
        self._indexes.pop(req_id, None)
        self._asked.pop(req_id, None)

    def _ahead(self, req_id: str, most: int) -> list[Match]:
        """What each source says of up to so many tokens after those that are verified of a request."""
        asked = self._asked.get(req_id)
        if asked is None or asked.most < most:
            number = max(most, self._most_verified)
            asked = _Asked(number, self._matches(self._indexes[req_id], _NO_TOKENS, number))
            self._asked[req_id] = asked
        return [match.first(most) for match in asked.matches]

    def _matches(self, index: ContextIndex, ahead: np.ndarray, most: int) -> list[Match]:
        """By source; `ahead` [num_ahead] int32 are supposed to follow the request's context."""
        matches = [index.look_up(ahead, most)] if self._in_context else []
        if self._sources:
            latest = index.latest(ahead)
            matches += [self._ask(name, latest, most) for name in self._sources]
        return matches

    def _ask(self, name: str, latest: np.ndarray, most: int) -> Match:
        """A source; one that rests or fails says nothing, and the others are heard."""
        if name in self._resting:
            return Match(0, [], [])
        try:
            match = self._sources[name].look_up(latest, most)
        except Exception:
            self._rest(name)
            return Match(0, [], [])
        self._answered.add(name)
        return match

    def _rest(self, name: str) -> None:
        """A source has failed; to be called where the exception is handled."""
        self._on_failure(name)
        self._resting.add(name)
        self._answered.discard(name)

    def look_up(
        self, req_id: str, drafted: Sequence[int], most: int, min_acceptance: float = MIN_ACCEPTANCE
    ) -> Continuation:
        """How a request is likely to go on.

        Args:
            req_id: it was in the latest `follow`.
            drafted: tokens that were drafted after what is verified.
            most: tokens to return.
            min_acceptance: that all tokens up to the last one returned are right.
        """
        if most <= 0:
            return Continuation()
        if drafted:
            matches = self._matches(self._indexes[req_id], np.array(drafted, dtype=np.int32), most)
        else:
            matches = self._ahead(req_id, most)
        choice = choose(matches, self._calibrations, min_acceptance)
        strange = (place for place, token in enumerate(choice.tokens) if not 0 <= token < self._vocab_size)
        end = next(strange, len(choice.tokens))
        return Continuation(choice.tokens[:end], choice.chances[:end])


def _raise_again(name: str) -> None:
    """What is done about a source that fails before anybody has said what to do."""
    raise
