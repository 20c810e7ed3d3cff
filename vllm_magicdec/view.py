# SPDX-License-Identifier: Apache-2.0
"""KV views: where a draft step looks in a request's paged KV cache, and where it writes.

Keys are cached with RoPE applied at their true positions, so leaving some out changes what the draft
attends to and nothing else: positions stay the true ones. A page view is a shorter block table, which any
attention backend can run. A token view (token_view.py) is a list of slots per layer and KV head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

# vLLM's cache-write kernels skip this slot.
PAD_SLOT = -1


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels prepare rounds there, and not many small operations."""
    return device.type == "cuda"


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


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
    ) -> "PageBudget":
        """Round a budget in tokens (or a fraction of the context when below 1) up to whole pages.

        The result is never less than the sinks and the pages that one round's drafted tokens touch.

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
        return cls(page_size, sink_pages, min_pages, max_pages, budget if is_fraction else 0.0)

    def pages(self, context_lens: torch.Tensor) -> torch.Tensor:
        """Pages in budget. `context_lens` [num_reqs] int64, in tokens; returns [num_reqs] int64."""
        if not self.context_fraction:
            return torch.full_like(context_lens, self.min_pages)
        wanted = torch.ceil(context_lens.double() * self.context_fraction / self.page_size)
        return wanted.long().clamp_(self.min_pages, self.max_pages)

    def __str__(self) -> str:
        def describe(pages: int) -> str:
            window = pages - self.sink_pages
            return (
                f"{pages * self.page_size} tokens ({self.sink_pages} sink + {window} window pages "
                f"of {self.page_size})"
            )

        if self.min_pages == self.max_pages:
            return describe(self.min_pages)
        return (
            f"{self.context_fraction:g} of the context, between {describe(self.min_pages)} and "
            f"{describe(self.max_pages)}"
        )


@dataclass(frozen=True)
class Batch:
    """The requests of one round, in the order of the runner's batch."""

    req_ids: Sequence[str]
    tokens: torch.Tensor  # [num_reqs], the last sampled token of each request
    block_table: torch.Tensor  # [num_reqs, max_blocks] int32, the requests' own pages
    context_lens: torch.Tensor  # [num_reqs] int64, verified tokens before `tokens` = first drafted position
    # For token views. K/V and token ids of this many tokens are there, on the device and as the host
    # knows (an upper bound); with asynchronous scheduling they may lag behind `context_lens`.
    observable_lens: torch.Tensor  # [num_reqs] int64
    known_lens: Sequence[int]
    is_prefilling: Sequence[bool]  # the prompt is not all in the cache yet: drafts will be dropped
    is_first: Sequence[bool]  # nothing was generated before `tokens`


@dataclass(frozen=True)
class PageView:
    """The same pages for all layers and heads."""

    lens: torch.Tensor  # [num_reqs] int32, K/V entries in view, the query's own included
    block_table: torch.Tensor  # [num_reqs, max_pages] int32
    max_len: int  # upper bound of `lens`


@dataclass(frozen=True)
class LayerPageView:
    """Pages of its own for every layer."""

    lens: torch.Tensor  # [num_reqs] int32, as in `PageView`
    block_tables: torch.Tensor  # [num_layers, num_reqs, max_pages] int32
    max_len: int


@dataclass(frozen=True)
class TokenView:
    """A list of slots for every layer and KV head. Good until the round's next step is made."""

    lens: torch.Tensor  # [num_reqs] int32, valid columns of `slots`, the query's own slot included
    slots: torch.Tensor  # [num_layers, num_reqs, num_kv_heads, budget] int32
    common_len: int | None  # what all `lens` are, where the host knows it: in every step of the round


View = PageView | LayerPageView | TokenView


@dataclass(frozen=True)
class DraftStep:
    """What one draft step reads and writes: one query token per request."""

    index: int  # 0 .. gamma - 1
    positions: torch.Tensor  # [num_reqs] int64, true positions of the query tokens
    slots: torch.Tensor  # [num_reqs] int64, where the query's K/V goes; PAD_SLOT: nowhere
    view: View


class ChoosesPages(Protocol):
    """The part of `policies.PagePolicy` that `PageViews` needs."""

    budget: PageBudget

    @property
    def is_sinks_and_latest(self) -> bool: ...

    @property
    def max_pages(self) -> int: ...

    def choose_pages(
        self, context_lens: torch.Tensor, last_pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Views(Protocol):
    """Prepares the views of one round after the other, in buffers that live as long as the engine."""

    def prepare(self, batch: Batch, num_steps: int, size: int = -1) -> Iterator[DraftStep]:
        """The round's steps, in order; no host synchronisation.

        Args:
            batch: the round's requests.
            num_steps: drafts of each.
            size: which of the budgets that the views were made for, the smallest first.
        """
        ...

    def view(self, num_reqs: int, lens: torch.Tensor, common_len: int | None = None) -> View:
        """The view of `num_reqs` requests that is in the buffers now.

        Args:
            num_reqs: requests, at most `max_num_seqs`; those that the round does not have see what an
                earlier round left.
            lens: [num_reqs] int32, entries in view.
            common_len: see `TokenView`; other views have none.
        """
        ...


class DraftSlots:
    """Positions of the drafted tokens and the slots they write to, in buffers that live with the engine."""

    def __init__(
        self,
        *,
        page_size: int,
        max_num_reqs: int,
        max_num_steps: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._page_size = page_size
        self.max_model_len = max_model_len
        self._offsets = torch.arange(max_num_steps, device=device).unsqueeze(1)  # [steps, 1] int64
        shape = (max_num_steps, max_num_reqs)
        self.positions = torch.zeros(shape, dtype=torch.int64, device=device)
        self.slots = torch.full(shape, PAD_SLOT, dtype=torch.int64, device=device)

    def prepare(self, batch: Batch, num_steps: int) -> torch.Tensor:
        """Fill the buffers for a round; returns its positions, [num_steps, num_reqs] int64.

        Positions at or above the model length are clamped and write to PAD_SLOT: what is drafted there
        is never scheduled.
        """
        num_reqs = batch.context_lens.shape[0]
        wanted = batch.context_lens + self._offsets[:num_steps]
        positions = wanted.clamp(max=self.max_model_len - 1)
        pages = batch.block_table.gather(1, (positions // self._page_size).T).T
        slots = pages * self._page_size + positions % self._page_size
        self.positions[:num_steps, :num_reqs] = positions
        self.slots[:num_steps, :num_reqs] = slots.masked_fill(wanted != positions, PAD_SLOT)
        return positions


class PageViews:
    """The same pages for all layers, chosen by position.

    The block table is the same for all steps of a round: it ends at the page of the last drafted token,
    and each step sees one token more of it.

    Args:
        policies: one for each budget, the smallest first.
    """

    def __init__(
        self,
        policies: Sequence[ChoosesPages],
        draft_slots: DraftSlots,
        *,
        page_size: int,
        max_num_reqs: int,
        max_num_steps: int,
        device: torch.device,
    ) -> None:
        self._policies = policies
        self._draft_slots = draft_slots
        self._page_size = page_size
        self._lens = torch.zeros((max_num_steps, max_num_reqs), dtype=torch.int32, device=device)
        shape = (max_num_reqs, max(policy.max_pages for policy in policies))
        self._block_table = torch.zeros(shape, dtype=torch.int32, device=device)

    def prepare(self, batch: Batch, num_steps: int, size: int = -1) -> Iterator[DraftStep]:
        """See `Views`."""
        policy = self._policies[size]
        num_reqs = batch.context_lens.shape[0]
        if policy.is_sinks_and_latest and has_kernels(self._block_table.device):
            self._write_with_kernel(policy.budget, batch, num_steps)
        else:
            self._write(policy, batch, num_steps)
        for index in range(num_steps):
            yield DraftStep(
                index=index,
                positions=self._draft_slots.positions[index, :num_reqs],
                slots=self._draft_slots.slots[index, :num_reqs],
                view=self.view(num_reqs, self._lens[index, :num_reqs]),
            )

    def _write(self, policy: ChoosesPages, batch: Batch, num_steps: int) -> None:
        num_reqs = batch.context_lens.shape[0]
        positions = self._draft_slots.prepare(batch, num_steps)
        last_pages = positions[-1] // self._page_size
        chosen, num_pages = policy.choose_pages(batch.context_lens, last_pages)
        skipped_tokens = (last_pages + 1 - num_pages) * self._page_size
        # Columns past the view are never read; any page of the request keeps them valid.
        chosen = torch.minimum(chosen, last_pages.unsqueeze(1))
        self._block_table[:num_reqs, : policy.max_pages] = batch.block_table.gather(1, chosen)
        self._lens[:num_steps, :num_reqs] = positions + 1 - skipped_tokens

    def _write_with_kernel(self, budget: PageBudget, batch: Batch, num_steps: int) -> None:
        from vllm_magicdec.triton_rounds import write_page_round

        write_page_round(
            batch.context_lens,
            batch.block_table,
            budget.pages(batch.context_lens),
            positions=self._draft_slots.positions,
            slots=self._draft_slots.slots,
            lens=self._lens,
            view_table=self._block_table,
            num_steps=num_steps,
            page_size=self._page_size,
            sink_pages=budget.sink_pages,
            max_pages=budget.max_pages,
            max_model_len=self._draft_slots.max_model_len,
        )

    def view(self, num_reqs: int, lens: torch.Tensor, common_len: int | None = None) -> PageView:
        """See `Views`."""
        return PageView(lens, self._block_table[:num_reqs], self._block_table.shape[-1] * self._page_size)
