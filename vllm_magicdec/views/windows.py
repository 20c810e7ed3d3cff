# SPDX-License-Identifier: Apache-2.0
"""Views of layers that do not see the whole context: the pages that they reach, the same for every policy.

vLLM frees a request's pages that no query will reach again, and its block tables go on naming them. So a
view begins with the page of the first token that the round's first query sees, and no earlier.
"""

from dataclasses import dataclass

import torch

from vllm_magicdec.views.base import DraftSlots, ceil_div
from vllm_magicdec.views.pages import PageBudget, PageViews


@dataclass(frozen=True)
class SlidingWindow:
    """A query sees the latest tokens. vLLM's attention masks what a view has before each query's window."""

    tokens: int  # the query's own included

    def first_seen(self, positions: torch.Tensor) -> torch.Tensor:
        """Of queries at `positions` (any shape, int64), the first position that each sees."""
        return (positions + 1 - self.tokens).clamp(min=0)

    def __str__(self) -> str:
        return f"a window of {self.tokens} tokens"


@dataclass(frozen=True)
class LocalChunk:
    """A query sees its own chunk of the context, up to itself (Llama 4's local layers).

    In a round that goes on into the next chunk, the drafts there still see the one before: the target does
    not, so one round in `tokens` has worse drafts.
    """

    tokens: int

    def first_seen(self, positions: torch.Tensor) -> torch.Tensor:
        """See `SlidingWindow`."""
        return positions // self.tokens * self.tokens

    def __str__(self) -> str:
        return f"chunks of {self.tokens} tokens"


Reach = SlidingWindow | LocalChunk


class ReachedPages:
    """Chooses the latest pages, as far as a layer reaches and a budget allows.

    Args:
        reach: of a query.
        max_tokens: K/V entries that a draft step may read of a request; a longer reach loses its beginning.
        page_size: tokens per page of the block tables.
        num_speculative_tokens: drafts of a round, at most; their pages are always in view.
        max_model_len: tokens.
        device: where `choose_pages` works.
    """

    is_sinks_and_latest = True

    def __init__(
        self,
        reach: Reach,
        *,
        max_tokens: int,
        page_size: int,
        num_speculative_tokens: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._reach = reach
        self._max_model_len = max_model_len
        drafted = ceil_div(num_speculative_tokens - 1, page_size) + 1
        # What the first draft reaches may start anywhere in a page, and the other drafts follow it.
        reached = ceil_div(reach.tokens - 1 + num_speculative_tokens, page_size) + 1
        num_pages = min(reached, max(ceil_div(max_tokens, page_size), drafted))
        num_pages = min(num_pages, ceil_div(max_model_len, page_size))
        self.budget = PageBudget(page_size, sink_pages=0, min_pages=num_pages, max_pages=num_pages)
        self._columns = torch.arange(num_pages, device=device)

    @property
    def max_pages(self) -> int:
        """Columns of the view's block table."""
        return self.budget.max_pages

    def most_pages(self, context_lens: torch.Tensor, num_steps: int) -> torch.Tensor:
        """See `policies.base.PagePolicy`."""
        last = (context_lens + num_steps - 1).clamp(max=self._max_model_len - 1)
        return self._num_pages(context_lens, last // self.budget.page_size)

    def choose_pages(
        self, context_lens: torch.Tensor, last_pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `policies.base.PagePolicy`."""
        num_pages = self._num_pages(context_lens, last_pages)
        skipped = (last_pages + 1 - num_pages).unsqueeze(1)
        return self._columns + skipped, num_pages

    def _num_pages(self, context_lens: torch.Tensor, last_pages: torch.Tensor) -> torch.Tensor:
        # The first draft is at position `context_lens`.
        first_pages = self._reach.first_seen(context_lens) // self.budget.page_size
        return (last_pages + 1 - first_pages).clamp(max=self.max_pages)


def make_reached_views(
    reach: Reach, *, max_tokens: int, draft_slots: DraftSlots, device: torch.device
) -> PageViews:
    """Views of layers that reach equally far.

    Args:
        reach: of a query.
        max_tokens: K/V entries that a draft step may read of a request.
        draft_slots: where the drafted tokens go.
        device: where the views are.
    """
    pages = ReachedPages(
        reach,
        max_tokens=max_tokens,
        page_size=draft_slots.page_size,
        num_speculative_tokens=draft_slots.positions.shape[0],
        max_model_len=draft_slots.max_model_len,
        device=device,
    )
    return PageViews(pages, draft_slots)
