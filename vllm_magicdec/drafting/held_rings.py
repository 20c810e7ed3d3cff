# SPDX-License-Identifier: Apache-2.0
"""Tokens held by the rings of a draft model's KV cache, by request (`views/rings.py`).

A ring belongs to one request. Its state is valid while the request stays in the batch on the same blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_magicdec.views.rings import Ring


@dataclass
class _Held:
    """K/V is present at sink positions below `end`, and at other positions in [first, end)."""

    blocks: bytes  # [num_blocks] int32
    first: int = 0
    end: int = 0


class HeldRings:
    """Tracks the verified tokens of each request that have K/V of the draft.

    Args:
        ring: layout of each request's ring.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._held: list[_Held] = []  # by index in the batch
        self._by_request: dict[str, _Held] = {}

    def begin_step(self, req_ids: Sequence[str], blocks: Sequence[np.ndarray]) -> None:
        """Start a step of the target; requests that are not in the batch lose their rings.

        Args:
            req_ids: of the batch.
            blocks: [num_blocks] int32 by request, the blocks of its ring.
        """
        self._held = []
        for req_id, own in zip(req_ids, blocks, strict=True):
            held, held_blocks = self._by_request.get(req_id), own.tobytes()
            if held is None or not held_blocks.startswith(held.blocks):
                held = _Held(held_blocks)
            held.blocks = held_blocks
            self._held.append(held)
        self._by_request = dict(zip(req_ids, self._held, strict=True))

    def forget(self, index: int, first: int) -> None:
        """Invalidate the request's tokens from `first` on."""
        held = self._held[index]
        held.end = min(held.end, first)

    def add(self, index: int, first: int, end: int) -> None:
        """Record K/V of the request's tokens from `first` up to `end`, if none before is missing."""
        held = self._held[index]
        if first <= held.end:
            held.end = max(held.end, end)

    def add_entries(self, index: int, num_tokens: int, end: int) -> None:
        """Record that the ring's entries of a context of `num_tokens` have K/V if they are before `end`."""
        held = self._held[index]
        held.first, held.end = self._ring.first_seen(num_tokens), end

    def write_over(self, index: int, end: int) -> None:
        """Invalidate the oldest tokens of the window, which tokens up to `end` may overwrite."""
        held = self._held[index]
        held.first = max(held.first, self._ring.first_left(end))

    def lacking(self, index: int, num_tokens: int) -> np.ndarray:
        """Return the positions without K/V that the round after `num_tokens` may read.

        Returns:
            [num_lacking] int64, the last entries of the ring.
        """
        held, entries = self._held[index], self._ring.entries(num_tokens)
        sinks, first = self._ring.sink_pages * self._ring.page_size, self._ring.first_seen(num_tokens)
        end = held.end
        if held.first > first:  # held tokens are not contiguous
            end = min(end, sinks)
        return entries[np.searchsorted(entries, end) :]
