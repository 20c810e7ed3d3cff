# SPDX-License-Identifier: Apache-2.0
"""Likely continuations of a worker's requests, from each one's own context and from other sources."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from vllm_magicdec.lookup.calibration import Calibration, choose, learn
from vllm_magicdec.lookup.context_index import ContextIndex, Match, Source
from vllm_magicdec.lookup.continuation import MIN_ACCEPTANCE, Continuation
from vllm_magicdec.lookup.datastore import Datastore
from vllm_magicdec.lookup.history import History
from vllm_magicdec.lookup.served import ServedAnswers

# Lookups learn from steps of up to so many tokens, or as many as a round has: longer ones were no rounds.
_MAX_LEARNED = 32
_NO_TOKENS = np.zeros(0, dtype=np.int32)


class Lookups:
    """Lookups for all requests of a worker.

    After a request's verified tokens each source is asked once per round. The result is kept for other
    callers, and for the next round, which learns from it.

    Args:
        max_num_reqs: maximum requests in a batch, and maximum contexts kept.
        vocab_size: a continuation ends before an id outside of the vocabulary (an image's placeholder).
        sources: sources beside the requests' own contexts, by name; at a tie the first one wins.
        in_context: whether to search the requests' own contexts.
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
        self._max_verified = max_drafts + 1  # per request and round
        self._max_learned = max(_MAX_LEARNED, self._max_verified)
        self._sources = dict(sources or {})
        self._failed = set[str]()
        self.on_failure: Callable[[str], None] = _raise_again
        """Called with a source's name while its exception is handled; unless it raises, the source is not
        asked again."""
        self._in_context = in_context
        self._indexes: dict[str, ContextIndex] = {}
        # After a request's verified tokens: how many were asked for, and the matches by source.
        self._found: dict[str, tuple[int, list[Match]]] = {}
        self._calibrations = [Calibration() for _ in range(in_context + len(self._sources))]
        # Let Numba compile now and not in the first request.
        index = ContextIndex()
        index.extend(np.zeros(4, dtype=np.int32))
        self._matches(index, np.zeros(1, dtype=np.int32), 1)

    def follow(self, req_ids: Sequence[str], histories: Sequence[History]) -> None:
        """Index the tokens that were verified since the last round, and learn from them."""
        if len(self._indexes.keys() | req_ids) > self._max_num_reqs:  # some requests are preempted
            for req_id in self._indexes.keys() - req_ids:
                self._drop(req_id)
        for req_id, history in zip(req_ids, histories, strict=True):
            index = self._indexes.get(req_id)
            if index is None or not history.may_extend(index.tokens):  # a new request with an old name
                self._drop(req_id)
                index = self._indexes[req_id] = ContextIndex(len(history))
            verified = history.after(len(index))
            if len(index) and 0 < len(verified) <= self._max_learned:
                learn(self._ahead(req_id, len(verified)), self._calibrations, verified.tolist())
            self._found.pop(req_id, None)
            index.extend(verified)

    def finish(self, req_id: str, answer: np.ndarray) -> None:
        """End a request, which may never have been in a batch; `answer` [num] int32 has its output tokens.

        All tensor-parallel ranks must call this in the same order.
        """
        self._drop(req_id)
        for name, source in self._sources.items():
            if len(answer) and name not in self._failed:
                source.add(answer)

    def forget(self) -> None:
        """Drop the state of all requests, after a failure."""
        self._indexes.clear()
        self._found.clear()

    def _drop(self, req_id: str) -> None:
        self._indexes.pop(req_id, None)
        self._found.pop(req_id, None)

    def _ahead(self, req_id: str, max_tokens: int) -> list[Match]:
        """Return the matches after a request's verified tokens, by source."""
        number, matches = self._found.get(req_id, (0, []))
        if number < max_tokens:
            number = max(max_tokens, self._max_verified)
            matches = self._matches(self._indexes[req_id], _NO_TOKENS, number)
            self._found[req_id] = number, matches
        return [match.first(max_tokens) for match in matches]

    def _matches(self, index: ContextIndex, ahead: np.ndarray, max_tokens: int) -> list[Match]:
        """Return the matches by source, if the tokens `ahead` [num_ahead] int32 follow the context."""
        matches = [index.look_up(ahead, max_tokens)] if self._in_context else []
        if self._sources:
            latest = index.latest(ahead)
            matches += [self._ask(name, latest, max_tokens) for name in self._sources]
        return matches

    def _ask(self, name: str, latest: np.ndarray, max_tokens: int) -> Match:
        if name not in self._failed:
            try:
                return self._sources[name].look_up(latest, max_tokens)
            except Exception:
                self.on_failure(name)
                self._failed.add(name)
        return Match(0, [], [])

    def look_up(
        self, req_id: str, drafted: Sequence[int], max_tokens: int, min_acceptance: float = MIN_ACCEPTANCE
    ) -> Continuation:
        """Return the likeliest continuation of a request.

        Args:
            req_id: a request of the latest `follow`.
            drafted: drafts after its verified tokens.
            min_acceptance: the continuation ends where its probability as a whole falls below this.
        """
        if max_tokens <= 0:
            return Continuation()
        if drafted:
            matches = self._matches(self._indexes[req_id], np.array(drafted, dtype=np.int32), max_tokens)
        else:
            matches = self._ahead(req_id, max_tokens)
        _, best = choose(matches, self._calibrations, min_acceptance)
        outside = (i for i, token in enumerate(best.tokens) if not 0 <= token < self._vocab_size)
        return best.first(next(outside, len(best.tokens)))


def _raise_again(name: str) -> None:
    """Let a failure of a source propagate."""
    raise


def open_lookups(names: Sequence[str], max_num_reqs: int, vocab_size: int, max_drafts: int) -> Lookups:
    """Open the sources `context`, `served` and paths of datastores; see `Lookups` for the other arguments.

    Raises:
        MagicDecConfigError: a datastore cannot be read.
    """
    sources: dict[str, Source] = {}
    for name in names:
        if name == "served":
            sources[name] = ServedAnswers()
        elif name != "context":
            sources[name] = Datastore(Path(name), vocab_size)
    return Lookups(max_num_reqs, vocab_size, max_drafts, sources, in_context="context" in names)
