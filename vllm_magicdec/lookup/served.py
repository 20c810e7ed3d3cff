# SPDX-License-Identifier: Apache-2.0
"""What other requests of this server were answered.

One user's answers set how fast another's come, though not what they say; so this is for servers whose users
may know as much of each other.
"""

import numpy as np

from vllm_magicdec.lookup.context_index import MAX_MATCH, MIN_MATCH, ContextIndex, Match

MAX_TOKENS = 2**20  # that are kept, at most: 20 MiB; at least half of that, where there were as many
_SEPARATOR = -1  # between answers; no token


class ServedAnswers:
    """The latest answers, in the order in which they ended.

    In two halves: where the newer one is full it becomes the older, whose answers go. So no round waits for
    what is kept to be indexed anew, which took 106 ms (half a million tokens, a busy Zen 3; a new half 7).
    """

    def __init__(self) -> None:
        self._older, self._newer = _make_half(), _make_half()

    def add(self, tokens: np.ndarray) -> None:
        """Keep an answer, [num] int32; the oldest ones go where there are too many."""
        answer = np.append(tokens, np.int32(_SEPARATOR))[-(MAX_TOKENS // 2 - 1) :]
        if len(self._newer) + len(answer) > MAX_TOKENS // 2:
            self._older, self._newer = self._newer, _make_half()
        self._newer.extend(answer)

    def look_up(self, latest: np.ndarray, most: int) -> Match:
        """How answers went on after the longest occurrences of the latest tokens; not beyond their ends.

        Args:
            latest: [num] int32.
            most: tokens to return, at most.
        """
        latest = latest[-MAX_MATCH:]
        # A single token is looked for where neither half has more: it takes the longest, and says least.
        newer, older = (half.look_up(latest, most, MIN_MATCH + 1) for half in (self._newer, self._older))
        match = older if older.length > newer.length else newer
        if match.length == 0:
            newer = self._newer.look_up(latest, most)
            match = newer if newer.length else self._older.look_up(latest, most)
        end = match.tokens.index(_SEPARATOR) if _SEPARATOR in match.tokens else len(match.tokens)
        return Match(match.length, match.tokens[:end], match.shares[:end])


def _make_half() -> ContextIndex:
    """With room for all that it will have: to grow would index anew what is there."""
    half = ContextIndex(MAX_TOKENS // 2)
    half.extend(np.array([_SEPARATOR], dtype=np.int32))
    return half
