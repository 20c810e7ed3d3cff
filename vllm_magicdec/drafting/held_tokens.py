# SPDX-License-Identifier: Apache-2.0
"""Which tokens a draft model's KV cache holds, by the page: pages outlive requests.

The target's passes write each verified token's K/V, the draft's follow later or, where decoding stays
plain, much later. Prefix caching hands pages on from request to request, preemption takes them away: a page
is asked, not a request, so that none of this needs to be known here.
"""

import numpy as np


class HeldTokens:
    """Of every page the number of its first entries that the draft has K/V of, for the tokens now in it.

    Args:
        num_pages: of the KV cache.
        page_size: tokens.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._held = np.zeros(num_pages, dtype=np.int32)

    def forget(self, pages: np.ndarray, first: int, end: int) -> None:
        """The target writes a request's tokens from `first` up to `end`, whatever stood there before.

        Args:
            pages: [num_pages] int32, the request's, in order.
            first: position of a token.
            end: position after the last one.
        """
        if first >= end:
            return
        page, within = divmod(first, self._page_size)
        self._held[pages[page]] = min(self._held[pages[page]], within)
        self._held[pages[page + 1 : (end - 1) // self._page_size + 1]] = 0

    def add(self, pages: np.ndarray, first: int, end: int) -> None:
        """The draft has K/V of a request's tokens from `first` up to `end`; see `forget`.

        It has those of all tokens before in the page of `first`.
        """
        if first >= end:
            return
        page, (last, within) = first // self._page_size, divmod(end - 1, self._page_size)
        self._held[pages[page:last]] = self._page_size
        self._held[pages[last]] = max(self._held[pages[last]], within + 1)

    def first_lacking(self, pages: np.ndarray, end: int) -> int:
        """Of a request's first `end` tokens, the first one that the draft has no K/V of; `end`: none."""
        last = (end - 1) // self._page_size
        held = self._held[pages[: last + 1]]
        partial = np.flatnonzero(held[:last] < self._page_size)
        page = int(partial[0]) if len(partial) else last
        return min(page * self._page_size + int(held[page]), end)
