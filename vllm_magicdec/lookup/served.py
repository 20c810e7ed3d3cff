# SPDX-License-Identifier: Apache-2.0
"""Lookups in the answers to other requests of this server.

One user's answers affect how fast another's come, though not their content. So this is for servers whose
users may know this much about each other.
"""

import numpy as np
from typing_extensions import override

from vllm_magicdec.lookup.context_index import MAX_MATCH, MIN_MATCH, ContextIndex, Match, Source

MAX_TOKENS = 2**20  # 20 MiB
_SEPARATOR = -1  # between answers; not a token id


class ServedAnswers(Source):
    """The latest answers, up to MAX_TOKENS tokens, in the order in which they ended.

    They are kept in two halves. When the newer half is full it replaces the older one. So no round waits
    for a new index of the kept answers, which took 106 ms (half a million tokens, a busy Zen 3; a new half
    takes 7 ms).
    """

    def __init__(self) -> None:
        self._older, self._newer = _make_half(), _make_half()

    @override
    def add(self, tokens: np.ndarray) -> None:
        answer = np.append(tokens, np.int32(_SEPARATOR))[-(MAX_TOKENS // 2 - 1) :]
        if len(self._newer) + len(answer) > MAX_TOKENS // 2:
            self._older, self._newer = self._newer, _make_half()
        self._newer.extend(answer)

    @override
    def look_up(self, latest: np.ndarray, max_tokens: int) -> Match:
        latest = latest[-MAX_MATCH:]
        # Match a single token only if neither half has more: it is the slowest and the least reliable.
        newer, older = (
            half.look_up(latest, max_tokens, MIN_MATCH + 1) for half in (self._newer, self._older)
        )
        match = older if older.length > newer.length else newer
        if match.length == 0:
            newer = self._newer.look_up(latest, max_tokens)
            match = newer if newer.length else self._older.look_up(latest, max_tokens)
        return match.first(match.tokens.index(_SEPARATOR)) if _SEPARATOR in match.tokens else match


def _make_half() -> ContextIndex:
    half = ContextIndex(MAX_TOKENS // 2)  # at once, because growing means indexing again
    half.extend(np.array([_SEPARATOR], dtype=np.int32))
    return half
