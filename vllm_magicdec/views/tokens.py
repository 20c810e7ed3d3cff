# SPDX-License-Identifier: Apache-2.0
"""Token views: for every request, layer and KV head, the slots that the draft reads.

A view has three parts, all of them positions of the request's own context:

    selection   selected by the policy, per layer and KV head, when the prompt ends (or again later)
    sinks       the first tokens
    recent      from the end of the region that was selected from up to the query; a ring: when the budget
                is full, the query's own slot replaces the oldest one

Selections are positions, best first, and become slots for all layers at once; on a CPU only when they or
the block tables change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from typing_extensions import override

from vllm_magicdec.views.round import Batch, Part, Queries, Selector, TokenMask, TokenView, Views
from vllm_magicdec.views.selections import Budget, Selections, fixed_tokens
from vllm_magicdec.views.slots import DraftSlots
from vllm_magicdec.views.tensors import ceil_div, has_kernels, on_device

# Minimum share of the latest tokens in small budgets, because drafts need them most. Chosen with
# benchmarks/acceptance.py at a budget of 64.
SMALL_BUDGET = 64
SMALL_RECENT = 0.75
_NO_SLOT = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class TokenBudget(Budget):
    """Tokens of one request that a draft step may read; recent ones include the drafted ones."""

    @classmethod
    def from_fields(
        cls,
        *,
        budget: float,
        min_budget: int,
        sink: int,
        window: int,
        recent: float = 0.0,
        num_speculative_tokens: int,
        max_model_len: int,
    ) -> "TokenBudget":
        """Make a budget of tokens, or of a fraction of the context when below 1.

        `window` and `recent`: see `recent_tokens`.

        Raises:
            ValueError: it cannot hold the sinks, the latest tokens and one token more.
        """
        name, min_tokens = fixed_tokens(budget, min_budget)
        window = recent_tokens(
            min_tokens - sink, max(window, num_speculative_tokens), recent, budget=min_tokens
        )
        required = min(sink + window + 1, max_model_len)
        if min_tokens < required:
            raise ValueError(
                f"{name}={min_tokens} cannot hold {sink} sinks and a window of {window} tokens; "
                f"use at least {required}"
            )
        min_tokens = min(min_tokens, max_model_len)
        fraction = budget if budget < 1 else 0.0
        max_tokens = max(min_tokens, int(fraction * max_model_len))
        return cls(1, sink, min_tokens, max_tokens, fraction, window)

    def __str__(self) -> str:
        parts = f"{self.num_sinks} sinks, at least {self.num_recent} recent, the rest selected"
        if self.context_fraction:
            return (
                f"{self.context_fraction:g} of the context, between {self.min_entries} and "
                f"{self.max_entries} tokens ({parts})"
            )
        return f"{self.min_entries} tokens ({parts})"


def recent_tokens(room: int, window: int, recent: float, *, budget: int) -> int:
    """Return the minimum number of latest tokens in view.

    Args:
        room: tokens in budget beside the sinks.
        window: lower bound of the result.
        recent: tokens, or a fraction of the budget when below 1; a fraction above 0 is raised to
            `SMALL_RECENT` of the budget's first `SMALL_BUDGET` tokens.
    """
    if not 0 < recent < 1:
        return max(window, int(recent))
    target = max(recent * budget, SMALL_RECENT * min(budget, SMALL_BUDGET))
    return max(window, min(int(target), room - 1))


@dataclass(frozen=True, eq=False, repr=False)
class TokenRound:
    """A round in the layers of a token view (`views.round.RoundView`).

    From one step to the next a list changes in one column: the query's slot is appended or, if the budget
    is full, replaces the oldest recent token. One by one, the lists are changed in place. For a pass, the
    slots of the later steps' queries are appended, and a mask selects the slots of each query's own step.
    """

    draft_slots: DraftSlots  # prepared for the round
    lens: torch.Tensor  # [num_steps, num_reqs] int32, entries in view
    # [num_layers, num_reqs, num_kv_heads, budget] int32, the first step's lists; `step` writes to them.
    slots: torch.Tensor
    query_columns: torch.Tensor  # [num_steps, num_reqs] int64, the column of each step's query in its list
    query_slots: torch.Tensor  # [num_steps, num_reqs] int32, the slot of each step's query
    common_len: int | None  # see `TokenView`

    def step(self, index: int) -> Part:
        """Return the input of a step."""
        if index:
            columns, query_slots = (
                values[index].view(1, -1, 1, 1).expand(*self.slots.shape[:3], 1)
                for values in (self.query_columns, self.query_slots)
            )
            self.slots.scatter_(-1, columns, query_slots)
        view = TokenView(self.lens[index], self.slots, self.common_len)
        return self.draft_slots.step(index, self.lens.shape[1], view)

    def take(self, queries: Queries) -> Part:
        """Return the input of a pass."""
        device = self.lens.device
        view = self._masked_view(queries, on_device(queries.requests, device))
        return self.draft_slots.take(queries, on_device(queries.request_indices, device), view)

    def _masked_view(self, queries: Queries, requests: torch.Tensor) -> TokenView:
        device = requests.device
        steps = on_device(queries.steps[queries.table], device).unsqueeze(-1)  # [num_running, max_len, 1]
        later = np.arange(1, queries.lasts.max() + 1)
        is_seen = torch.cat(
            [steps < self._seen_until[requests].unsqueeze(1), steps >= on_device(later, device)], dim=-1
        )
        # Steps after a request's last one have no K/V yet; its last slot pads them.
        written = on_device(np.minimum(later, queries.lasts[:, None]), device)  # [num_running, later]
        drafted = self.query_slots[written, requests.unsqueeze(1)]
        all_run = np.array_equal(queries.requests, np.arange(self.lens.shape[1]))
        slots = self.slots if all_run else self.slots[:, requests]
        drafted = drafted[:, None].expand(*slots.shape[:3], len(later))
        mask = TokenMask(is_seen, on_device(queries.table, device), on_device(queries.cells, device))
        slots = torch.cat([slots, drafted], dim=-1)
        lens = torch.full((len(requests),), slots.shape[-1], dtype=torch.int32, device=device)
        return TokenView(lens, slots, mask=mask)

    @cached_property
    def _seen_until(self) -> torch.Tensor:
        """[num_reqs, budget] int64, the first step that does not see a column of the first step's lists."""
        num_steps, num_reqs = self.lens.shape
        columns = torch.arange(self.slots.shape[-1], device=self.slots.device)
        seen_until = torch.where(columns < self.lens[0].unsqueeze(1), num_steps, 0)
        steps = torch.arange(num_steps, device=columns.device).expand(num_reqs, -1)
        # Steps beyond the model's length have the last token's column.
        return seen_until.scatter_reduce_(1, self.query_columns[1:].T, steps[:, 1:], "amin")


class PlannedAttention(Protocol):
    """Attention that is planned before a CUDA graph over it is captured."""

    @property
    def num_bytes(self) -> int:
        """Device memory."""

    def reserve(self, width: int) -> None:
        """Make room for views of up to `width` columns; called once, before anything is planned."""

    def prepare_capture(self, num_reqs: int, length: int) -> None:
        """Make a plan that the graph may keep, for views of `length` columns."""


class TokenViews(Views):
    """Selected tokens for every layer and KV head.

    A view holds all tokens up to its query, or as many as the budget allows. Each step overwrites the lists
    of the previous one with its query's slot.

    Args:
        selections: tokens, best first, with room for the budget's.
        selector: updates `selections`.
        plans: attention planned for full views.
    """

    def __init__(
        self,
        selections: Selections,
        selector: Selector,
        budget: TokenBudget,
        draft_slots: DraftSlots,
        plans: Sequence[PlannedAttention] = (),
    ) -> None:
        self._selections = selections
        self._selector = selector
        self._budget = budget
        self._draft_slots = draft_slots
        self._plans = plans
        self._page_size = draft_slots.page_size
        _, num_layers, num_kv_heads, _ = selections.positions.shape
        device = selections.positions.device
        width = budget.max_tokens
        self._columns = torch.arange(width, device=device)
        shape = draft_slots.positions.shape
        self._max_num_steps, max_num_reqs = shape
        self._lens = torch.zeros(shape, dtype=torch.int32, device=device)
        # Column and slot of each step's query.
        self._query_columns = torch.zeros(shape, dtype=torch.int64, device=device)
        self._query_slots = torch.zeros(shape, dtype=torch.int32, device=device)
        self._slots = torch.zeros(
            (num_layers, max_num_reqs, num_kv_heads, width), dtype=torch.int32, device=device
        )
        self._written: _SelectionKey | None = None  # key of the selected slots in `_slots`
        for plan in plans:
            plan.reserve(width)

    @property
    @override
    def memory_bytes(self) -> Mapping[str, int]:
        return {
            "lists of slots": self._slots.nbytes + self._selections.positions.nbytes,
            "planned attention": sum(plan.num_bytes for plan in self._plans),
            **self._selector.memory_bytes,
        }

    @property
    @override
    def common_lens(self) -> Sequence[int | None]:
        has_common = self._plans and not self._budget.context_fraction
        return (None, self._budget.min_entries) if has_common else (None,)

    @override
    def prepare(self, batch: Batch, num_steps: int) -> TokenRound:
        self._selections.begin_round(batch.req_ids)
        self._selector.update(batch, num_steps)
        num_reqs = batch.context_lens.shape[0]
        rows = self._selections.rows(batch.req_ids)
        if has_kernels(rows.device):
            from vllm_magicdec.views.kernels import write_token_round

            write_token_round(
                batch,
                self._draft_slots,
                self._budget,
                self._selections,
                rows,
                lens=self._lens,
                query_columns=self._query_columns,
                query_slots=self._query_slots,
                view_slots=self._slots,
                num_steps=num_steps,
            )
        else:
            self._write(batch, rows, num_steps)
        return TokenRound(
            self._draft_slots,
            lens=self._lens[:num_steps, :num_reqs],
            slots=self._slots[:, :num_reqs],
            query_columns=self._query_columns[:num_steps, :num_reqs],
            query_slots=self._query_slots[:num_steps, :num_reqs],
            common_len=self._common_len(batch),
        )

    def _write(self, batch: Batch, rows: torch.Tensor, num_steps: int) -> None:
        """Write the first step's views and the columns of all steps' queries."""
        budget, num_reqs = self._budget, batch.context_lens.shape[0]
        positions = self._draft_slots.prepare(batch, num_steps)
        first = positions[0]
        # A resumed request may be shorter than at its selection.
        ends = torch.minimum(self._selections.ends[rows], batch.context_lens)

        # Columns: [selection | sinks | recent], the latter with `room` tokens from `start` on.
        sinks = (first + 1).clamp(max=budget.num_sinks)
        start = torch.maximum(ends, sinks)
        tokens = budget.entries(batch.context_lens)
        max_selected = (tokens - sinks - budget.num_recent).clamp(min=0)
        counts = torch.minimum(self._selections.counts[rows], max_selected)
        room = tokens - sinks - counts
        start = torch.maximum(start, first + 1 - room)
        slots = self._slots[:, :num_reqs]
        self._fill(slots, batch.block_table, rows, counts, sinks, start, first)

        num_recent = positions - start + 1  # [num_steps, num_reqs], as if there were room
        lens = counts + sinks + torch.minimum(num_recent, room)
        self._lens[:num_steps, :num_reqs] = lens
        query_columns = counts + sinks + (num_recent - 1).remainder(room)
        self._query_columns[:num_steps, :num_reqs] = query_columns
        query_slots = self._slots_of(batch.block_table, positions.T).T
        self._query_slots[:num_steps, :num_reqs] = query_slots

    @override
    def capture_view(self, num_reqs: int, lens: torch.Tensor, common_len: int | None) -> TokenView:
        if common_len is not None:
            for plan in self._plans:
                plan.prepare_capture(num_reqs, common_len)
        return TokenView(lens, self._slots[:, :num_reqs, :, :common_len], common_len)

    def _fill(
        self,
        slots: torch.Tensor,  # [num_layers, num_reqs, num_kv_heads, width] int32, written
        block_table: torch.Tensor,
        rows: torch.Tensor,  # this and the rest: [num_reqs] int64
        counts: torch.Tensor,
        sinks: torch.Tensor,
        start: torch.Tensor,
        last: torch.Tensor,
    ) -> None:
        """Write the views that end at the positions `last`."""
        column = self._columns - counts.unsqueeze(1)  # [num_reqs, width], negative: selected
        position = torch.where(column < sinks.unsqueeze(1), column, column + (start - sinks).unsqueeze(1))
        # Columns past the end are never read; the last position keeps them valid.
        position = torch.minimum(position.clamp(min=0), last.unsqueeze(1))
        common = self._slots_of(block_table, position)

        is_selected = (column < 0)[:, None, None, : self._selections.positions.shape[-1]]
        num_selected = is_selected.shape[-1]
        key = self._selection_key(block_table, rows, counts, last)
        if self._written is not None and key is not None and key.equals(self._written):
            selected = slots[..., :num_selected].transpose(0, 1)
        else:
            selected = self._selected_slots(block_table, rows, last, is_selected)
        self._written = None  # until all is written
        slots[..., :num_selected] = torch.where(
            is_selected, selected, common[:, None, None, :num_selected]
        ).transpose(0, 1)
        slots[..., num_selected:] = common[:, None, num_selected:]
        self._written = key

    def _selection_key(
        self,
        block_table: torch.Tensor,
        rows: torch.Tensor,  # this and the rest: [num_reqs] int64
        counts: torch.Tensor,
        last: torch.Tensor,
    ) -> "_SelectionKey | None":
        """The key of the selected slots, on a CPU; None if a context is shorter than at its selection."""
        ends = _copied(self._selections.ends[rows], np.int64)
        if (_copied(last, np.int64) + 1 < ends).any():
            return None
        num_pages = ceil_div(ends.max(), self._page_size)
        return _SelectionKey(
            self._selections.version,
            rows=_copied(rows, np.int64),
            counts=_copied(counts, np.int64),
            pages=_copied(block_table[:, :num_pages], np.int32),
        )

    def _selected_slots(
        self,
        block_table: torch.Tensor,
        rows: torch.Tensor,  # [num_reqs] int64
        last: torch.Tensor,  # [num_reqs] int64
        is_selected: torch.Tensor,  # [num_reqs, 1, 1, num_selected] bool
    ) -> torch.Tensor:
        """[num_reqs, num_layers, num_kv_heads, num_selected] int32."""
        chosen = self._selections.positions[rows]
        positions = torch.minimum(chosen.flatten(1).long(), last.unsqueeze(1))
        selected = self._slots_of(block_table, positions).view_as(chosen)
        # Sorted slots of one block are neighbours, so a CPU reads its keys once (`native/vector_cache.h`).
        return _sorted(selected.masked_fill(~is_selected, _NO_SLOT))

    def _common_len(self, batch: Batch) -> int | None:
        """The length of every view of the round, if the host knows that all are full."""
        # With asynchronous scheduling the host does not know the last two rounds' rejected drafts yet.
        budget, min_context = self._budget, min(batch.known_lens) - 2 * self._max_num_steps
        is_full = not budget.context_fraction and min_context >= budget.min_entries
        return budget.min_entries if is_full else None

    def _slots_of(self, block_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots of [num_reqs, n] positions, int32."""
        pages = block_table.gather(1, positions // self._page_size)
        return (pages * self._page_size + positions % self._page_size).to(torch.int32)


@dataclass(frozen=True, eq=False)
class _SelectionKey:
    """Determines the selected slots of a batch's lists; rarely changes from round to round."""

    version: int  # `Selections.version`
    rows: np.ndarray  # [num_reqs] int64, rows of the selections
    counts: np.ndarray  # [num_reqs] int64, selected tokens in view
    pages: np.ndarray  # [num_reqs, n] int32, of the block tables, up to where all regions end

    def equals(self, other: "_SelectionKey") -> bool:
        return (
            self.version == other.version
            and np.array_equal(self.rows, other.rows)
            and np.array_equal(self.counts, other.counts)
            and np.array_equal(self.pages, other.pages)
        )


def _sorted(slots: torch.Tensor) -> torch.Tensor:
    """Sort along the last dimension, int32, on a CPU; numpy takes a tenth of torch's time."""
    numbers = _copied(slots, np.int32)
    numbers.sort(axis=-1)
    return torch.from_numpy(numbers)


def _copied(numbers: torch.Tensor, dtype: type[np.integer]) -> np.ndarray:
    copy = np.empty(numbers.shape, dtype=dtype)
    torch.from_numpy(copy).copy_(numbers)
    return copy
