# SPDX-License-Identifier: Apache-2.0
"""The policy `verify-topk`: the verification's own queries choose what the next round's draft sees.

Pages are scored by summaries of their keys, as in Quest (Tang et al. 2024, arXiv 2406.10774): with the
element-wise minimum and maximum of a page's keys, `sum_d max(q_d * min_d, q_d * max_d)` bounds every logit
of the page from above. A page's score is a softmax over these bounds, summed over the accepted positions of
the round and over query heads.

- Granularity `page`: every layer sees its best pages, the same for all of its heads, so that any attention
  backend with block tables runs the draft.
- Granularity `token`: every KV head sees its best tokens, found by exact scores inside its best pages, of
  which it looks at twice as many as would fill the budget.

Cost per layer and round: the summaries of a request's pages are read (2 / page_size of its keys), and the
keys of the few pages that the round wrote to; at granularity `token` also 2 x budget keys per KV head. A
whole context is summarised when its request starts to decode. Summaries take 1 / page_size of the KV
cache's memory.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from vllm_magicdec.attention import KVRows
from vllm_magicdec.policies.base import Engine, Limits
from vllm_magicdec.policies.verification import (
    RECENT_TOKENS,
    SCRATCH_BYTES,
    Verification,
    VerificationPolicy,
    VerificationSelector,
    make_verification,
)
from vllm_magicdec.views.base import Batch, Views, ceil_div, has_kernels
from vllm_magicdec.views.selections import Budget, Selections
from vllm_magicdec.views.tokens import TokenBudget, TokenViews

if TYPE_CHECKING:
    from vllm_magicdec.policies.verify_topk_kernels import LayerTable


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
        page_size: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._page_size = page_size
        shape = (num_layers, num_blocks, num_kv_heads, head_size)
        self.least = torch.zeros(shape, dtype=dtype, device=device)
        self.greatest = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Device memory of the summaries."""
        return 2 * self.least.numel() * self.least.element_size()

    def update(
        self,
        layer: int,
        rows: KVRows,
        blocks: torch.Tensor,  # [n] int64
        num_verified: torch.Tensor,  # [n] int64, tokens of each page, at least 1
    ) -> None:
        """Summarise pages again."""
        keys = rows.keys_by_page(blocks, self._page_size)
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


class VerifyTopK(VerificationPolicy):
    """Pages or tokens that the verification's own queries want most; see `VerificationPolicy`."""

    granularities = ("page", "token")

    def __init__(self, fields: Any, engine: Engine, verification: Verification) -> None:
        super().__init__(fields, engine, verification)
        self.summaries = PageSummaries(
            num_layers=engine.num_layers,
            num_blocks=engine.num_blocks,
            num_kv_heads=engine.num_kv_heads,
            page_size=engine.page_size,
            head_size=engine.head_size,
            dtype=engine.cache_dtype,
            device=engine.device,
        )
        self._table: LayerTable | None = None  # for kernels; made where there are any
        # A round's tokens may start anywhere in a page, so they may touch one page more.
        self._num_touched = ceil_div(verification.num_queries, engine.page_size) + 1

    @classmethod
    def parse_budget(cls, fields: Any, limits: Limits, budget: float) -> Budget:
        """See `Policy`."""
        if cls.granularity(fields, limits.device_type) == "page":
            return super().parse_budget(fields, limits, budget)
        return TokenBudget.from_fields(
            budget=budget,
            min_budget=fields.draft_kv_min_budget,
            sink=fields.draft_kv_sink,
            window=RECENT_TOKENS,
            num_speculative_tokens=limits.num_speculative_tokens,
            max_model_len=limits.max_model_len,
        )

    @classmethod
    def make_views(cls, fields: Any, engine: Engine, budget: Any) -> Views:
        """See `Policy`."""
        if cls.granularity(fields, engine.limits.device_type) == "page":
            return super().make_views(fields, engine, budget)
        policy = cls(fields, engine, make_verification(engine))
        plans = engine.switch_attention(policy.verification)
        selections = Selections(
            num_layers=engine.num_layers,
            num_heads=engine.num_kv_heads,
            max_num_reqs=engine.max_num_reqs,
            max_selected=budget.max_selected,
            device=engine.device,
        )
        selector = TokenSelector(policy, budget, selections)
        return TokenViews(selections, selector, budget, engine.make_draft_slots(), plans)

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """See `VerificationPolicy`."""
        memory = {"page summaries": self.summaries.num_bytes}
        if self.engine.limits.device_type == "cuda":
            from vllm_magicdec.policies.verify_topk_kernels import SCRATCH_BYTES

            memory["logits of pages"] = SCRATCH_BYTES
        return memory

    def update(self, batch: Batch, unknown: Mapping[int, int]) -> None:
        """Bring the summaries up to date."""
        caches, page_size = self.verification.caches, self.engine.page_size
        if has_kernels(batch.context_lens.device):
            from vllm_magicdec.policies.verify_topk_kernels import LayerTable

            if self._table is None or not self._table.holds(caches):
                self._table = LayerTable(caches)
        for index, first in unknown.items():
            full = slice(first // page_size, int(batch.known_lens[index]) // page_size)
            own = batch.block_table[index, full].long()
            if len(own):
                self._summarise(own, torch.full_like(own, page_size))
        last = (batch.context_lens - 1) // page_size
        touched = torch.arange(-self._num_touched + 1, 1, device=last.device)
        pages = (last.unsqueeze(1) + touched).clamp(min=0)
        blocks = batch.block_table.gather(1, pages).long().flatten()
        num_verified = batch.context_lens.unsqueeze(1) - pages * page_size
        self._summarise(blocks, num_verified.clamp(max=page_size).flatten())

    def _summarise(self, blocks: torch.Tensor, num_verified: torch.Tensor) -> None:
        """`PageSummaries.update` in all layers."""
        if self._table is not None:
            from vllm_magicdec.policies.verify_topk_kernels import summarise

            summarise(self._table, self.summaries.least, self.summaries.greatest, blocks, num_verified)
            return
        for layer, (cache, _) in self.verification.caches.items():
            self.summaries.update(layer, cache, blocks, num_verified)

    def score_pages(self, batch: Batch, num_pages: int) -> torch.Tensor:
        """See `VerificationPolicy`."""
        return self.score(range(self.engine.num_layers), batch, num_pages, by_head=False).squeeze(2)

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
                self.verification.queries,
                self.verification.positions,
                batch.context_lens,
                batch.block_table,
                self.summaries.least,
                self.summaries.greatest,
                layers=layers,
                num_pages=num_pages,
                by_head=by_head,
            )
        blocks = batch.block_table[:, :num_pages].long()
        last = (batch.context_lens - 1) // self.engine.page_size
        is_seen = torch.arange(num_pages, device=last.device) <= last.unsqueeze(1)
        scores = []
        for layer in layers:
            _, softmax = self.verification.caches[layer]
            queries, is_accepted = self.verification.queries_by_head(layer, batch)
            bounds = self.summaries.bounds(layer, queries, blocks)
            weights = softmax.weights(bounds, is_seen[:, None, None])
            by_kv_head = (weights * is_accepted).sum(2)
            scores.append(by_kv_head if by_head else by_kv_head.sum(1, keepdim=True))
        return torch.stack(scores)

    def score_tokens(
        self, layers: range, batch: Batch, pages: torch.Tensor, sink: int, ends: torch.Tensor
    ) -> torch.Tensor:
        """Attention weights of the tokens of some pages, summed as in `score`.

        Args:
            layers: which ones.
            batch: the round's requests.
            pages: [len(layers), num_reqs, num_kv_heads, num_candidates] int64, within the request.
            sink: first position that can be chosen.
            ends: [num_reqs] int64, first position that cannot.

        Returns:
            [len(layers), num_reqs, num_kv_heads, num_candidates * page_size] float32, in the pages' order;
            below 0 for tokens that cannot be chosen.
        """
        page = self.engine.page_size
        if self._table is not None:
            from vllm_magicdec.policies.verify_topk_token_kernels import score_tokens

            return score_tokens(
                self._table,
                self.verification.queries,
                self.verification.positions,
                batch.context_lens,
                batch.block_table,
                pages,
                ends,
                layers=layers,
                sink=sink,
            )
        places = torch.arange(page, device=pages.device)
        scores = []
        for layer, chosen in zip(layers, pages, strict=True):
            cache, softmax = self.verification.caches[layer]
            positions = (chosen.unsqueeze(-1) * page + places).flatten(2)
            blocks = batch.block_table.gather(1, chosen.flatten(1)).view_as(chosen)
            slots = (blocks.unsqueeze(-1) * page + places).flatten(2)
            queries, is_accepted = self.verification.queries_by_head(layer, batch)
            products = queries @ cache.keys.gather(slots).float().transpose(2, 3)
            is_eligible = (positions >= sink) & (positions < ends[:, None, None])
            weights = softmax.weights(products, is_eligible.unsqueeze(2)) * is_accepted
            scores.append(weights.nan_to_num().sum(2).masked_fill_(~is_eligible, -1.0))
        return torch.stack(scores)


class TokenSelector(VerificationSelector):
    """Selects tokens per layer and KV head, among those of its best pages."""

    _policy: VerifyTopK

    def _scratch_bytes(self, num_pages: int) -> int:
        engine, verification = self._policy.engine, self._policy.verification
        num_candidates = min(ceil_div(2 * self._budget.max_selected, self._page_size) + 1, num_pages)
        # Of pages and candidates: scores, the same with what is fixed masked, and what `topk` sorts.
        by_token, by_page = 3 * 4, 3 * 4
        if engine.limits.device_type != "cuda":
            # Without kernels: slots, keys and the same in float32, logits and weights.
            num_rows = verification.num_queries * engine.num_heads // engine.num_kv_heads
            by_token += 8 * 8 + engine.head_size * (engine.cache_dtype.itemsize + 4) + 2 * 4 * num_rows
        num_tokens = num_candidates * self._page_size
        return engine.num_kv_heads * (num_tokens * by_token + num_pages * by_page)

    @property
    def _min_layers(self) -> int:
        return 1

    def _layers_at_once(self, num_reqs: int, num_pages: int) -> Iterator[range]:
        """Parts of the layers whose scores fit into the scratch."""
        num_layers = self._policy.engine.num_layers
        size = max(1, SCRATCH_BYTES // (num_reqs * self._scratch_bytes(num_pages)))
        for first in range(0, num_layers, size):
            yield range(first, min(first + size, num_layers))

    def _select(self, batch: Batch, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        page, sink, num_selected = self._page_size, self._budget.num_sinks, self._budget.max_selected
        num_pages = self._num_pages(batch)
        num_candidates = min(ceil_div(2 * num_selected, page) + 1, num_pages)
        ends = (batch.context_lens - self._budget.num_recent).clamp(min=0)
        places = torch.arange(num_pages, device=ends.device)
        is_open = ((places + 1) * page > sink) & (places * page < ends.unsqueeze(1))
        rows = self._selections.rows(batch.req_ids)
        for layers in self._layers_at_once(len(batch.req_ids), num_pages):
            scores = self._policy.score(layers, batch, num_pages, by_head=True)
            scores.masked_fill_(~is_open[:, None], -1.0)
            pages = scores.topk(num_candidates).indices  # [layers, num_reqs, num_kv_heads, num_candidates]
            weights = self._policy.score_tokens(layers, batch, pages, sink, ends)
            best = weights.topk(min(num_selected, weights.shape[-1])).indices
            chosen = (pages.gather(3, best // page) * page + best % page).to(torch.int32)
            part = self._selections.positions[:, layers.start : layers.stop, :, : chosen.shape[-1]]
            part[rows] = chosen.transpose(0, 1)
        room = self._budget.entries(batch.context_lens) - sink - self._budget.num_recent
        return torch.minimum((ends - sink).clamp(min=0), room), ends
