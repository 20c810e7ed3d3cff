# SPDX-License-Identifier: Apache-2.0
"""Budgets, and the entries that a policy selected for the running requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_magicdec.views.tensors import on_device


@dataclass(frozen=True)
class Budget:
    """Entries of one request, tokens or pages, that a draft step may read.

    The budget is `min_entries` for every request or, if `context_fraction` is above 0, that fraction of
    its context between `min_entries` and `max_entries`.
    """

    unit: int  # tokens per entry
    num_sinks: int  # entries at the start of the context that stay in view
    min_entries: int
    max_entries: int
    context_fraction: float = 0.0
    num_recent: int = 0  # minimum number of latest entries in view beside selected ones

    @property
    def max_tokens(self) -> int:
        """Maximum K/V entries of the cache that a draft step reads of a request."""
        return self.max_entries * self.unit

    @property
    def max_selected(self) -> int:
        """Maximum entries that can be selected between the sinks and the recent ones."""
        return max(0, self.max_entries - self.num_sinks - self.num_recent)

    def entries(self, context_lens: torch.Tensor) -> torch.Tensor:
        """Entries in budget, [num_reqs] int64; `context_lens` [num_reqs] int64, in tokens."""
        if not self.context_fraction:
            return torch.full_like(context_lens, self.min_entries)
        target = torch.ceil(context_lens.double() * self.context_fraction / self.unit)
        return target.long().clamp_(self.min_entries, self.max_entries)


def fixed_tokens(budget: float, min_budget: int) -> tuple[str, int]:
    """The options, for a message, and the tokens that a budget holds for contexts of any length.

    Args:
        budget: tokens, or a fraction of the context when below 1.
        min_budget: tokens; the minimum of a fraction.
    """
    if budget >= 1:
        return "draft_kv_budget", int(budget)
    return f"draft_kv_budget={budget:g} with draft_kv_min_budget", min_budget


class RequestRows:
    """Assigns a row of state to every request, and reuses those that were not asked for longest."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self._rows: dict[str, int] = {}
        self._free = list(range(max_num_reqs))
        self._device = device

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._rows

    def add(self, req_ids: Sequence[str]) -> list[int]:
        """Assign rows to the requests of a batch that have none; return the new rows."""
        new = []
        for req_id in req_ids:
            row = self._rows.pop(req_id, None)
            if row is None:
                new.append(req_id)
            else:
                self._rows[req_id] = row  # the latest is last
        for req_id in new:
            row = self._free.pop() if self._free else self._rows.pop(next(iter(self._rows)))
            self._rows[req_id] = row
        return [self._rows[req_id] for req_id in new]

    def row(self, req_id: str) -> int:
        """The row of a request that has one."""
        return self._rows[req_id]

    def of(self, req_ids: Sequence[str]) -> torch.Tensor:
        """Rows of requests that have one, [num_reqs] int64."""
        return on_device([self._rows[req_id] for req_id in req_ids], self._device)


class Selections:
    """The selected entries of every request, on the device.

    Entries are tokens per layer and KV head, or pages per layer. They are positions in the context, not
    slots, so that a preempted request keeps them when it resumes on other pages.

    Args:
        num_layers: attention layers of the target.
        num_heads: KV heads with selections of their own; 1 for pages.
        max_selected: entries of a request.
    """

    def __init__(
        self, *, num_layers: int, num_heads: int, max_num_reqs: int, max_selected: int, device: torch.device
    ) -> None:
        shape = (max_num_reqs, num_layers, num_heads, max_selected)
        self.positions = torch.zeros(shape, dtype=torch.int32, device=device)  # best first
        self.counts = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        # First entry after the region that was selected from.
        self.ends = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.version = 0  # incremented by every selection
        self._rows = RequestRows(max_num_reqs, device)
        self._selected_at: dict[str, int] = {}  # context length, in tokens

    def begin_round(self, req_ids: Sequence[str]) -> None:
        """Assign rows with no selection to the new requests of the batch."""
        for row in self._rows.add(req_ids):
            # By slices: assigning a number to one element would wait for the device.
            self.counts[row : row + 1] = 0
            self.ends[row : row + 1] = 0
        self._selected_at = {req_id: n for req_id, n in self._selected_at.items() if req_id in self._rows}

    def row(self, req_id: str) -> int:
        """The row of a request of this round's batch, for writing to it without waiting for the device."""
        return self._rows.row(req_id)

    def rows(self, req_ids: Sequence[str]) -> torch.Tensor:
        """Rows of requests of this round's batch, [num_reqs] int64."""
        return self._rows.of(req_ids)

    def selected_at(self, req_id: str) -> int | None:
        """The context length, in tokens, at the request's latest selection, or None."""
        return self._selected_at.get(req_id)

    def set(
        self, req_ids: Sequence[str], context_lens: Sequence[int], counts: torch.Tensor, ends: torch.Tensor
    ) -> None:
        """Record selections whose `positions` have been filled.

        Args:
            req_ids: requests of this round's batch.
            context_lens: tokens of context that the host knows.
            counts: [len(req_ids)] int64, selected entries.
            ends: [len(req_ids)] int64, see `ends`.
        """
        rows = self.rows(req_ids)
        self.counts[rows] = counts
        self.ends[rows] = ends
        self.version += 1
        self._selected_at.update(zip(req_ids, context_lens, strict=True))
