# SPDX-License-Identifier: Apache-2.0
"""Tokens held by a draft model's KV cache, by page.

The draft writes the K/V of a verified token in a later round than the target, and much later if rounds
without drafts lie between.
Tracking pages instead of requests covers prefix caching and preemption.
"""

import numpy as np


class HeldTokens:
    """Tracks how many of each page's first entries have K/V of the draft.

    Args:
        num_pages: of the KV cache.
        page_size: tokens.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._held = np.zeros(num_pages, dtype=np.int32)

    def forget(self, pages: np.ndarray, first: int, end: int) -> None:
        """Invalidate a request's tokens from position `first` up to `end`, which the target writes.

        Args:
            pages: [num_pages] int32, the request's pages in order.
            first: first position.
            end: position after the last token.
        """
        if first >= end:
            return
        page, within = divmod(first, self._page_size)
        self._held[pages[page]] = min(self._held[pages[page]], within)
        self._held[pages[page + 1 : (end - 1) // self._page_size + 1]] = 0

    def add(self, pages: np.ndarray, first: int, end: int) -> None:
        """Record K/V of a request's tokens from `first` up to `end`; arguments as in `forget`.

        All tokens before `first` in its page must have K/V.
        """
        if first >= end:
            return
        page, (last, within) = first // self._page_size, divmod(end - 1, self._page_size)
        self._held[pages[page:last]] = self._page_size
        self._held[pages[last]] = max(self._held[pages[last]], within + 1)

    def first_lacking(self, pages: np.ndarray, end: int) -> int:
        """Return the first position before `end` without K/V of the draft; `end` if there is none."""
        last = (end - 1) // self._page_size
        held = self._held[pages[: last + 1]]
        partial = np.flatnonzero(held[:last] < self._page_size)
        page = int(partial[0]) if len(partial) else last
        return min(page * self._page_size + int(held[page]), end)
