# SPDX-License-Identifier: Apache-2.0
"""Page views: shorter block tables, the same for all layers and heads, for any attention backend."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from typing_extensions import override

from vllm_magicdec.views.round import Batch, LayerPageView, PageView, Part, Queries, Views
from vllm_magicdec.views.selections import Budget, fixed_tokens
from vllm_magicdec.views.slots import DraftSlots
from vllm_magicdec.views.tensors import ceil_div, has_kernels, on_device

_TABLE_TOKENS = 128  # block tables are as wide as a multiple of these


def table_width(num_pages: int, page_size: int) -> int:
    """Return the columns of a block table of at least `num_pages` pages.

    As wide as vLLM's own: some kernels (FlashInfer's for MLA) want whole multiples of 128 tokens.
    """
    unit = _TABLE_TOKENS // math.gcd(_TABLE_TOKENS, page_size)
    return ceil_div(num_pages, unit) * unit


def sinks_and_latest(num_columns: int, num_sinks: int, skipped: torch.Tensor) -> torch.Tensor:
    """Return page numbers, [num_reqs, num_columns] int64: the sinks, then those after `skipped` others.

    `skipped` is [num_reqs] int.
    """
    columns = torch.arange(num_columns, device=skipped.device)
    return torch.where(columns < num_sinks, columns, columns + skipped.unsqueeze(1))


@dataclass(frozen=True)
class PageBudget(Budget):
    """Pages of one request that a draft step may read. Without recent pages none is selected."""

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

        The result always holds the sinks and the pages that one round's drafted tokens touch.

        Raises:
            ValueError: the budget is below one page.
        """
        context_pages = ceil_div(max_model_len, page_size)
        name, min_tokens = fixed_tokens(budget, min_budget)
        if min_tokens < min(page_size, max_model_len):
            raise ValueError(
                f"{name}={min_tokens} is below one KV page of {page_size} tokens; "
                f"use at least {page_size}, or a smaller --block-size"
            )
        sink_pages = min(ceil_div(sink, page_size), context_pages)
        # The drafted tokens may start anywhere in a page, so they may touch one page more.
        drafted_pages = ceil_div(num_speculative_tokens - 1, page_size) + 1
        min_pages = min(max(ceil_div(min_tokens, page_size), sink_pages + drafted_pages), context_pages)
        fraction = budget if budget < 1 else 0.0
        max_pages = min(max(min_pages, math.ceil(fraction * context_pages)), context_pages)
        return cls(page_size, sink_pages, min_pages, max_pages, fraction, recent_pages)

    def __str__(self) -> str:
        def describe(pages: int) -> str:
            others = pages - self.num_sinks
            parts = f"{others} window"
            if self.num_recent:
                selected = max(0, others - self.num_recent)
                parts = f"{others - selected} recent + {selected} selected"
            return f"{pages * self.unit} tokens ({self.num_sinks} sink + {parts} pages of {self.unit})"

        if self.min_entries == self.max_entries:
            return describe(self.min_entries)
        return (
            f"{self.context_fraction:g} of the context, between {describe(self.min_entries)} and "
            f"{describe(self.max_entries)}"
        )


class ChoosesPages(ABC):
    """Chooses the same pages for all layers and heads."""

    budget: PageBudget

    @property
    def is_sinks_and_latest(self) -> bool:
        """Whether `choose_pages` takes the sinks and the latest pages; on a GPU a kernel then does it."""
        return False

    def most_pages(self, context_lens: torch.Tensor, num_steps: int) -> torch.Tensor:
        """Return the maximum pages of views of sinks and latest pages, [num_reqs] int64.

        Args:
            context_lens: [num_reqs] int64, verified tokens.
        """
        return self.budget.entries(context_lens)

    @abstractmethod
    def choose_pages(
        self, context_lens: torch.Tensor, last_pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the pages of one round.

        Args:
            context_lens: [num_reqs] int64, verified tokens.
            last_pages: [num_reqs] int64, page of the round's last drafted token.

        Returns:
            pages: [num_reqs, budget.max_entries] int64, page numbers within the request, ascending. The
                chosen ones come first and end with a contiguous run up to `last_pages`.
            num_pages: [num_reqs] int64.
        """


@dataclass(frozen=True, eq=False, repr=False)
class PageRound:
    """A round in the layers of a page view (`views.round.RoundView`).

    A page view ends with the round's drafted tokens in order, and each step sees one entry more than the
    step before, so causal attention among a pass's queries is exact.
    """

    draft_slots: DraftSlots  # prepared for the round
    lens: torch.Tensor  # [num_steps, num_reqs] int32, entries in view
    view_of: Callable[[torch.Tensor], PageView | LayerPageView]  # the view of all requests for given `lens`

    def step(self, index: int) -> Part:
        """Return the input of a step."""
        return self.draft_slots.step(index, self.lens.shape[1], self.view_of(self.lens[index]))

    def take(self, queries: Queries) -> Part:
        """Return the input of a pass."""
        device = self.lens.device
        requests, lasts = on_device(queries.requests, device), on_device(queries.lasts, device)
        view = self.view_of(self.lens[0]).of_requests(requests, self.lens[lasts, requests])
        return self.draft_slots.take(queries, on_device(queries.request_indices, device), view)


class PageViews(Views):
    """The same pages for all layers, chosen by position.

    All steps of a round share a block table that ends with the page of the last drafted token. Each step
    sees one token more of it than the step before.
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
        max_pages = policy.budget.max_entries
        self._max_len = policy.budget.max_tokens
        shape = (max_num_reqs, table_width(max_pages, self._page_size))
        self._block_table = torch.zeros(shape, dtype=torch.int32, device=device)

    @override
    def prepare(self, batch: Batch, num_steps: int) -> PageRound:
        num_reqs = batch.context_lens.shape[0]
        if self._policy.is_sinks_and_latest and has_kernels(self._block_table.device):
            from vllm_magicdec.views.kernels import write_page_round

            write_page_round(
                batch,
                self._draft_slots,
                self._policy.budget,
                self._policy.most_pages(batch.context_lens, num_steps),
                selections=None,
                lens=self._lens,
                view_tables=self._block_table.unsqueeze(0),
                num_steps=num_steps,
            )
        else:
            self._write(batch, num_steps)
        lens = self._lens[:num_steps, :num_reqs]
        return PageRound(self._draft_slots, lens, partial(self.capture_view, num_reqs))

    def num_latest(self, num_steps: int) -> int:
        """Minimum number of consecutive tokens in view right before the first of `num_steps` drafts."""
        if not self._policy.is_sinks_and_latest:
            return 0
        window = self._policy.budget.min_entries - self._policy.budget.num_sinks
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
        max_pages = self._policy.budget.max_entries
        self._block_table[:num_reqs, :max_pages] = batch.block_table.gather(1, chosen)
        self._lens[:num_steps, :num_reqs] = positions + 1 - skipped_tokens

    @override
    def capture_view(self, num_reqs: int, lens: torch.Tensor, common_len: int | None = None) -> PageView:
        return PageView(lens, self._block_table[:num_reqs], self._max_len)
