# SPDX-License-Identifier: Apache-2.0
"""The base of policies that score tokens by the attention of a prompt's last tokens.

The target may have computed these queries in several chunks or, on a prefix-cache hit, not at all. So they
are recomputed when the prompt is complete, by a forward pass of the target over the request's last tokens
that only reads the KV cache. On a CPU, where such a pass costs several decode steps, queries of the
target's own pass are recorded.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad
from typing_extensions import override

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.observing import LayerObserver, QueryRecorder
from vllm_magicdec.attention.scales import Scales
from vllm_magicdec.attention.softmax import Softmax, weights_of
from vllm_magicdec.policies.base import Engine, Limits, Policy, parse_budget_of_selected_pages
from vllm_magicdec.views.layer_pages import LayerPageViews
from vllm_magicdec.views.round import Batch, Views
from vllm_magicdec.views.selections import Budget, Selections
from vllm_magicdec.views.tensors import ceil_div, on_device
from vllm_magicdec.views.tokens import TokenBudget, TokenViews, recent_tokens


@dataclass(frozen=True)
class Observation:
    """The queries of one request's latest tokens and its keys, in one layer."""

    queries: torch.Tensor  # [window, num_heads, head_size], of the last `window` tokens, oldest first
    cache: KVRows
    blocks: torch.Tensor  # [n] int, the request's pages
    page_size: int  # tokens
    length: torch.Tensor  # [] int64, valid keys; the last query is at position length - 1
    num_seen: int  # keys from the start that every query sees; a lower bound known to the host
    softmax: Softmax

    @cached_property
    def keys(self) -> torch.Tensor:
        """[num_kv_heads, num_tokens, head_size], by position, as they are stored."""
        return self.cache.keys_by_page(self.blocks, self.page_size).transpose(0, 1).flatten(1, 2)

    @property
    def window(self) -> int:
        """Number of queries."""
        return self.queries.shape[0]

    def weights(self) -> torch.Tensor:
        """Return the attention weight of each token, [num_kv_heads, num_tokens] float32.

        Weights are the softmax over the whole context, causal in the window, summed over the window's
        queries and the query heads of each KV head. They are 0 at invalid positions.
        """
        by_kernel = self._weights_by_kernel()
        return self._weights_by_torch() if by_kernel is None else by_kernel

    def _weights_by_kernel(self) -> torch.Tensor | None:
        # The kernel reads the cache's own blocks.
        if self.cache.weigh is None or self.page_size != self.cache.page_size:
            return None
        length = int(self.length)
        weights = self.cache.weigh(self.queries, self.blocks, length, self.softmax)
        return None if weights is None else pad(weights, (0, len(self.blocks) * self.page_size - length))

    def _weights_by_torch(self) -> torch.Tensor:
        window, first, keys = self.window, self.num_seen, self.keys
        num_kv_heads, num_tokens, size = keys.shape
        positions = torch.arange(num_tokens, device=keys.device)
        own = self.length - window + torch.arange(window, device=positions.device)
        hidden = positions[first:] > own.unsqueeze(1)  # [window, num_tokens - first]
        # [num_kv_heads, group, window, size], in the cache's dtype: in float32 the product would be slow
        queries = self.queries.view(window, num_kv_heads, -1, size).permute(1, 2, 0, 3)
        # Scaled first: float16 ends at 65,504.
        queries = (queries.float() * self.softmax.scale).to(keys.dtype)
        sinks = self.softmax.sinks_by_kv_head(num_kv_heads)
        weights = torch.empty((num_kv_heads, num_tokens), device=keys.device)
        # Head by head: all heads at once would need heads x window x tokens floats.
        for head in range(num_kv_heads):
            product = queries[head].flatten(0, 1) @ keys[head].T
            logits = self.softmax.capped(product.float()).unflatten(0, (-1, window))
            logits[..., first:].masked_fill_(hidden, float("-inf"))
            own_sinks = None if sinks is None else sinks[head, :, None, None]
            weights[head] = weights_of(logits, own_sinks).sum((0, 1))
        return weights


class TokenPolicy(Policy):
    """Scores tokens per layer and KV head when a prompt ends, and again every `refresh` tokens.

    Sinks and recent tokens are always in view; scores select among the others. By page, a page's score is
    the sum over its tokens and over heads, and every layer sees its best pages.

    Args:
        fields: the speculative configuration (`config.MagicDecFields`).
    """

    granularities = ("token", "page")

    window: int  # latest tokens whose queries are observed; they stay in view
    recent: float = 0.0  # latest tokens that stay in view, see `views.tokens.recent_tokens`
    refresh: int  # generated tokens between selections; 0: select once

    def __init__(self, fields: Any) -> None:
        self.refresh = fields.draft_kv_refresh or 0

    @abstractmethod
    def score(self, observation: Observation) -> torch.Tensor:
        """Score tokens, [num_kv_heads, num_tokens] float32; the highest scores are selected.

        Scores of positions that are in view anyway, or not valid, are ignored.
        """

    def scratch_bytes(self, engine: Engine) -> int:
        """Return the bytes of temporary memory for scoring the longest request in a layer.

        It is the peak of two phases: two copies of the keys while they are reordered; then the keys, logits
        of one KV head and scores of all, three float32 tensors of each. The CPU kernel needs only logits.
        """
        num_tokens = ceil_div(engine.limits.max_model_len, engine.page_size) * engine.page_size
        num_rows = self.window * engine.num_heads // engine.num_kv_heads
        keys = num_tokens * engine.num_kv_heads * engine.head_size * engine.cache_dtype.itemsize
        scoring = 4 * num_tokens * (3 * num_rows + 3 * engine.num_kv_heads)
        by_kernel = 4 * num_tokens * self.window * engine.num_heads
        is_cpu = engine.limits.device_type == "cpu"
        return max(keys + max(keys, scoring), by_kernel if is_cpu else 0)

    @classmethod
    @override
    def parse_budget(cls, fields: Any, limits: Limits, budget: float) -> Budget:
        policy, gamma = cls(fields), limits.num_speculative_tokens
        if cls.granularity(fields, limits.device_type) == "token":
            return TokenBudget.from_fields(
                budget=budget,
                min_budget=fields.draft_kv_min_budget,
                sink=fields.draft_kv_sink,
                window=policy.window,
                recent=policy.recent,
                num_speculative_tokens=gamma,
                max_model_len=limits.max_model_len,
            )
        window = max(policy.window, gamma)

        def recent_pages(tokens: int) -> int:
            recent = recent_tokens(tokens - fields.draft_kv_sink, window, policy.recent, budget=tokens)
            # The window may start anywhere in a page, so it may touch one page more.
            return max(ceil_div(recent, limits.page_size), ceil_div(window - 1, limits.page_size) + 1)

        return parse_budget_of_selected_pages(
            fields, limits, budget, recent_pages, by_token="token" in cls.granularities
        )

    @classmethod
    @override
    def make_views(cls, fields: Any, engine: Engine, budget: Any) -> Views:
        by_page = cls.granularity(fields, engine.limits.device_type) == "page"
        selections = engine.make_selections(1 if by_page else engine.num_kv_heads, budget.max_selected)
        policy = cls(fields)
        is_cpu = engine.limits.device_type == "cpu"
        recorder = WindowRecorder(policy.window, engine.query_dtype) if is_cpu else None
        selector = PromptSelector(policy, engine, budget, selections, recorder)
        plans = engine.switch_attention(recorder, layer_pages=by_page)
        if by_page:
            return LayerPageViews(selections, selector, budget, engine.make_draft_slots())
        return TokenViews(selections, selector, budget, engine.make_draft_slots(), plans)


class WindowRecorder(QueryRecorder):
    """Records the last `window` queries of each request that has as many in the target's latest pass.

    It reads lengths on the host. `dtype` is that of the model's queries.
    """

    def __init__(self, window: int, dtype: torch.dtype) -> None:
        self._window = window
        self._dtype = dtype
        self._rows: dict[int, torch.Tensor] = {}  # [window] of the pass's queries, by index in the batch
        self._lens: dict[int, int] = {}  # tokens of these requests, by index in the batch
        self._layers: dict[int, tuple[dict[int, torch.Tensor], KVRows, Softmax]] = {}

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
            self._begin(metadata)
        if self._rows:
            kept = {i: scales.scale_query(queries[rows], self._dtype) for i, rows in self._rows.items()}
            self._layers[layer] = (kept, cache, softmax)

    def _begin(self, metadata: Any) -> None:
        self._layers.clear()
        self._rows.clear()
        self._lens.clear()
        if metadata.max_query_len < self._window:
            return
        starts, lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for index, ((start, end), length) in enumerate(zip(pairwise(starts), lens, strict=False)):
            if end - start >= self._window:
                self._rows[index] = torch.arange(end - self._window, end)
                self._lens[index] = length

    def holds(self, index: int, length: int) -> bool:
        """Whether the queries before `length` of the request at `index` are recorded."""
        return self._lens.get(index) == length

    def show(self, indices: Sequence[int], observer: LayerObserver) -> None:
        """Pass recorded requests to the observer, as `drafting.ports.Target.observe` does."""
        for layer, (kept, cache, softmax) in self._layers.items():
            observer(layer, torch.cat([kept[index] for index in indices]), cache, softmax)


class PromptSelector:
    """Updates the selections of a batch.

    Args:
        budget: budget of a request, in the entries of `selections`.
        recorder: recorder of the target's own passes, if any.
    """

    def __init__(
        self,
        policy: TokenPolicy,
        engine: Engine,
        budget: Budget,
        selections: Selections,
        recorder: WindowRecorder | None,
    ) -> None:
        self._policy = policy
        self._budget = budget
        # Nothing has to be scored if all eligible entries fit.
        self._room = max(0, budget.min_entries - budget.num_sinks - budget.num_recent)
        self._selections = selections
        self._observe = engine.observe
        self._recorder = recorder
        self._page_size = engine.page_size
        # The last two rounds' drafts may have been rejected without the host's knowledge.
        self._unseen = policy.window + 2 * engine.limits.num_speculative_tokens
        self._max_reqs_per_pass = max(1, engine.max_batched_tokens // policy.window)
        self.memory_bytes: Mapping[str, int] = {"a selection's scratch": policy.scratch_bytes(engine)}
        self._num_drafted = 0  # tokens of this round that count as recent

    def update(self, batch: Batch, num_steps: int) -> None:
        """Select for the requests that are due; launch nothing if none is. No host synchronisation."""
        # By page, drafted tokens' pages are recent; by token, each drafted token replaces a recent one.
        self._num_drafted = num_steps if self._budget.unit > 1 else 0
        due = [index for index in range(len(batch.req_ids)) if self._is_due(batch, index)]
        if not due:
            return
        num_sinks = self._budget.num_sinks
        scored = [i for i in due if self._end(int(batch.known_lens[i])) - num_sinks > self._room]
        self._score(batch, scored)
        self._select_all(batch, [i for i in due if i not in set(scored)])
        lens, budget = batch.observable_lens[on_device(due, batch.observable_lens.device)], self._budget
        ends = self._end(lens).clamp(min=0)
        room = budget.entries(lens) - budget.num_sinks - budget.num_recent
        counts = torch.minimum(ends - budget.num_sinks, room).clamp(min=0)
        self._selections.set(
            [batch.req_ids[i] for i in due], [int(batch.known_lens[i]) for i in due], counts, ends
        )

    def _score(self, batch: Batch, indices: Sequence[int]) -> None:
        """Let the policy score these requests' tokens in all layers."""
        recorder = self._recorder
        seen = [
            i for i in indices if recorder is not None and recorder.holds(i, int(batch.observable_lens[i]))
        ]
        if recorder is not None and seen:
            recorder.show(seen, self._score_layer(batch, seen))
        unseen = [index for index in indices if index not in seen]
        for first in range(0, len(unseen), self._max_reqs_per_pass):
            part = unseen[first : first + self._max_reqs_per_pass]
            self._observe(part, self._policy.window, self._score_layer(batch, part))

    def _is_due(self, batch: Batch, index: int) -> bool:
        if batch.is_prefilling[index]:
            return False
        selected_at = self._selections.selected_at(batch.req_ids[index])
        if selected_at is None or batch.is_first[index]:
            return True
        return 0 < self._policy.refresh <= batch.known_lens[index] - selected_at

    def _end(self, length: Any) -> Any:
        """Return the first entry after those to select from; `length` in tokens is an int or a tensor."""
        unit = self._budget.unit
        return (length + self._num_drafted + unit - 1) // unit - self._budget.num_recent

    def _select_all(self, batch: Batch, indices: Sequence[int]) -> None:
        if indices:
            rows = self._selections.rows([batch.req_ids[i] for i in indices])
            num_selected = self._selections.positions.shape[-1]
            everything = self._budget.num_sinks + torch.arange(num_selected, device=rows.device)
            self._selections.positions[rows] = everything.to(torch.int32)

    def _score_layer(self, batch: Batch, indices: Sequence[int]) -> LayerObserver:
        window = self._policy.window

        def score(layer: int, queries: torch.Tensor, cache: KVRows, softmax: Softmax) -> None:
            for row, index in enumerate(indices):
                num_pages = ceil_div(int(batch.known_lens[index]), self._page_size)
                observation = Observation(
                    queries[row * window : (row + 1) * window],
                    cache,
                    batch.block_table[index, :num_pages],
                    self._page_size,
                    length=batch.observable_lens[index],
                    num_seen=max(0, int(batch.known_lens[index]) - self._unseen),
                    softmax=softmax,
                )
                selected = self._selections.positions[self._selections.row(batch.req_ids[index]), layer]
                self._select_best(selected, self._policy.score(observation), observation.length)

        return score

    def _select_best(self, selected: torch.Tensor, scores: torch.Tensor, length: torch.Tensor) -> None:
        """Write `selected` from `scores` [num_kv_heads, num_tokens], of `length` valid tokens."""
        entries = torch.arange(scores.shape[-1], device=scores.device)
        if self._budget.unit > 1:
            scores = scores.masked_fill(entries >= length, 0.0)
            scores = scores.unflatten(-1, (-1, self._budget.unit)).sum((0, 2)).unsqueeze(0)
            entries = entries[: scores.shape[-1]]
        is_fixed = (entries < self._budget.num_sinks) | (entries >= self._end(length))
        scores = scores.masked_fill(is_fixed, float("-inf"))
        count = min(selected.shape[-1], scores.shape[-1])
        selected[:, :count] = scores.topk(count).indices.to(torch.int32)
