# SPDX-License-Identifier: Apache-2.0
"""The base of policies that score pages by the recorded queries of the latest verification.

As in SparseSpec's PillarAttn and Vegas, the target has just computed these for the tokens before the next
drafts.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from typing_extensions import override

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.observing import QueryRecorder
from vllm_magicdec.attention.scales import Scales
from vllm_magicdec.attention.softmax import Softmax
from vllm_magicdec.policies.base import Engine, Limits, Policy, parse_budget_of_selected_pages
from vllm_magicdec.views.layer_pages import LayerPageViews
from vllm_magicdec.views.pages import PageBudget
from vllm_magicdec.views.round import Batch, Selector, Views
from vllm_magicdec.views.selections import Budget, Selections
from vllm_magicdec.views.tensors import ceil_div

# Requests are selected for in parts whose temporary tensors fit.
SCRATCH_BYTES = 512 * 2**20
# Tokens before the drafted ones that stay in view whatever their score.
RECENT_TOKENS = 32


class Verification(QueryRecorder):
    """The queries of the last positions of every request in the target's latest pass.

    They are stored without gaps, because a pass has few tokens for many requests: at most
    `Engine.max_batched_tokens`.
    """

    def __init__(self, engine: Engine) -> None:
        self.num_queries = engine.limits.num_speculative_tokens + 1
        self._max_num_reqs = engine.max_num_reqs
        self._from_end = torch.arange(-self.num_queries, 0, device=engine.device)
        shape = (engine.max_num_reqs, self.num_queries)
        self._positions = torch.zeros(shape, dtype=torch.int64, device=engine.device)
        self._rows = torch.zeros(shape, dtype=torch.int64, device=engine.device)
        self._indices: torch.Tensor | None = None  # [num_rows], into the pass's queries
        self._max_num_rows = min(engine.max_num_reqs * self.num_queries, engine.max_batched_tokens)
        self.queries = torch.zeros(
            (engine.num_layers, self._max_num_rows, engine.num_heads, engine.head_size),
            dtype=engine.query_dtype,
            device=engine.device,
        )
        """[num_layers, num_rows, num_heads, head_size], of the tokens at `rows`."""
        self.first_request = 0  # start of `positions` and `rows` in the pass
        self.caches: dict[int, tuple[KVRows, Softmax]] = {}  # by layer

    @override
    def record(
        self,
        layer: int,
        queries: torch.Tensor,
        scales: Scales,
        metadata: Any,
        cache: KVRows,
        softmax: Softmax,
    ) -> None:
        if layer == 0:
            starts = metadata.query_start_loc[: self._max_num_reqs + 1].long()
            indices = self._last_of(starts)
            num_reqs = len(indices)
            # A request with fewer queries repeats its first one, which must count once.
            positions = metadata.seq_lens[:num_reqs].long().unsqueeze(1) + self._from_end
            is_new = starts[1:].unsqueeze(1) + self._from_end == indices
            self._positions[:num_reqs] = torch.where(is_new, positions, torch.iinfo(torch.int64).max)
            num_rows = min(num_reqs * self.num_queries, len(queries), self._max_num_rows)
            num_kept = starts.diff().clamp(max=self.num_queries)
            rows = self._last_of(torch.nn.functional.pad(num_kept.cumsum(0), (1, 0)))
            # Requests that pad a CUDA graph start after the last token.
            rows, indices = rows.clamp(max=num_rows - 1), indices.clamp(max=len(queries) - 1)
            self._rows[:num_reqs] = rows
            self._indices = indices.new_zeros(num_rows).scatter_(0, rows.flatten(), indices.flatten())
        assert self._indices is not None
        kept = self.queries[layer, : len(self._indices)]
        kept.copy_(scales.scale_query(queries[self._indices], kept.dtype))
        self.caches[layer] = (cache, softmax)

    def _last_of(self, starts: torch.Tensor) -> torch.Tensor:
        """Return the last `num_queries` indices from each start to the next, [num_reqs, num_queries]."""
        return torch.maximum(starts[1:].unsqueeze(1) + self._from_end, starts[:-1].unsqueeze(1))

    @property
    def positions(self) -> torch.Tensor:
        """[max_num_reqs, num_queries] int64; the maximum int64 for repeated queries."""
        return self._positions[self.first_request :]

    @property
    def rows(self) -> torch.Tensor:
        """[max_num_reqs, num_queries] int64, into `queries`, of the tokens at `positions`."""
        return self._rows[self.first_request :]

    def queries_by_head(self, layer: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the verification's queries by KV head, and a mask of accepted ones.

        Returns:
            queries: [num_reqs, num_kv_heads, n, head_size] float32.
            is_accepted: [num_reqs, 1, n, 1] bool.
        """
        num_reqs = batch.context_lens.shape[0]
        positions = self.positions[:num_reqs]
        is_accepted = positions < batch.context_lens.unsqueeze(1)
        queries = self.queries[layer, self.rows[:num_reqs]].float()
        queries = queries.masked_fill(~is_accepted[:, :, None, None], 0.0)
        num_kv_heads = self.caches[layer][0].num_kv_heads
        grouped = queries.unflatten(2, (num_kv_heads, -1)).transpose(1, 2)
        counted = is_accepted.repeat_interleave(grouped.shape[3], 1)
        return grouped.flatten(2, 3), counted[:, None, :, None]


class VerificationPolicy(Policy):
    """Selects the pages with the highest `score_pages` by layer, after every `refresh`-th verification.

    Args:
        fields: the speculative configuration (`config.MagicDecFields`).
        verification: recorded queries, and the KV cache and softmax of each layer.
    """

    granularities: ClassVar[tuple[str, ...]] = ("page",)

    def __init__(self, fields: Any, engine: Engine, verification: Verification) -> None:
        self.refresh = fields.draft_kv_refresh or 1  # rounds between selections
        self.engine = engine
        self.verification = verification

    @abstractmethod
    def score_pages(self, batch: Batch, num_pages: int) -> torch.Tensor:
        """Score pages, [num_layers, num_reqs, num_pages] float32; the highest scores are selected.

        Scores of pages that are in view anyway, or beyond a request's last one, are ignored.

        Args:
            batch: the round's requests; their pages are `batch.block_table[:, :num_pages]`.
            num_pages: maximum pages of a request.
        """

    def update(self, batch: Batch, unknown: Mapping[int, int]) -> None:
        """Update the policy's state; called before every round that drafts.

        Args:
            batch: the round's requests; each may have as many new tokens as the verification has queries.
            unknown: the first new token by index of requests with more new tokens: 0 if they start to
                decode or resume, perhaps on other pages; above 0 after steps without drafts.
        """

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Device memory of the policy's state, by purpose."""
        return {}

    @classmethod
    @override
    def parse_budget(cls, fields: Any, limits: Limits, budget: float) -> Budget:
        recent_pages = num_recent_pages(limits.page_size, limits.num_speculative_tokens)
        return parse_budget_of_selected_pages(fields, limits, budget, lambda tokens: recent_pages)

    @classmethod
    @override
    def make_views(cls, fields: Any, engine: Engine, budget: PageBudget) -> Views:
        policy = cls(fields, engine, Verification(engine))
        engine.switch_attention(policy.verification, layer_pages=True)
        selections = engine.make_selections(1, budget.max_selected)
        selector = VerificationSelector(policy, budget, selections)
        return LayerPageViews(selections, selector, budget, engine.make_draft_slots())


def num_recent_pages(page_size: int, num_speculative_tokens: int) -> int:
    """Return the number of pages that recent and drafted tokens may touch; these are always in view."""
    return ceil_div(RECENT_TOKENS + num_speculative_tokens, page_size) + 1


class VerificationSelector(Selector):
    """Selects pages by layer after every `refresh`-th verification, and when a request starts to decode."""

    def __init__(self, policy: VerificationPolicy, budget: Budget, selections: Selections) -> None:
        self._policy = policy
        self._budget = budget
        self._selections = selections
        self._page_size = policy.engine.page_size
        self._known: dict[str, int] = {}  # `Batch.known_lens` of the last round
        self._round = 0

    @property
    @override
    def memory_bytes(self) -> Mapping[str, int]:
        engine = self._policy.engine
        longest = ceil_div(engine.limits.max_model_len, self._page_size)
        scratch = min(SCRATCH_BYTES, engine.max_num_reqs * self._scratch_bytes(longest))
        return {
            "verified queries": self._policy.verification.queries.nbytes,
            "a selection's scratch": scratch if self._budget.max_selected else 0,
            **self._policy.memory_bytes,
        }

    @override
    def update(self, batch: Batch, num_steps: int) -> None:
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
            self._policy.verification.first_request = first
            counts, ends = self._select(part, num_steps)
            known_lens = [int(length) for length in part.known_lens]
            self._selections.set(part.req_ids, known_lens, counts, ends)
        self._policy.verification.first_request = 0

    def _find_unknown(self, batch: Batch) -> dict[int, int]:
        """See `VerificationPolicy.update`."""
        num_queries = self._policy.verification.num_queries
        unknown, known = {}, {}
        for index, req_id in enumerate(batch.req_ids):
            if batch.is_prefilling[index]:
                continue
            length = known[req_id] = int(batch.known_lens[index])
            before = self._known.get(req_id)
            if before is None or batch.is_first[index]:  # new, or resumed, perhaps on other pages
                unknown[index] = 0
            elif length - before > num_queries:
                # The last two rounds' drafts may have been rejected without the host's knowledge.
                unknown[index] = max(0, before - 2 * num_queries)
        self._known = known
        return unknown

    def _select(self, batch: Batch, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill `Selections.positions` of the batch; return `counts` and `ends` for `Selections.set`."""
        num_selected, sinks = self._budget.max_selected, self._budget.num_sinks
        max_model_len = self._policy.engine.limits.max_model_len
        last = (batch.context_lens + num_steps - 1).clamp(max=max_model_len - 1)
        ends = last // self._page_size + 1 - self._budget.num_recent
        num_pages = max(self._num_pages(batch), num_selected)
        pages = torch.arange(num_pages, device=last.device)
        is_fixed = (pages < sinks) | (pages >= ends.unsqueeze(1))
        scores = self._policy.score_pages(batch, num_pages).masked_fill(is_fixed, float("-inf"))
        best = scores.topk(num_selected).indices.to(torch.int32)  # [num_layers, num_reqs, num_selected]
        self._selections.positions[self._selections.rows(batch.req_ids), :, 0] = best.transpose(0, 1)
        ends = ends.clamp(min=0)
        return (ends - sinks).clamp(0, num_selected), ends

    def _scratch_bytes(self, num_pages: int) -> int:
        """Temporary memory of `_select` for a request of `num_pages` pages, in all layers."""
        # Scores, masked scores, and the buffer of `topk`.
        return 3 * 4 * num_pages * self._policy.engine.num_layers

    def _num_pages(self, batch: Batch) -> int:
        """Maximum pages of the batch's requests, as far as the host knows."""
        longest = max(int(length) for length in batch.known_lens)
        return min(ceil_div(longest + 1, self._page_size), batch.block_table.shape[1])
