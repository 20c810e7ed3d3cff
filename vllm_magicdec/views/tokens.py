# SPDX-License-Identifier: Apache-2.0
"""Token views: for every request, layer and KV head, the slots that the draft reads.

A view has three parts, all of them positions of the request's own context:

    selection   chosen by the policy, per layer and KV head, when the prompt ends (or again later)
    sinks       the first tokens
    recent      from the end of the region that was chosen from up to the query; a ring: when the budget
                is full, the query's own slot takes the place of the oldest one

Selections are kept by position, not by slot, so that a request that was preempted and comes back on other
pages keeps its own. They become slots for all layers at once, on a CPU once for as long as nothing changes
that they follow from. They are kept best first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vllm_magicdec.views.base import Batch, DraftSlots, Selector, TokenView, ceil_div, has_kernels
from vllm_magicdec.views.selections import Selections
from vllm_magicdec.views.token_steps import TokenSteps

# A draft cannot do without what was just written: this share of a small budget's tokens are the latest
# ones, whatever the share for large budgets. Chosen with benchmarks/acceptance.py at a budget of 64.
SMALL_BUDGET = 64
SMALL_RECENT = 0.75
_NO_SLOT = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class TokenBudget:
    """How many tokens of one request a draft step may read.

    The budget is `min_tokens` for every request, or, when `context_fraction` is above 0, that fraction of
    its context within `min_tokens` and `max_tokens`.
    """

    sink: int
    window: int  # least number of recent tokens, the drafted ones included
    min_tokens: int
    max_tokens: int
    context_fraction: float = 0.0

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
        """A budget in tokens, or a fraction of the context when below 1.

        `window` and `recent`: see `recent_tokens`.

        Raises:
            ValueError: it cannot hold the sinks, the latest tokens and one token more.
        """
        is_fraction = budget < 1
        name, min_tokens = (
            ("draft_kv_min_budget", min_budget) if is_fraction else ("draft_kv_budget", int(budget))
        )
        window = recent_tokens(
            min_tokens - sink, max(window, num_speculative_tokens), recent, budget=min_tokens
        )
        least = min(sink + window + 1, max_model_len)
        if min_tokens < least:
            raise ValueError(
                f"{name}={min_tokens} cannot hold {sink} sinks and a window of {window} tokens; "
                f"use at least {least}"
            )
        min_tokens = min(min_tokens, max_model_len)
        max_tokens = min_tokens
        if is_fraction:
            max_tokens = min(max(min_tokens, int(budget * max_model_len)), max_model_len)
        return cls(sink, window, min_tokens, max_tokens, budget if is_fraction else 0.0)

    @property
    def unit(self) -> int:
        """Tokens of one entry of a selection."""
        return 1

    @property
    def num_sinks(self) -> int:
        """Entries at the start of the context that stay in view."""
        return self.sink

    @property
    def num_recent(self) -> int:
        """Least number of latest entries in view."""
        return self.window

    @property
    def min_entries(self) -> int:
        """Tokens in budget, whatever the context."""
        return self.min_tokens

    @property
    def max_selected(self) -> int:
        """Most tokens that can be selected between the sinks and the window."""
        return max(0, self.max_tokens - self.sink - self.window)

    def entries(self, context_lens: torch.Tensor) -> torch.Tensor:
        """`tokens`, by the name that budgets of all units have."""
        return self.tokens(context_lens)

    def tokens(self, context_lens: torch.Tensor) -> torch.Tensor:
        """Tokens in budget. `context_lens` [num_reqs] int64; returns [num_reqs] int64."""
        if not self.context_fraction:
            return torch.full_like(context_lens, self.min_tokens)
        wanted = torch.ceil(context_lens.double() * self.context_fraction).long()
        return wanted.clamp_(self.min_tokens, self.max_tokens)

    def __str__(self) -> str:
        parts = f"{self.sink} sinks, at least {self.window} recent, the rest selected"
        if self.context_fraction:
            return (
                f"{self.context_fraction:g} of the context, between {self.min_tokens} and "
                f"{self.max_tokens} tokens ({parts})"
            )
        return f"{self.min_tokens} tokens ({parts})"


def recent_tokens(room: int, window: int, recent: float, *, budget: int) -> int:
    """How many of the latest tokens stay in view at least.

    Args:
        room: tokens in budget beside the sinks.
        window: they are no fewer than these.
        recent: tokens, or a fraction of the budget when below 1. Above 0, that is then no less than
            `SMALL_RECENT` of the budget's first `SMALL_BUDGET` tokens.
        budget: tokens.
    """
    if not 0 < recent < 1:
        return max(window, int(recent))
    wanted = max(recent * budget, SMALL_RECENT * min(budget, SMALL_BUDGET))
    return max(window, min(int(wanted), room - 1))


class PlannedAttention(Protocol):
    """Attention that is planned before a CUDA graph over it is captured."""

    @property
    def num_bytes(self) -> int:
        """Device memory."""
        ...

    def reserve(self, width: int) -> None:
        """Make room for views of up to `width` columns; called once, before anything is planned."""
        ...

    def prepare_capture(self, num_reqs: int, length: int) -> None:
        """Make a plan that the graph may keep, for views of `length` columns."""
        ...


class TokenViews:
    """Chosen tokens for every layer and KV head.

    A view holds every token up to its query or as many as the budget allows, in every step: a step writes
    its query's slot into the recent part, so the lists of one step are gone when the next is made.

    Args:
        selections: of tokens, best first, with room for what the budget selects.
        selector: keeps them up to date.
        budget: of a request.
        draft_slots: where the drafted tokens go.
        plans: attention that is planned for full views.
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
        # Where each step's query goes in its view, and its slot.
        self._query_columns = torch.zeros(shape, dtype=torch.int64, device=device)
        self._query_slots = torch.zeros(shape, dtype=torch.int32, device=device)
        self._slots = torch.zeros(
            (num_layers, max_num_reqs, num_kv_heads, width), dtype=torch.int32, device=device
        )
        self._latest: _SelectedPart | None = None  # of the lists that are there
        for plan in plans:
            plan.reserve(width)

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """See `Views`."""
        slots = self._slots.numel() * self._slots.element_size()
        return {
            "lists of slots": slots + self._selections.num_bytes,
            "planned attention": sum(plan.num_bytes for plan in self._plans),
            **self._selector.memory_bytes,
        }

    @property
    def common_lens(self) -> Sequence[int | None]:
        """See `Views`: the length of full views, if it is the same for all requests."""
        has_common = self._plans and not self._budget.context_fraction
        return (None, self._budget.min_tokens) if has_common else (None,)

    def prepare(self, batch: Batch, num_steps: int) -> TokenSteps:
        """See `Views`."""
        self._selector.update(batch, num_steps)
        num_reqs = batch.context_lens.shape[0]
        rows = self._selections.rows(batch.req_ids)
        if has_kernels(rows.device):
            self._write_with_kernel(batch, rows, num_steps)
        else:
            self._write(batch, rows, num_steps)
        return TokenSteps(
            self._draft_slots,
            lens=self._lens[:num_steps, :num_reqs],
            slots=self._slots[:, :num_reqs],
            query_columns=self._query_columns[:num_steps, :num_reqs],
            query_slots=self._query_slots[:num_steps, :num_reqs],
            common_len=self._common_len(batch),
        )

    def _write(self, batch: Batch, rows: torch.Tensor, num_steps: int) -> None:
        """The first step's views, and where the queries of all steps go in them."""
        budget, num_reqs = self._budget, batch.context_lens.shape[0]
        positions = self._draft_slots.prepare(batch, num_steps)
        first = positions[0]
        # Never beyond the verified tokens, should a request have come back shorter.
        ends = torch.minimum(self._selections.ends[rows], batch.context_lens)

        # Columns: [selection | sinks | recent], the last with room for so many tokens from `start` on.
        sinks = (first + 1).clamp(max=budget.sink)
        start = torch.maximum(ends, sinks)
        tokens = budget.tokens(batch.context_lens)
        counts = torch.minimum(self._selections.counts[rows], (tokens - sinks - budget.window).clamp(min=0))
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

    def _write_with_kernel(self, batch: Batch, rows: torch.Tensor, num_steps: int) -> None:
        from vllm_magicdec.views.kernels import write_token_round

        budget = self._budget
        write_token_round(
            batch.context_lens,
            batch.block_table,
            rows,
            self._selections.positions,
            self._selections.counts,
            self._selections.ends,
            budget.tokens(batch.context_lens),
            positions=self._draft_slots.positions,
            slots=self._draft_slots.slots,
            lens=self._lens,
            query_columns=self._query_columns,
            query_slots=self._query_slots,
            view_slots=self._slots,
            num_steps=num_steps,
            page_size=self._page_size,
            sink=budget.sink,
            window=budget.window,
            max_tokens=budget.max_tokens,
            max_model_len=self._draft_slots.max_model_len,
        )

    def capture_view(self, num_reqs: int, lens: torch.Tensor, common_len: int | None) -> TokenView:
        """See `Views`."""
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
        place = torch.where(column < sinks.unsqueeze(1), column, column + (start - sinks).unsqueeze(1))
        # Columns past the end are never read; the last position keeps them valid.
        place = torch.minimum(place.clamp(min=0), last.unsqueeze(1))
        common = self._slots_of(block_table, place)

        is_selected = (column < 0)[:, None, None, : self._selections.positions.shape[-1]]
        num_selected = is_selected.shape[-1]
        part = self._selected_part(block_table, rows, counts, last)
        if self._latest is not None and part is not None and part.is_as(self._latest):
            selected = slots[..., :num_selected].transpose(0, 1)
        else:
            selected = self._selected_slots(block_table, rows, last, is_selected)
        self._latest = None  # until all is written
        slots[..., :num_selected] = torch.where(
            is_selected, selected, common[:, None, None, :num_selected]
        ).transpose(0, 1)
        slots[..., num_selected:] = common[:, None, num_selected:]
        self._latest = part

    def _selected_part(
        self,
        block_table: torch.Tensor,
        rows: torch.Tensor,  # this and the rest: [num_reqs] int64
        counts: torch.Tensor,
        last: torch.Tensor,
    ) -> "_SelectedPart | None":
        """What it follows from, on a CPU; None: also from where a context, which has got shorter, ends."""
        ends = _copied(self._selections.ends[rows], np.int64)
        if (_copied(last, np.int64) + 1 < ends).any():
            return None
        num_pages = ceil_div(ends.max(), self._page_size)
        return _SelectedPart(
            self._selections.num_made,
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
        places = torch.minimum(chosen.flatten(1).long(), last.unsqueeze(1))
        selected = self._slots_of(block_table, places).view_as(chosen)
        # Chosen best first, they were cut to what the budget has room for. In the order of slots those of
        # one block are neighbours, and a CPU reads its keys once for all of them (`native/vector_cache.h`).
        return _in_order(selected.masked_fill(~is_selected, _NO_SLOT))

    def _common_len(self, batch: Batch) -> int | None:
        """The length of every view of the round, if the host knows that all are full."""
        # With asynchronous scheduling the host has not heard of the last two rounds' rejected drafts.
        budget, least_context = self._budget, min(batch.known_lens) - 2 * self._max_num_steps
        is_full = not budget.context_fraction and least_context >= budget.min_tokens
        return budget.min_tokens if is_full else None

    def _slots_of(self, block_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots of [num_reqs, n] positions, int32."""
        pages = block_table.gather(1, positions // self._page_size)
        return (pages * self._page_size + positions % self._page_size).to(torch.int32)


@dataclass(frozen=True, eq=False)
class _SelectedPart:
    """What the selected slots of a batch's lists follow from: from round to round it is mostly the same."""

    num_made: int  # of the selections, see there
    rows: np.ndarray  # [num_reqs] int64, of the selections
    counts: np.ndarray  # [num_reqs] int64, selected tokens in view
    pages: np.ndarray  # [num_reqs, n] int32, of the block tables, up to where all regions end

    def is_as(self, other: "_SelectedPart") -> bool:
        """Whether the slots are the same."""
        return (
            self.num_made == other.num_made
            and np.array_equal(self.rows, other.rows)
            and np.array_equal(self.counts, other.counts)
            and np.array_equal(self.pages, other.pages)
        )


def _in_order(slots: torch.Tensor) -> torch.Tensor:
    """Sorted along the last dimension, int32, on a CPU: numpy takes a tenth of torch's time."""
    numbers = _copied(slots, np.int32)
    numbers.sort(axis=-1)
    return torch.from_numpy(numbers)


def _copied(numbers: torch.Tensor, dtype: type[np.integer]) -> np.ndarray:
    """A copy for numpy, on a CPU."""
    copy = np.empty(numbers.shape, dtype=dtype)
    torch.from_numpy(copy).copy_(numbers)
    return copy
