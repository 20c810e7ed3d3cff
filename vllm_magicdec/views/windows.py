# SPDX-License-Identifier: Apache-2.0
"""Views of layers with a sliding window or local chunks: the pages that they reach, for every policy.

vLLM's block tables still name the pages that it freed because no query will reach them again. So a view
begins with the page of the first token that the round's first query sees, and no earlier.
"""

from dataclasses import dataclass

import torch
from typing_extensions import override

from vllm_magicdec.views.pages import ChoosesPages, PageBudget, sinks_and_latest
from vllm_magicdec.views.slots import DraftSlots
from vllm_magicdec.views.tensors import ceil_div


@dataclass(frozen=True)
class SlidingWindow:
    """A query sees the latest tokens. vLLM's attention masks the tokens before each query's window."""

    tokens: int  # including the query's own

    def first_seen(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the first position that queries at `positions` (any shape, int64) see."""
        return (positions + 1 - self.tokens).clamp(min=0)

    def __str__(self) -> str:
        return f"a window of {self.tokens} tokens"


@dataclass(frozen=True)
class LocalChunk:
    """A query sees its own chunk of the context, up to itself (Llama 4's local layers).

    Drafts of a round that crosses into the next chunk still see the previous one, unlike the target, so
    one round in `tokens` has worse drafts.
    """

    tokens: int

    def first_seen(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the first position that queries at `positions` (any shape, int64) see."""
        return positions // self.tokens * self.tokens

    def __str__(self) -> str:
        return f"chunks of {self.tokens} tokens"


Reach = SlidingWindow | LocalChunk


class ReachedPages(ChoosesPages):
    """Chooses the latest pages within a layer's reach and a budget.

    Args:
        max_tokens: K/V entries that a draft step may read of a request; a longer reach is cut at its
            beginning, but never the pages of drafted tokens.
        draft_slots: those of the view.
    """

    is_sinks_and_latest = True

    def __init__(self, reach: Reach, max_tokens: int, draft_slots: DraftSlots) -> None:
        self._reach = reach
        self._max_model_len = draft_slots.max_model_len
        page_size, max_num_steps = draft_slots.page_size, draft_slots.positions.shape[0]
        drafted = ceil_div(max_num_steps - 1, page_size) + 1
        # The first draft's reach may start anywhere in a page, and the other drafts follow it.
        reached = ceil_div(reach.tokens - 1 + max_num_steps, page_size) + 1
        num_pages = min(reached, max(ceil_div(max_tokens, page_size), drafted))
        num_pages = min(num_pages, ceil_div(self._max_model_len, page_size))
        self.budget = PageBudget(page_size, num_sinks=0, min_entries=num_pages, max_entries=num_pages)

    @override
    def most_pages(self, context_lens: torch.Tensor, num_steps: int) -> torch.Tensor:
        last = (context_lens + num_steps - 1).clamp(max=self._max_model_len - 1)
        return self._num_pages(context_lens, last // self.budget.unit)

    @override
    def choose_pages(
        self, context_lens: torch.Tensor, last_pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_pages = self._num_pages(context_lens, last_pages)
        return sinks_and_latest(self.budget.max_entries, 0, last_pages + 1 - num_pages), num_pages

    def _num_pages(self, context_lens: torch.Tensor, last_pages: torch.Tensor) -> torch.Tensor:
        # The first draft is at position `context_lens`.
        first_pages = self._reach.first_seen(context_lens) // self.budget.unit
        return (last_pages + 1 - first_pages).clamp(max=self.budget.max_entries)
