# SPDX-License-Identifier: Apache-2.0
"""What other requests of this server were answered.

One user's answers set how fast another's come, though not what they say; so this is for servers whose users
may know as much of each other.
"""

import numpy as np

from vllm_magicdec.lookup.context_index import MAX_MATCH, ContextIndex, Match

MAX_TOKENS = 2**20  # that are kept, at most: 20 MiB
_SEPARATOR = -1  # between answers; no token


class ServedAnswers:
    """The latest answers, in the order in which they ended."""

    def __init__(self) -> None:
        self._index = ContextIndex()
        self._index.extend(np.array([_SEPARATOR], dtype=np.int32))

    def add(self, tokens: np.ndarray) -> None:
        """Keep an answer, [num] int32; the oldest ones go where there are too many."""
        if len(self._index) + len(tokens) + 1 > MAX_TOKENS:
            kept = self._index.tokens[-MAX_TOKENS // 2 :]
            self._index = ContextIndex(MAX_TOKENS)
            self._index.extend(kept)
        tokens = tokens[-MAX_TOKENS // 2 :]
        self._index.extend(np.append(tokens, np.int32(_SEPARATOR)))

    def look_up(self, latest: np.ndarray, most: int) -> Match:
        """How answers went on after the longest occurrences of the latest tokens; not beyond their ends.

        Args:
            latest: [num] int32.
            most: tokens to return, at most.
        """
        match = self._index.look_up(latest[-MAX_MATCH:], most)
        end = match.tokens.index(_SEPARATOR) if _SEPARATOR in match.tokens else len(match.tokens)
        return Match(match.length, match.tokens[:end], match.shares[:end])
