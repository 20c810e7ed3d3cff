# SPDX-License-Identifier: Apache-2.0
"""Page views: for every request, the pages that the draft reads, the same for all layers and heads.

A page view is a shorter block table, which any attention backend can run.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from vllm_magicdec.views.base import Batch, DraftSlots, PageView, ceil_div, has_kernels
from vllm_magicdec.views.passes import PageSteps

_TABLE_TOKENS = 128  # a block table is a multiple of these wide


@dataclass(frozen=True)
class PageBudget:
    """How many pages of one request a draft step may read, sinks included.

    The budget is `min_pages` for every request, or, when `context_fraction` is above 0, that fraction of
    the request's context within `min_pages` and `max_pages`.
    """

    page_size: int  # tokens
    sink_pages: int
    min_pages: int
    max_pages: int
    context_fraction: float = 0.0
    recent_pages: int = 0  # least number of latest pages, where others are selected; 0: none is selected

    @classmethod
    def from_tokens(
        cls,
        *,
        budget: float,
        min_budget: int,
        sink: int,
        page_size: int,
        num_speculative_tokens: int,
        max_model_len: int,
        recent_pages: int = 0,
    ) -> "PageBudget":
        """Round a budget in tokens (or a fraction of the context when below 1) up to whole pages.

        The result is never less than the sinks and the pages that one round's drafted tokens touch.
        `recent_pages`: see the field.

        Raises:
            ValueError: the budget is below one page.
        """
        context_pages = ceil_div(max_model_len, page_size)
        is_fraction = budget < 1
        name, min_tokens = (
            ("draft_kv_min_budget", min_budget) if is_fraction else ("draft_kv_budget", int(budget))
        )
        if min_tokens < min(page_size, max_model_len):
            raise ValueError(
                f"{name}={min_tokens} is below one KV page of {page_size} tokens; "
                f"use at least {page_size}, or a smaller --block-size"
            )
        sink_pages = min(ceil_div(sink, page_size), context_pages)
        # The drafted tokens may start anywhere in a page, so they may touch one page more.
        drafted_pages = ceil_div(num_speculative_tokens - 1, page_size) + 1
        min_pages = min(max(ceil_div(min_tokens, page_size), sink_pages + drafted_pages), context_pages)
        max_pages = min_pages
        if is_fraction:
            largest = int(-(-budget * context_pages // 1))
            max_pages = min(max(min_pages, largest), context_pages)
        fraction = budget if is_fraction else 0.0
        return cls(page_size, sink_pages, min_pages, max_pages, fraction, recent_pages)

    @property
    def unit(self) -> int:
        """Tokens of one entry of a selection."""
        return self.page_size

    @property
    def num_sinks(self) -> int:
        """Entries at the start of the context that stay in view."""
        return self.sink_pages

    @property
    def num_recent(self) -> int:
        """Least number of latest entries in view."""
        return self.recent_pages

    @property
    def max_tokens(self) -> int:
        """K/V entries that a draft step reads of a request, at most."""
        return self.max_pages * self.page_size

    @property
    def min_entries(self) -> int:
        """Pages in budget, whatever the context."""
        return self.min_pages

    @property
    def max_selected(self) -> int:
        """Most pages that can be selected between the sinks and the recent ones."""
        return max(0, self.max_pages - self.sink_pages - self.recent_pages)

    def entries(self, context_lens: torch.Tensor) -> torch.Tensor:
        """`pages`, by the name that budgets of all units have."""
        return self.pages(context_lens)

    def pages(self, context_lens: torch.Tensor) -> torch.Tensor:
        """Pages in budget. `context_lens` [num_reqs] int64, in tokens; returns [num_reqs] int64."""
        if not self.context_fraction:
            return torch.full_like(context_lens, self.min_pages)
        wanted = torch.ceil(context_lens.double() * self.context_fraction / self.page_size)
        return wanted.long().clamp_(self.min_pages, self.max_pages)

    def __str__(self) -> str:
        def describe(pages: int) -> str:
            others = pages - self.sink_pages
            parts = f"{others} window"
            if self.recent_pages:
                selected = max(0, others - self.recent_pages)
                parts = f"{others - selected} recent + {selected} selected"
            pages_of = f"{self.sink_pages} sink + {parts} pages of {self.page_size}"
            return f"{pages * self.page_size} tokens ({pages_of})"

        if self.min_pages == self.max_pages:
            return describe(self.min_pages)
        return (
            f"{self.context_fraction:g} of the context, between {describe(self.min_pages)} and "
            f"{describe(self.max_pages)}"
        )


class ChoosesPages(Protocol):
    """The part of `policies.PagePolicy` that `PageViews` needs."""

    budget: PageBudget

    @property
    def is_sinks_and_latest(self) -> bool:
        """See `policies.base.PagePolicy`."""

    @property
    def max_pages(self) -> int:
        """See `policies.base.PagePolicy`."""

    def most_pages(self, context_lens: torch.Tensor, num_steps: int) -> torch.Tensor:
        """See `policies.base.PagePolicy`."""

    def choose_pages(
        self, context_lens: torch.Tensor, last_pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `policies.base.PagePolicy`."""


class PageViews:
    """The same pages for all layers, chosen by position.

    The block table is the same for all steps of a round: it ends at the page of the last drafted token,
    and each step sees one token more of it.

    Args:
        policy: chooses the pages.
        draft_slots: where the drafted tokens go.
    """

    memory_bytes: Mapping[str, int] = {}
    common_lens = (None,)

    def __init__(self, policy: ChoosesPages, draft_slots: DraftSlots) -> None:
        self._policy = policy
        self._draft_slots = draft_slots
        self._page_size = draft_slots.page_size
        max_num_steps, max_num_reqs = draft_slots.positions.shape
        device = draft_slots.positions.device
        self._lens = torch.zeros((max_num_steps, max_num_reqs), dtype=torch.int32, device=device)
        self._max_len = policy.max_pages * self._page_size
        # As wide as vLLM's own: some kernels (FlashInfer's for MLA) want whole multiples of 128 tokens.
        unit = _TABLE_TOKENS // math.gcd(_TABLE_TOKENS, self._page_size)
        shape = (max_num_reqs, ceil_div(policy.max_pages, unit) * unit)
        self._block_table = torch.zeros(shape, dtype=torch.int32, device=device)

    def prepare(self, batch: Batch, num_steps: int) -> PageSteps:
        """See `Views`."""
        num_reqs = batch.context_lens.shape[0]
        if self._policy.is_sinks_and_latest and has_kernels(self._block_table.device):
            self._write_with_kernel(batch, num_steps)
        else:
            self._write(batch, num_steps)
        lens = self._lens[:num_steps, :num_reqs]
        return PageSteps(self._draft_slots, lens, partial(self.capture_view, num_reqs))

    def num_latest(self, num_steps: int) -> int:
        """Tokens right before a round's first draft that are in its view, one after the other, at least.

        Args:
            num_steps: drafts of the round.
        """
        if not self._policy.is_sinks_and_latest:
            return 0
        window = self._policy.budget.min_pages - self._policy.budget.sink_pages
        # The last draft may be the first token of the last page.
        return max(0, (window - 1) * self._page_size + 1 - num_steps)

    def _write(self, batch: Batch, num_steps: int) -> None:
        num_reqs = batch.context_lens.shape[0]
        positions = self._draft_slots.prepare(batch, num_steps)
        last_pages = positions[-1] // self._page_size
        chosen, num_pages = self._policy.choose_pages(batch.context_lens, last_pages)
        skipped_tokens = (last_pages + 1 - num_pages) * self._page_size
        # Columns past the view are never read; any page of the request keeps them valid.
        chosen = torch.minimum(chosen, last_pages.unsqueeze(1))
        self._block_table[:num_reqs, : self._policy.max_pages] = batch.block_table.gather(1, chosen)
        self._lens[:num_steps, :num_reqs] = positions + 1 - skipped_tokens

    def _write_with_kernel(self, batch: Batch, num_steps: int) -> None:
        from vllm_magicdec.views.kernels import write_page_round

        write_page_round(
            batch.context_lens,
            batch.block_table,
            self._policy.most_pages(batch.context_lens, num_steps),
            positions=self._draft_slots.positions,
            slots=self._draft_slots.slots,
            lens=self._lens,
            view_table=self._block_table,
            num_steps=num_steps,
            page_size=self._page_size,
            sink_pages=self._policy.budget.sink_pages,
            max_pages=self._policy.max_pages,
            max_model_len=self._draft_slots.max_model_len,
        )

    def capture_view(self, num_reqs: int, lens: torch.Tensor, common_len: int | None = None) -> PageView:
        """See `Views`."""
        return PageView(lens, self._block_table[:num_reqs], self._max_len)
