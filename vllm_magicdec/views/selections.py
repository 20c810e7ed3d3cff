# SPDX-License-Identifier: Apache-2.0
"""What a policy selected for the requests of a batch, kept for as long as they run."""

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_magicdec.views.base import on_device


class Budget(Protocol):
    """What a draft step may read of a request, in entries: tokens or pages."""

    @property
    def unit(self) -> int:
        """Tokens of an entry."""
        ...

    @property
    def num_sinks(self) -> int:
        """Entries at the start of the context that stay in view."""
        ...

    @property
    def num_recent(self) -> int:
        """Least number of latest entries in view."""
        ...

    @property
    def max_tokens(self) -> int:
        """K/V entries of the cache that a draft step reads of a request, at most."""
        ...

    @property
    def min_entries(self) -> int:
        """Entries in budget, whatever the context."""
        ...

    @property
    def max_selected(self) -> int:
        """Most entries that can be selected between the sinks and the recent ones."""
        ...

    def entries(self, context_lens: torch.Tensor) -> torch.Tensor:
        """Entries in budget, [num_reqs] int64; `context_lens` [num_reqs] int64, in tokens."""
        ...


class RequestRows:
    """A row of device state for every request; rows of requests that are gone go to new ones."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self._rows: dict[str, int] = {}
        self._free = list(range(max_num_reqs))
        self._device = device

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._rows

    def add(self, req_ids: Sequence[str]) -> list[int]:
        """Give rows to the requests of a batch that have none; returns the new ones' rows."""
        new = [req_id for req_id in req_ids if req_id not in self._rows]
        if len(new) > len(self._free):
            present = set(req_ids)
            for gone in [req_id for req_id in self._rows if req_id not in present]:
                self._free.append(self._rows.pop(gone))
        for req_id in new:
            self._rows[req_id] = self._free.pop()
        return [self._rows[req_id] for req_id in new]

    def row(self, req_id: str) -> int:
        """The row of a request that has one."""
        return self._rows[req_id]

    def of(self, req_ids: Sequence[str]) -> torch.Tensor:
        """Rows of requests that have one, [num_reqs] int64."""
        return on_device([self._rows[req_id] for req_id in req_ids], self._device)


class Selections:
    """What was selected for every request, on the device, and when, on the host.

    Entries are tokens, per layer and KV head, or pages, per layer, as views count them. They are kept by
    position in the context, not by slot, so that a request that was preempted and comes back on other pages
    keeps its own.

    Args:
        num_layers: attention layers of the target.
        num_heads: KV heads that choose for themselves; 1 for pages.
        max_num_reqs: most requests of a round.
        max_selected: most entries of a request.
        device: where views are made.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        max_num_reqs: int,
        max_selected: int,
        device: torch.device,
    ) -> None:
        shape = (max_num_reqs, num_layers, num_heads, max_selected)
        self.positions = torch.zeros(shape, dtype=torch.int32, device=device)  # best first
        self.counts = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        # First entry after the region that was chosen from.
        self.ends = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.num_made = 0  # times that some were made
        self._rows = RequestRows(max_num_reqs, device)
        self._made_at: dict[str, int] = {}  # context length, in tokens

    def begin_round(self, req_ids: Sequence[str]) -> None:
        """Give the batch's new requests rows with nothing selected."""
        for row in self._rows.add(req_ids):
            self.counts[row] = 0
            self.ends[row] = 0
        self._made_at = {req_id: n for req_id, n in self._made_at.items() if req_id in self._rows}

    @property
    def num_bytes(self) -> int:
        """Device memory of the selected entries."""
        return self.positions.numel() * self.positions.element_size()

    def row(self, req_id: str) -> int:
        """The row of a request of this round's batch, for writing to it without waiting for the device."""
        return self._rows.row(req_id)

    def rows(self, req_ids: Sequence[str]) -> torch.Tensor:
        """Rows of requests of this round's batch, [num_reqs] int64."""
        return self._rows.of(req_ids)

    def made_at(self, req_id: str) -> int | None:
        """The context length at which the request's selection was made, or None."""
        return self._made_at.get(req_id)

    def set(
        self, req_ids: Sequence[str], context_lens: Sequence[int], counts: torch.Tensor, ends: torch.Tensor
    ) -> None:
        """Record that selections were made; their `positions` have been filled.

        Args:
            req_ids: requests of this round's batch.
            context_lens: tokens of context that the host knows of, when it was made.
            counts: [len(req_ids)] int64, entries selected.
            ends: [len(req_ids)] int64, see `ends`.
        """
        rows = self.rows(req_ids)
        self.counts[rows] = counts
        self.ends[rows] = ends
        self.num_made += 1
        self._made_at.update(zip(req_ids, context_lens, strict=True))
