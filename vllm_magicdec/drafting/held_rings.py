# SPDX-License-Identifier: Apache-2.0
"""Which tokens the rings of a draft model's KV cache hold, by request (`views/rings.py`).

A ring is its request's alone and ends with it: nothing is handed on. So it is the request that is asked,
and only as long as it is in the batch without a break, on the same blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_magicdec.views.rings import Ring


@dataclass
class _Held:
    """Of the sinks those before `end`; of the tokens after them those from `first` up to `end`."""

    blocks: bytes  # [num_blocks] int32, the ring's
    first: int = 0
    end: int = 0


class HeldRings:
    """Of each request, which verified tokens the draft has K/V of.

    Args:
        ring: of each request.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._held: list[_Held] = []  # by place in the batch
        self._by_request: dict[str, _Held] = {}

    def begin_step(self, req_ids: Sequence[str], blocks: Sequence[np.ndarray]) -> None:
        """The target has taken a step with these requests; others have left, or wait for their turn.

        Who comes back may have been preempted: its ring holds nothing, whoever had the blocks meanwhile.

        Args:
            req_ids: of the batch.
            blocks: [num_blocks] int32 each, of their rings.
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
        """The request's tokens from `first` on may be others now."""
        held = self._held[index]
        held.end = min(held.end, first)

    def add(self, index: int, first: int, end: int) -> None:
        """The draft has K/V of the request's tokens from `first` up to `end`, and of those before."""
        held = self._held[index]
        if first <= held.end:
            held.end = max(held.end, end)

    def add_entries(self, index: int, num_tokens: int, end: int) -> None:
        """The draft has K/V of those of the ring's entries for `num_tokens` that are before `end`."""
        held = self._held[index]
        held.first, held.end = self._ring.first_seen(num_tokens), end

    def write_over(self, index: int, end: int) -> None:
        """A round's passes may write the request's tokens up to `end`, over the oldest of its window."""
        held = self._held[index]
        held.first = max(held.first, self._ring.first_left(end))

    def lacking(self, index: int, num_tokens: int) -> np.ndarray:
        """[num_lacking] int64, positions that the round after `num_tokens` may show and that are not there.

        They are the last ones of the ring's entries for that number.
        """
        held, entries = self._held[index], self._ring.entries(num_tokens)
        sinks, first = self._ring.sink_pages * self._ring.page_size, self._ring.first_seen(num_tokens)
        end = held.end
        if held.first > first:  # then what was held after it is not in one piece with what was before
            end = min(end, sinks)
        return entries[np.searchsorted(entries, end) :]
