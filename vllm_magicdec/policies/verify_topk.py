# SPDX-License-Identifier: Apache-2.0
"""The policy `verify-topk`: the verification's own queries choose what the next round's draft sees.

The idea is that of SparseSpec's PillarAttn and of Vegas. Pages are scored by summaries of their keys, as in
Quest (Tang et al. 2024, arXiv 2406.10774): with the element-wise minimum and maximum of a page's keys,
`sum_d max(q_d * min_d, q_d * max_d)` bounds every logit of the page from above. A page's score is a softmax
over these bounds, summed over the accepted positions of the round and over query heads.

- Granularity `page`: every layer sees its best pages, the same for all of its heads, so that any attention
  backend with block tables runs the draft.
- Granularity `token`: every KV head sees its best tokens, found by exact scores inside its best pages, of
  which it looks at twice as many as would fill the budget.

Cost per layer and round: the summaries of a request's pages are read (2 / page_size of its keys), and the
keys of the few pages that the round wrote to; at granularity `token` also 2 x budget keys per KV head. A
whole context is summarised when its request starts to decode. Summaries take 1 / page_size of the KV
cache's memory.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_magicdec.attention import KVRows
from vllm_magicdec.views.base import Batch, DraftSlots, DraftStep, LayerPageView, ceil_div, has_kernels
from vllm_magicdec.views.pages import PageBudget
from vllm_magicdec.views.tokens import RequestRows, Selections, TokenBudget

if TYPE_CHECKING:
    from vllm_magicdec.policies.verify_topk_kernels import LayerTable


# Tokens before the drafted ones that `verify-topk` keeps in view whatever their score.
RECENT_TOKENS = 32


class VerifyTopK:
    """Pages or tokens that the verification's own queries want, per layer.

    Args:
        fields: the speculative configuration (`config.MagicDecFields`).
    """

    def __init__(self, fields: Any) -> None:
        self.refresh = fields.draft_kv_refresh or 1  # rounds after which it chooses again
        self.granularity = fields.draft_kv_granularity
        self.window = RECENT_TOKENS
        self.recent = 0.0


class PageSummaries:
    """Element-wise minimum and maximum of every page's keys, for all layers.

    Entries belong to pages of the cache. A request summarises all of its pages before it reads any, so what
    a page's former owner left behind is never seen.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_blocks, num_kv_heads, head_size)
        self.least = torch.zeros(shape, dtype=dtype, device=device)
        self.greatest = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return 2 * self.least.numel() * self.least.element_size()

    def update(
        self,
        layer: int,
        rows: KVRows,
        blocks: torch.Tensor,  # [n] int64
        num_verified: torch.Tensor,  # [n] int64, tokens of each page, at least 1
    ) -> None:
        """Summarise pages again."""
        keys = rows.keys_by_page(blocks)
        places = torch.arange(keys.shape[2], device=blocks.device)
        # Tokens that are not verified count as their page's first.
        is_verified = (places < num_verified[:, None])[:, None, :, None]
        keys = torch.where(is_verified, keys, keys[:, :, :1])
        self.least[layer, blocks] = keys.amin(2)
        self.greatest[layer, blocks] = keys.amax(2)

    def bounds(self, layer: int, queries: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Upper bounds of logits, before scaling.

        Args:
            layer: its number.
            queries: [num_reqs, num_kv_heads, num_queries, head_size] float32.
            blocks: [num_reqs, num_pages] int64.

        Returns:
            [num_reqs, num_kv_heads, num_queries, num_pages] float32.
        """
        # [num_reqs, num_kv_heads, head_size, num_pages]
        least = self.least[layer][blocks].permute(0, 2, 3, 1).float()
        greatest = self.greatest[layer][blocks].permute(0, 2, 3, 1).float()
        return queries.clamp(min=0) @ greatest + queries.clamp(max=0) @ least


class Verification:
    """The queries of the target's latest pass: those of the last positions of every request."""

    def __init__(
        self, *, num_layers: int, max_num_reqs: int, num_queries: int, device: torch.device
    ) -> None:
        self.num_queries = num_queries
        self._num_layers = num_layers
        self._max_num_reqs = max_num_reqs
        self._from_end = torch.arange(-num_queries, 0, device=device)
        self.positions = torch.zeros((max_num_reqs, num_queries), dtype=torch.int64, device=device)
        self._places: torch.Tensor | None = None  # [num_reqs, num_queries], rows of the pass's queries
        self._queries: torch.Tensor | None = None
        self.caches: dict[int, tuple[KVRows, float, float]] = {}  # rows, scale and soft cap of each layer

    def record(
        self, layer: int, queries: torch.Tensor, metadata: Any, cache: KVRows, scale: float, soft_cap: float
    ) -> None:
        """Called in every layer of the target's pass; `queries` [num_tokens, num_heads, head_size]."""
        if layer == 0:
            starts = metadata.query_start_loc.long()
            ends = starts[1:].unsqueeze(1)
            places = torch.maximum(ends + self._from_end, starts[:-1].unsqueeze(1))
            self._places = places[: self._max_num_reqs]
            num_reqs = self._places.shape[0]
            # Of a request with fewer queries the first one is there several times; once is enough.
            wanted = metadata.seq_lens[:num_reqs].long().unsqueeze(1) + self._from_end
            is_new = (ends + self._from_end)[:num_reqs] == self._places
            self.positions[:num_reqs] = torch.where(is_new, wanted, torch.iinfo(torch.int64).max)
        assert self._places is not None
        if self._queries is None:
            shape = (self._num_layers, self._max_num_reqs, self.num_queries, *queries.shape[1:])
            self._queries = torch.zeros(shape, dtype=queries.dtype, device=queries.device)
        kept = self._queries[layer, : self._places.shape[0]].flatten(0, 1)
        torch.index_select(queries, 0, self._places.flatten(), out=kept)
        self.caches[layer] = (cache, scale, soft_cap)

    @property
    def queries(self) -> torch.Tensor:
        """[num_layers, max_num_reqs, num_queries, num_heads, head_size], of the tokens at `positions`."""
        assert self._queries is not None
        return self._queries


class PageScores:
    """How much the latest verification's accepted positions want each page.

    Args:
        verification: what the target's pass recorded.
        summaries: of the cache's pages; kept up to date here.
        page_size: tokens per page.
    """

    def __init__(self, verification: Verification, summaries: PageSummaries, page_size: int) -> None:
        self._verification = verification
        self._summaries = summaries
        self._page_size = page_size
        self._table: LayerTable | None = None  # for kernels; made where there are any
        # A round's tokens may start anywhere in a page, so they may touch one page more.
        self._num_touched = ceil_div(verification.num_queries, page_size) + 1
        self._summarised: set[str] = set()  # requests of the last round, all of whose pages are

    @property
    def caches(self) -> dict[int, tuple[KVRows, float, float]]:
        """Rows, scale and soft cap of every layer."""
        return self._verification.caches

    def update(self, batch: Batch) -> bool:
        """Bring the summaries up to date; returns whether a request has begun to decode."""
        if has_kernels(batch.context_lens.device):
            from vllm_magicdec.policies.verify_topk_kernels import (
                LayerTable,  # Triton need not be installed elsewhere
            )

            if self._table is None or not self._table.holds(self.caches):
                self._table = LayerTable(self.caches)
        last = (batch.context_lens - 1) // self._page_size
        touched = torch.arange(-self._num_touched + 1, 1, device=last.device)
        pages = (last.unsqueeze(1) + touched).clamp(min=0)
        blocks = batch.block_table.gather(1, pages).long().flatten()
        num_verified = batch.context_lens.unsqueeze(1) - pages * self._page_size
        num_verified = num_verified.clamp(max=self._page_size).flatten()
        decoding = {
            req_id
            for req_id, is_prefilling in zip(batch.req_ids, batch.is_prefilling, strict=True)
            if not is_prefilling
        }
        # Absent from the last round: new, or preempted and back, perhaps on other pages.
        new = [i for i, req_id in enumerate(batch.req_ids) if req_id in decoding - self._summarised]
        self._summarised = decoding
        for index in new:
            num_full = int(batch.known_lens[index]) // self._page_size
            if num_full:
                own = batch.block_table[index, :num_full].long()
                self._summarise(own, torch.full_like(own, self._page_size))
        self._summarise(blocks, num_verified)
        return bool(new)

    def _summarise(self, blocks: torch.Tensor, num_verified: torch.Tensor) -> None:
        """`PageSummaries.update` in all layers."""
        if self._table is not None:
            from vllm_magicdec.policies.verify_topk_kernels import summarise

            summarise(self._table, self._summaries.least, self._summaries.greatest, blocks, num_verified)
            return
        for layer, (cache, _, _) in self.caches.items():
            self._summaries.update(layer, cache, blocks, num_verified)

    def num_pages(self, batch: Batch) -> int:
        """Most pages of any request of the batch, as far as the host knows."""
        longest = max(int(length) for length in batch.known_lens)
        return min(ceil_div(longest + 1, self._page_size), batch.block_table.shape[1])

    def queries(self, layer: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The verification's queries by KV head, and which of them count.

        Returns:
            queries: [num_reqs, num_kv_heads, n, head_size] float32.
            is_accepted: [num_reqs, 1, n, 1] bool.
        """
        num_reqs = batch.context_lens.shape[0]
        positions = self._verification.positions[:num_reqs]
        is_accepted = positions < batch.context_lens.unsqueeze(1)
        queries = self._verification.queries[layer, :num_reqs].float()
        # What was rejected is finite but means nothing.
        queries = queries.masked_fill(~is_accepted[:, :, None, None], 0.0)
        num_kv_heads = self.caches[layer][0].num_kv_heads
        grouped = queries.unflatten(2, (num_kv_heads, -1)).transpose(1, 2)
        counted = is_accepted.repeat_interleave(grouped.shape[3], 1)
        return grouped.flatten(2, 3), counted[:, None, :, None]

    def score(self, layers: range, batch: Batch, num_pages: int, *, by_head: bool) -> torch.Tensor:
        """Attention weights of pages, summed over a round's accepted positions and over query heads.

        Returns:
            [len(layers), num_reqs, num_kv_heads if by_head else 1, num_pages] float32, 0 for pages after a
            request's last one.
        """
        if self._table is not None:
            from vllm_magicdec.policies.verify_topk_kernels import score_pages

            return score_pages(
                self._table,
                self._verification.queries,
                self._verification.positions,
                batch.context_lens,
                batch.block_table,
                self._summaries.least,
                self._summaries.greatest,
                layers=layers,
                num_pages=num_pages,
                by_head=by_head,
            )
        blocks = batch.block_table[:, :num_pages].long()
        last = (batch.context_lens - 1) // self._page_size
        is_seen = torch.arange(num_pages, device=last.device) <= last.unsqueeze(1)
        scores = []
        for layer in layers:
            _, scale, soft_cap = self.caches[layer]
            queries, is_accepted = self.queries(layer, batch)
            bounds = self._summaries.bounds(layer, queries, blocks)
            weights = softmax(bounds * scale, soft_cap, is_seen[:, None, None])
            by_kv_head = (weights * is_accepted).sum(2)
            scores.append(by_kv_head if by_head else by_kv_head.sum(1, keepdim=True))
        return torch.stack(scores)


def softmax(logits: torch.Tensor, soft_cap: float, is_seen: torch.Tensor) -> torch.Tensor:
    """Attention weights over the last axis."""
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    return logits.masked_fill(~is_seen, float("-inf")).softmax(-1)


class VerificationSelector:
    """Selects tokens per layer and KV head after every `refresh`-th verification; see `observing.Selector`.

    Args:
        scores: finds the best pages.
        budget: of a request (`budget_to_select`); what is younger than its window is not selected.
        selections: where choices are kept.
        page_size: tokens per page.
        refresh: rounds after which tokens are chosen again.
    """

    def __init__(
        self,
        scores: PageScores,
        budget: TokenBudget,
        selections: Selections,
        *,
        page_size: int,
        refresh: int,
    ) -> None:
        self._scores = scores
        self._budget = budget
        self._selections = selections
        self._page_size = page_size
        self._refresh = refresh
        self._round = 0

    def update(self, runner: object, batch: Batch) -> None:
        """Select for all requests of the batch, if it is time or a request is new."""
        self._selections.begin_round(batch.req_ids)
        is_new = self._scores.update(batch)
        is_due = is_new or self._round % self._refresh == 0
        self._round += 1
        num_selected = self._budget.max_selected
        if not is_due or not num_selected:
            return
        page, sink = self._page_size, self._budget.sink
        num_pages = self._scores.num_pages(batch)
        num_candidates = min(ceil_div(2 * num_selected, page) + 1, num_pages)
        ends = (batch.context_lens - self._budget.window).clamp(min=0)
        places = torch.arange(num_pages, device=ends.device)
        is_open = ((places + 1) * page > sink) & (places * page < ends.unsqueeze(1))
        rows = self._selections.rows(batch.req_ids)
        for layer, (cache, scale, soft_cap) in self._scores.caches.items():
            (scores,) = self._scores.score(range(layer, layer + 1), batch, num_pages, by_head=True)
            scores.masked_fill_(~is_open[:, None], -1.0)
            pages = scores.topk(num_candidates).indices  # [num_reqs, num_kv_heads, num_candidates]
            positions = (pages.unsqueeze(-1) * page + torch.arange(page, device=ends.device)).flatten(2)
            blocks = batch.block_table.gather(1, pages.flatten(1)).view_as(pages)
            slots = (blocks.unsqueeze(-1) * page + torch.arange(page, device=ends.device)).flatten(2)
            queries, is_accepted = self._scores.queries(layer, batch)
            logits = queries @ cache.keys.gather(slots).float().transpose(2, 3) * scale
            is_eligible = (positions >= sink) & (positions < ends[:, None, None])
            weights = (
                (softmax(logits, soft_cap, is_eligible.unsqueeze(2)) * is_accepted).nan_to_num().sum(2)
            )
            weights.masked_fill_(~is_eligible, -1.0)
            best = weights.topk(min(num_selected, weights.shape[-1])).indices
            chosen = positions.gather(2, best).to(torch.int32)
            self._selections.positions[rows, layer, :, : chosen.shape[-1]] = chosen
        room = self._budget.tokens(batch.context_lens) - sink - self._budget.window
        counts = torch.minimum((ends - sink).clamp(min=0), room)
        self._selections.set(batch.req_ids, [int(n) for n in batch.known_lens], counts, ends)


def num_recent_pages(page_size: int, num_speculative_tokens: int) -> int:
    """Pages that are in view whatever their score: the recent and the drafted tokens may touch so many."""
    return ceil_div(RECENT_TOKENS + num_speculative_tokens, page_size) + 1


class VerificationViews:
    """Page views of one round, per layer, chosen from the queries of the verification before it.

    Columns of a block table: [chosen pages | sinks | recent pages]. A context within the budget is seen
    whole. Chosen pages are kept best first, so that a smaller budget takes the first of them.

    Args:
        budgets: in pages, the smallest first.
        scores: of the pages.
        draft_slots: where the drafted tokens go.
        num_layers: attention layers of the target.
        refresh: rounds after which pages are chosen again.
    """

    def __init__(
        self,
        budgets: Sequence[PageBudget],
        scores: PageScores,
        draft_slots: DraftSlots,
        *,
        num_layers: int,
        refresh: int,
        max_num_reqs: int,
        max_num_steps: int,
        device: torch.device,
    ) -> None:
        self._budgets = budgets
        self._scores = scores
        self._draft_slots = draft_slots
        self._refresh = refresh
        self._num_layers = num_layers
        most = budgets[-1]
        self._num_recent = num_recent_pages(most.page_size, max_num_steps)
        self._columns = torch.arange(most.max_pages, device=device)
        self._lens = torch.zeros((max_num_steps, max_num_reqs), dtype=torch.int32, device=device)
        shape = (num_layers, max_num_reqs, most.max_pages)
        self._block_table = torch.zeros(shape, dtype=torch.int32, device=device)
        shape = (max_num_reqs, num_layers, self._num_chosen(most))
        self._chosen = torch.zeros(shape, dtype=torch.int64, device=device)  # pages within the request
        self._has_chosen = torch.zeros(max_num_reqs, dtype=torch.bool, device=device)
        self._rows = RequestRows(max_num_reqs, device)
        self._round = 0

    @property
    def index_bytes(self) -> int:
        """Device memory of the chosen pages and the block tables."""
        return sum(t.numel() * t.element_size() for t in (self._chosen, self._block_table))

    def _num_chosen(self, budget: PageBudget) -> int:
        return max(0, budget.max_pages - budget.sink_pages - self._num_recent)

    def prepare(self, batch: Batch, num_steps: int, size: int = -1) -> Iterator[DraftStep]:
        """See `views.base.Views`."""
        budget = self._budgets[size]
        num_reqs = batch.context_lens.shape[0]
        for row in self._rows.add(batch.req_ids):
            self._has_chosen[row] = False
        rows = self._rows.of(batch.req_ids)
        is_new = self._scores.update(batch)
        if self._chosen.shape[-1] and (is_new or self._round % self._refresh == 0):
            self._choose(batch, rows, num_steps)
        self._round += 1
        write = self._write_with_kernel if has_kernels(rows.device) else self._write
        write(budget, batch, rows, num_steps)
        for index in range(num_steps):
            yield DraftStep(
                index=index,
                positions=self._draft_slots.positions[index, :num_reqs],
                slots=self._draft_slots.slots[index, :num_reqs],
                view=self.view(num_reqs, self._lens[index, :num_reqs]),
            )

    def _write(self, budget: PageBudget, batch: Batch, rows: torch.Tensor, num_steps: int) -> None:
        num_chosen = self._num_chosen(budget)
        num_reqs = batch.context_lens.shape[0]
        positions = self._draft_slots.prepare(batch, num_steps)
        last_pages = positions[-1] // budget.page_size
        total = last_pages + 1
        is_crowded = (total > budget.max_pages) & self._has_chosen[rows]
        counts = is_crowded * num_chosen
        sinks = total.clamp(max=budget.sink_pages)
        start = torch.maximum(sinks, total - (budget.max_pages - sinks - counts))
        column = self._columns[: budget.max_pages] - counts.unsqueeze(1)  # negative: chosen
        pages = torch.where(column < sinks.unsqueeze(1), column, column + (start - sinks).unsqueeze(1))
        pages = torch.minimum(pages.clamp(min=0), last_pages.unsqueeze(1))
        table = self._block_table[:, :num_reqs]
        table[..., : budget.max_pages] = batch.block_table.gather(1, pages)
        if num_chosen:
            chosen = self._chosen[rows, :, :num_chosen].flatten(1)
            chosen = torch.minimum(chosen, last_pages.unsqueeze(1))
            blocks = (
                batch.block_table.gather(1, chosen).view(num_reqs, self._num_layers, -1).transpose(0, 1)
            )
            part = table[..., :num_chosen]
            part[:] = torch.where(is_crowded[:, None], blocks, part)
        skipped_tokens = (start - sinks - counts) * budget.page_size
        self._lens[:num_steps, :num_reqs] = positions + 1 - skipped_tokens

    def _write_with_kernel(
        self, budget: PageBudget, batch: Batch, rows: torch.Tensor, num_steps: int
    ) -> None:
        from vllm_magicdec.views.kernels import write_layer_page_round

        write_layer_page_round(
            batch.context_lens,
            batch.block_table,
            rows,
            self._chosen,
            self._has_chosen,
            positions=self._draft_slots.positions,
            slots=self._draft_slots.slots,
            lens=self._lens,
            view_table=self._block_table,
            num_steps=num_steps,
            page_size=budget.page_size,
            sink_pages=budget.sink_pages,
            max_pages=budget.max_pages,
            num_chosen=self._num_chosen(budget),
            max_model_len=self._draft_slots.max_model_len,
        )

    def view(self, num_reqs: int, lens: torch.Tensor, common_len: int | None = None) -> LayerPageView:
        """See `views.base.Views`."""
        max_len = self._block_table.shape[-1] * self._budgets[-1].page_size
        return LayerPageView(lens, self._block_table[:, :num_reqs], max_len)

    def _choose(self, batch: Batch, rows: torch.Tensor, num_steps: int) -> None:
        num_chosen = self._chosen.shape[-1]
        last = (batch.context_lens + num_steps - 1).clamp(max=self._draft_slots.max_model_len - 1)
        last_pages = last // self._budgets[-1].page_size
        num_pages = max(self._scores.num_pages(batch), num_chosen)
        places = torch.arange(num_pages, device=rows.device)
        end = (last_pages + 1 - self._num_recent).unsqueeze(1)
        is_fixed = (places < self._budgets[-1].sink_pages) | (places >= end)
        scores = self._scores.score(range(self._num_layers), batch, num_pages, by_head=False).squeeze(2)
        scores.masked_fill_(is_fixed, -1.0)
        self._chosen[rows] = scores.topk(num_chosen).indices.transpose(0, 1)
        self._has_chosen[rows] = True
