# SPDX-License-Identifier: Apache-2.0
"""Policies that choose by what verified tokens attend to: the verification's own queries, recorded.

The idea is that of SparseSpec's PillarAttn and of Vegas: the target has just computed, for the tokens
before the next drafts, where it looks.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.scales import Scales
from vllm_magicdec.attention.softmax import Softmax
from vllm_magicdec.policies.base import Engine, Limits, Policy, parse_budget_of_selected_pages
from vllm_magicdec.views.base import Batch, Views, ceil_div
from vllm_magicdec.views.layer_pages import LayerPageViews
from vllm_magicdec.views.pages import PageBudget
from vllm_magicdec.views.selections import Budget, Selections

# A selection's temporary tensors are of as many requests as fit, one after the other.
SCRATCH_BYTES = 512 * 2**20
# Tokens before the drafted ones that stay in view whatever their score.
RECENT_TOKENS = 32


class Verification:
    """The queries of the target's latest pass: those of the last positions of every request.

    Args:
        num_layers: attention layers of the target.
        max_num_reqs: most requests of a pass.
        num_queries: positions of each request that are kept.
        num_heads: query heads.
        head_size: elements of a query.
        dtype: of the queries.
        device: where the target runs.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        max_num_reqs: int,
        num_queries: int,
        num_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_queries = num_queries
        self._max_num_reqs = max_num_reqs
        self._from_end = torch.arange(-num_queries, 0, device=device)
        self._positions = torch.zeros((max_num_reqs, num_queries), dtype=torch.int64, device=device)
        self._places: torch.Tensor | None = None  # [num_reqs, num_queries], rows of the pass's queries
        shape = (num_layers, max_num_reqs, num_queries, num_heads, head_size)
        self._queries = torch.zeros(shape, dtype=dtype, device=device)
        self._first = 0  # see `starting_at`
        self.caches: dict[int, tuple[KVRows, Softmax]] = {}  # of each layer

    def record(
        self,
        layer: int,
        queries: torch.Tensor,
        scales: Scales,
        metadata: Any,
        cache: KVRows,
        softmax: Softmax,
    ) -> None:
        """See `attention.observing.QueryRecorder`."""
        if layer == 0:
            starts = metadata.query_start_loc.long()
            ends = starts[1:].unsqueeze(1)
            places = torch.maximum(ends + self._from_end, starts[:-1].unsqueeze(1))
            places = places[: self._max_num_reqs]
            num_reqs = places.shape[0]
            # Of a request with fewer queries the first one is there several times; once is enough.
            wanted = metadata.seq_lens[:num_reqs].long().unsqueeze(1) + self._from_end
            is_new = (ends + self._from_end)[:num_reqs] == places
            self._positions[:num_reqs] = torch.where(is_new, wanted, torch.iinfo(torch.int64).max)
            # Requests that pad a CUDA graph begin where the tokens end.
            self._places = places.clamp(max=len(queries) - 1)
        assert self._places is not None
        kept = self._queries[layer, : self._places.shape[0]]
        kept.copy_(scales.scale_query(queries[self._places], kept.dtype))
        self.caches[layer] = (cache, softmax)

    @contextmanager
    def starting_at(self, first: int) -> Iterator[None]:
        """Within it, `positions` and `queries` are those of the pass's requests from `first` on."""
        self._first = first
        try:
            yield
        finally:
            self._first = 0

    @property
    def positions(self) -> torch.Tensor:
        """[max_num_reqs, num_queries] int64; the greatest int64 where a query is not one of its own."""
        return self._positions[self._first :]

    @property
    def queries(self) -> torch.Tensor:
        """[num_layers, max_num_reqs, num_queries, num_heads, head_size], of the tokens at `positions`."""
        return self._queries[:, self._first :]

    @property
    def num_bytes(self) -> int:
        """Device memory of the queries."""
        return self._queries.numel() * self._queries.element_size()

    def queries_by_head(self, layer: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The verification's queries by KV head, and which of them count.

        Returns:
            queries: [num_reqs, num_kv_heads, n, head_size] float32.
            is_accepted: [num_reqs, 1, n, 1] bool.
        """
        num_reqs = batch.context_lens.shape[0]
        positions = self.positions[:num_reqs]
        is_accepted = positions < batch.context_lens.unsqueeze(1)
        queries = self.queries[layer, :num_reqs].float()
        # What was rejected is finite but means nothing.
        queries = queries.masked_fill(~is_accepted[:, :, None, None], 0.0)
        num_kv_heads = self.caches[layer][0].num_kv_heads
        grouped = queries.unflatten(2, (num_kv_heads, -1)).transpose(1, 2)
        counted = is_accepted.repeat_interleave(grouped.shape[3], 1)
        return grouped.flatten(2, 3), counted[:, None, :, None]


class VerificationPolicy(Policy):
    """Chooses pages for every layer after every `refresh`-th verification; `score_pages` says which.

    Args:
        fields: the speculative configuration (`config.MagicDecFields`).
        engine: what views are made for.
        verification: the queries, and by layer their KV caches and what makes weights of products.
    """

    granularities: ClassVar[tuple[str, ...]] = ("page",)

    def __init__(self, fields: Any, engine: Engine, verification: Verification) -> None:
        self.refresh = fields.draft_kv_refresh or 1  # rounds after which it chooses again
        self.engine = engine
        self.verification = verification

    @abstractmethod
    def score_pages(self, batch: Batch, num_pages: int) -> torch.Tensor:
        """How much each page is wanted, [num_layers, num_reqs, num_pages] float32; the highest are taken.

        Scores of pages that are in view anyway, or beyond a request's last one, are ignored.

        Args:
            batch: the round's requests; their pages are `batch.block_table[:, :num_pages]`.
            num_pages: most pages of a request.
        """

    def update(self, batch: Batch, unknown: Mapping[int, int]) -> None:
        """Called before every round that drafts, to keep what the policy knows up to date.

        Args:
            batch: the round's requests; each may have got as many tokens as the verification has queries.
            unknown: indices of those that have got more, and from which token on: 0 if they have begun to
                decode or come back, perhaps on other pages; later where steps went without drafts.
        """

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Device memory of what the policy keeps, by what it is for."""
        return {}

    @classmethod
    def parse_budget(cls, fields: Any, limits: Limits, budget: float) -> Budget:
        """See `Policy`."""
        recent_pages = num_recent_pages(limits.page_size, limits.num_speculative_tokens)
        return parse_budget_of_selected_pages(
            fields, limits, budget, lambda tokens: recent_pages, by_token="token" in cls.granularities
        )

    @classmethod
    def make_views(cls, fields: Any, engine: Engine, budget: PageBudget) -> Views:
        """See `Policy`."""
        policy = cls(fields, engine, make_verification(engine))
        engine.switch_attention(policy.verification, layer_pages=True)
        selections = Selections(
            num_layers=engine.num_layers,
            num_heads=1,
            max_num_reqs=engine.max_num_reqs,
            max_selected=budget.max_selected,
            device=engine.device,
        )
        selector = VerificationSelector(policy, budget, selections)
        return LayerPageViews(selections, selector, budget, engine.make_draft_slots())


def make_verification(engine: Engine) -> Verification:
    """Room for the queries of a round."""
    return Verification(
        num_layers=engine.num_layers,
        max_num_reqs=engine.max_num_reqs,
        num_queries=engine.limits.num_speculative_tokens + 1,
        num_heads=engine.num_heads,
        head_size=engine.head_size,
        dtype=engine.query_dtype,
        device=engine.device,
    )


def num_recent_pages(page_size: int, num_speculative_tokens: int) -> int:
    """Pages that are in view whatever their score: the recent and the drafted tokens may touch so many."""
    return ceil_div(RECENT_TOKENS + num_speculative_tokens, page_size) + 1


class VerificationSelector:
    """Selects after every `refresh`-th verification, and as soon as a request begins to decode.

    Pages are selected by layer, the same for all of its heads.

    Args:
        policy: scores pages.
        budget: of a request, in pages.
        selections: where choices are kept.
    """

    def __init__(self, policy: VerificationPolicy, budget: Budget, selections: Selections) -> None:
        self._policy = policy
        self._budget = budget
        self._selections = selections
        self._page_size = policy.engine.page_size
        self._known: dict[str, int] = {}  # tokens of the last round's requests, as far as the host knew
        self._round = 0

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """See `views.base.Selector`."""
        engine = self._policy.engine
        longest = ceil_div(engine.limits.max_model_len, self._page_size)
        scratch = min(SCRATCH_BYTES, engine.max_num_reqs * self._scratch_bytes(longest))
        return {
            "verified queries": self._policy.verification.num_bytes,
            "a selection's scratch": scratch if self._budget.max_selected else 0,
            **self._policy.memory_bytes,
        }

    def update(self, batch: Batch, num_steps: int) -> None:
        """Select for all requests of the batch, if it is time or one is new."""
        self._selections.begin_round(batch.req_ids)
        unknown = self._find_unknown(batch)
        self._policy.update(batch, unknown)
        is_due = 0 in unknown.values() or self._round % self._policy.refresh == 0
        self._round += 1
        if not is_due or not self._budget.max_selected:
            return
        num_reqs = len(batch.req_ids)
        at_once = max(1, SCRATCH_BYTES // self._scratch_bytes(self._num_pages(batch)))
        for first in range(0, num_reqs, at_once):
            part = batch.part(first, min(first + at_once, num_reqs))
            with self._policy.verification.starting_at(first):
                counts, ends = self._select(part, num_steps)
            known_lens = [int(length) for length in part.known_lens]
            self._selections.set(part.req_ids, known_lens, counts, ends)

    def _find_unknown(self, batch: Batch) -> dict[int, int]:
        """See `VerificationPolicy.update`."""
        num_queries = self._policy.verification.num_queries
        unknown, known = {}, {}
        for index, req_id in enumerate(batch.req_ids):
            if batch.is_prefilling[index]:
                continue
            length = known[req_id] = int(batch.known_lens[index])
            before = self._known.get(req_id)
            if before is None:  # new, or preempted and back, perhaps on other pages
                unknown[index] = 0
            elif length - before > num_queries:
                # Of what the host knew, the last two rounds' drafts may have been rejected.
                unknown[index] = max(0, before - 2 * num_queries)
        self._known = known
        return unknown

    def _select(self, batch: Batch, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill `Selections.positions` of the batch; returns `counts` and `ends` as for `Selections.set`."""
        num_selected, sinks = self._budget.max_selected, self._budget.num_sinks
        max_model_len = self._policy.engine.limits.max_model_len
        last = (batch.context_lens + num_steps - 1).clamp(max=max_model_len - 1)
        ends = last // self._page_size + 1 - self._budget.num_recent
        num_pages = max(self._num_pages(batch), num_selected)
        places = torch.arange(num_pages, device=last.device)
        is_fixed = (places < sinks) | (places >= ends.unsqueeze(1))
        scores = self._policy.score_pages(batch, num_pages).masked_fill(is_fixed, float("-inf"))
        best = scores.topk(num_selected).indices.to(torch.int32)  # [num_layers, num_reqs, num_selected]
        self._selections.positions[self._selections.rows(batch.req_ids), :, 0] = best.transpose(0, 1)
        ends = ends.clamp(min=0)
        return (ends - sinks).clamp(0, num_selected), ends

    def _scratch_bytes(self, num_pages: int) -> int:
        """Temporary memory of `_select` for a request of `num_pages` pages, in all layers."""
        # Scores, the same with what is fixed masked, and what `topk` sorts.
        return 3 * 4 * num_pages * self._policy.engine.num_layers

    def _num_pages(self, batch: Batch) -> int:
        """Most pages of any request of the batch, as far as the host knows."""
        longest = max(int(length) for length in batch.known_lens)
        return min(ceil_div(longest + 1, self._page_size), batch.block_table.shape[1])
