# SPDX-License-Identifier: Apache-2.0
"""Policies that choose by what a prompt's last tokens attend to, and when and how they get to.

The queries that a policy scores may have been computed in several chunks or, on a prefix-cache hit, not at
all. So they are computed again when the prompt is whole: one forward pass of the target over the request's
last tokens, which reads the KV cache and writes nothing. On a CPU, where that pass costs several decode
steps and lengths can be read for nothing, those that the target's own pass has just computed are kept.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.observing import LayerObserver
from vllm_magicdec.attention.rows import WeighTokens
from vllm_magicdec.attention.scales import Scales
from vllm_magicdec.attention.softmax import Softmax, weights_of
from vllm_magicdec.policies.base import Engine, Limits, Observe, Policy, parse_budget_of_selected_pages
from vllm_magicdec.views.base import Batch, Views, ceil_div, on_device
from vllm_magicdec.views.layer_pages import LayerPageViews
from vllm_magicdec.views.selections import Budget, Selections
from vllm_magicdec.views.tokens import TokenBudget, TokenViews, recent_tokens


@dataclass(frozen=True)
class Observation:
    """What one request's latest tokens ask for, in one layer."""

    queries: torch.Tensor  # [window, num_heads, head_size], of the last `window` tokens, oldest first
    read_keys: Callable[[], torch.Tensor]  # see `keys`
    length: torch.Tensor  # [] int64, valid keys; the last query is at position length - 1
    num_seen: int  # keys from the start that every query sees; the host does not know of more
    scale: float  # of the logits, with that of an fp8 cache's keys
    soft_cap: float  # of the logits, 0: none
    sinks: torch.Tensor | None = None  # [num_kv_heads, group] float32, logits of the denominator alone
    weigh: Callable[[], torch.Tensor | None] | None = None  # `weights` by a kernel, where there is one

    @cached_property
    def keys(self) -> torch.Tensor:
        """[num_kv_heads, num_tokens, head_size], position by position, as they are stored."""
        return self.read_keys()

    @property
    def window(self) -> int:
        """Queries."""
        return self.queries.shape[0]

    def weights(self) -> torch.Tensor:
        """What each token weighs, [num_kv_heads, num_tokens] float32.

        That is the softmax over the whole context, causal in the window, summed over the window's queries
        and the query heads of each KV head. Of positions that are not valid it is 0.
        """
        by_kernel = None if self.weigh is None else self.weigh()
        return self._weights_by_torch() if by_kernel is None else by_kernel

    def _weights_by_torch(self) -> torch.Tensor:
        window, first, keys = self.window, self.num_seen, self.keys
        num_kv_heads, num_tokens, size = keys.shape
        places = torch.arange(num_tokens, device=keys.device)
        own = self.length - window + torch.arange(window, device=places.device)
        hidden = places[first:] > own.unsqueeze(1)  # [window, num_tokens - first]
        # [num_kv_heads, group, window, size], in the cache's dtype: in float32 the product would be slow
        queries = self.queries.view(window, num_kv_heads, -1, size).permute(1, 2, 0, 3)
        # Scaled first: float16 ends at 65,504.
        queries = (queries.float() * self.scale).to(keys.dtype)
        weights = torch.empty((num_kv_heads, num_tokens), device=places.device)
        # Head by head: all heads at once would need heads x window x tokens floats.
        for head in range(num_kv_heads):
            product = queries[head].flatten(0, 1) @ keys[head].T
            logits = product.float().unflatten(0, (-1, window))
            if self.soft_cap:
                logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
            logits[..., first:].masked_fill_(hidden, float("-inf"))
            sinks = None if self.sinks is None else self.sinks[head, :, None, None]
            weights[head] = weights_of(logits, sinks).sum((0, 1))
        return weights


class TokenPolicy(Policy):
    """Scores tokens per layer and KV head when a prompt ends, and again every `refresh` tokens.

    Sinks and recent tokens are always in view; the policy chooses among those between. By page, a page's
    score is the sum over its tokens and over heads, and every layer sees its best pages.

    Args:
        fields: the speculative configuration (`config.MagicDecFields`).
    """

    granularities = ("token", "page")

    window: int  # latest tokens whose queries it wants to see; they stay in view
    recent: float = 0.0  # latest tokens that stay in view, see `views.tokens.recent_tokens`
    refresh: int  # generated tokens after which it chooses again; 0: never

    def __init__(self, fields: Any) -> None:
        self.refresh = fields.draft_kv_refresh or 0

    @abstractmethod
    def score(self, observation: Observation) -> torch.Tensor:
        """How much the draft needs each token, [num_kv_heads, num_tokens] float32; the highest are taken.

        Scores of positions that are in view anyway, or not valid, are ignored.
        """

    def scratch_bytes(self, engine: Engine) -> int:
        """Device memory that scoring the longest request takes for the time being.

        Of one layer: keys, twice while they are put in order, then the logits of a KV head's queries, and
        scores of all heads. A CPU's kernel keeps the logits of the heads that it computes at a time.
        """
        num_tokens = ceil_div(engine.limits.max_model_len, engine.page_size) * engine.page_size
        num_rows = self.window * engine.num_heads // engine.num_kv_heads
        keys = num_tokens * engine.num_kv_heads * engine.head_size * engine.cache_dtype.itemsize
        scoring = 4 * num_tokens * (3 * num_rows + 3 * engine.num_kv_heads)
        by_kernel = 4 * num_tokens * self.window * engine.num_heads
        is_cpu = engine.limits.device_type == "cpu"
        return max(keys + max(keys, scoring), by_kernel if is_cpu else 0)

    @classmethod
    def reads_generated_tokens(cls, fields: Any) -> bool:
        """See `Policy`."""
        return cls(fields).refresh > 0

    @classmethod
    def parse_budget(cls, fields: Any, limits: Limits, budget: float) -> Budget:
        """See `Policy`."""
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
    def make_views(cls, fields: Any, engine: Engine, budget: Any) -> Views:
        """See `Policy`."""
        by_page = cls.granularity(fields, engine.limits.device_type) == "page"
        selections = Selections(
            num_layers=engine.num_layers,
            num_heads=1 if by_page else engine.num_kv_heads,
            max_num_reqs=engine.max_num_reqs,
            max_selected=budget.max_selected,
            device=engine.device,
        )
        policy = cls(fields)
        is_cpu = engine.limits.device_type == "cpu"
        recorder = WindowRecorder(policy.window, engine.query_dtype) if is_cpu else None
        selector = PromptSelector(
            policy,
            budget,
            selections,
            engine.observe,
            recorder,
            page_size=engine.page_size,
            max_batched_tokens=engine.max_batched_tokens,
            num_speculative_tokens=engine.limits.num_speculative_tokens,
            scratch_bytes=policy.scratch_bytes(engine),
        )
        plans = engine.switch_attention(recorder, layer_pages=by_page)
        if by_page:
            return LayerPageViews(selections, selector, budget, engine.make_draft_slots())
        return TokenViews(selections, selector, budget, engine.make_draft_slots(), plans)


class WindowRecorder:
    """The last queries of those requests of which the target's latest pass has computed enough.

    It reads lengths on the host.

    Args:
        window: last tokens of a request whose queries are wanted.
        dtype: of the model's queries.
    """

    def __init__(self, window: int, dtype: torch.dtype) -> None:
        self._window = window
        self._dtype = dtype
        self._rows: dict[int, torch.Tensor] = {}  # [window] of the pass's queries, by place in the batch
        self._lens: dict[int, int] = {}  # tokens of these requests, by place in the batch
        self._layers: dict[int, tuple[dict[int, torch.Tensor], KVRows, Softmax]] = {}

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
        """Whether the queries of the last tokens before `length` are there, of the request at `index`."""
        return self._lens.get(index) == length

    def show(self, indices: Sequence[int], observer: LayerObserver) -> None:
        """What `drafting.drafter.Runner.observe` shows, of requests that are held."""
        for layer, (kept, cache, softmax) in self._layers.items():
            observer(layer, torch.cat([kept[index] for index in indices]), cache, softmax)


class PromptSelector:
    """Keeps the selections of a batch up to date.

    Args:
        policy: scores tokens.
        budget: of a request, in the entries of `selections`.
        selections: where choices are kept.
        observe: runs the target over last tokens.
        recorder: may have seen them in the target's own pass; None: nobody looked.
        page_size: tokens per page of the block tables.
        max_batched_tokens: most query tokens of one forward pass.
        num_speculative_tokens: most drafts of a round.
        scratch_bytes: what scoring takes for the time being, at most.
    """

    def __init__(
        self,
        policy: TokenPolicy,
        budget: Budget,
        selections: Selections,
        observe: Observe,
        recorder: WindowRecorder | None = None,
        *,
        page_size: int,
        max_batched_tokens: int,
        num_speculative_tokens: int,
        scratch_bytes: int = 0,
    ) -> None:
        self._policy = policy
        self._budget = budget
        # Where all that could be chosen fits into the budget, nothing has to be scored.
        self._room = max(0, budget.min_entries - budget.num_sinks - budget.num_recent)
        self._selections = selections
        self._observe = observe
        self._recorder = recorder
        self._page_size = page_size
        # Of what the host knows of, the last two rounds' drafts may have been rejected.
        self._unseen = policy.window + 2 * num_speculative_tokens
        self._max_reqs_per_pass = max(1, max_batched_tokens // policy.window)
        self.memory_bytes: Mapping[str, int] = {"a selection's scratch": scratch_bytes}
        self._num_drafted = 0  # tokens of this round that count as recent

    def update(self, batch: Batch, num_steps: int) -> None:
        """Select for the requests of the batch that are due. Launches nothing when none is.

        No host synchronisation: prompts end all the time, and everybody's step would wait.
        """
        self._selections.begin_round(batch.req_ids)
        # Pages of the drafted tokens are recent ones; single tokens make room in the view as they come.
        self._num_drafted = num_steps if self._budget.unit > 1 else 0
        due = [index for index in range(len(batch.req_ids)) if self._is_due(batch, index)]
        if not due:
            return
        crowded = [i for i in due if self._num_eligible(int(batch.known_lens[i])) > self._room]
        self._score(batch, crowded)
        self._take_everything(batch, [i for i in due if i not in set(crowded)])
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
        made_at = self._selections.made_at(batch.req_ids[index])
        if made_at is None or batch.is_first[index]:
            return True
        return 0 < self._policy.refresh <= batch.known_lens[index] - made_at

    def _end(self, length: Any) -> Any:
        """The first entry that is not chosen from: a number or a tensor of them, as `length` in tokens."""
        unit = self._budget.unit
        return (length + self._num_drafted + unit - 1) // unit - self._budget.num_recent

    def _num_eligible(self, length: int) -> int:
        return max(0, self._end(length) - self._budget.num_sinks)

    def _take_everything(self, batch: Batch, indices: Sequence[int]) -> None:
        if indices:
            rows = self._selections.rows([batch.req_ids[i] for i in indices])
            num_selected = self._selections.positions.shape[-1]
            everything = self._budget.num_sinks + torch.arange(num_selected, device=rows.device)
            self._selections.positions[rows] = everything.to(torch.int32)

    def _score_layer(self, batch: Batch, indices: Sequence[int]) -> LayerObserver:
        window = self._policy.window

        def score(layer: int, queries: torch.Tensor, cache: KVRows, softmax: Softmax) -> None:
            for place, index in enumerate(indices):
                num_pages = ceil_div(int(batch.known_lens[index]), self._page_size)
                observation = observe_request(
                    queries[place * window : (place + 1) * window],
                    cache,
                    batch.block_table[index, :num_pages],
                    self._page_size,
                    length=batch.observable_lens[index],
                    num_seen=max(0, int(batch.known_lens[index]) - self._unseen),
                    softmax=softmax,
                )
                scores = self._policy.score(observation)
                row = self._selections.row(batch.req_ids[index])
                self._keep_best(row, layer, scores, observation.length)

        return score

    def _keep_best(self, row: int, layer: int, scores: torch.Tensor, length: torch.Tensor) -> None:
        """Select in one layer from `scores` [num_kv_heads, num_tokens], of `length` valid tokens."""
        places = torch.arange(scores.shape[-1], device=scores.device)
        if self._budget.unit > 1:
            scores = scores.masked_fill(places >= length, 0.0)
            scores = scores.unflatten(-1, (-1, self._budget.unit)).sum((0, 2)).unsqueeze(0)
            places = places[: scores.shape[-1]]
        is_fixed = (places < self._budget.num_sinks) | (places >= self._end(length))
        scores = scores.masked_fill(is_fixed, float("-inf"))
        selected = self._selections.positions[row, layer]
        count = min(selected.shape[-1], scores.shape[-1])
        selected[:, :count] = scores.topk(count).indices.to(torch.int32)


def observe_request(
    queries: torch.Tensor,
    cache: KVRows,
    blocks: torch.Tensor,
    page_size: int,
    *,
    length: torch.Tensor,
    num_seen: int,
    softmax: Softmax,
) -> Observation:
    """Of a request with so many `blocks` [n] int; the rest as in `Observation`."""

    def weigh(by_kernel: WeighTokens) -> torch.Tensor | None:
        own_length = int(length)
        weights = by_kernel(queries, blocks, own_length, softmax)
        return weights if weights is None else pad(weights, (0, len(blocks) * page_size - own_length))

    is_own_page = page_size == cache.page_size  # a kernel takes the cache's own blocks
    return Observation(
        queries=queries,
        read_keys=lambda: cache.keys_by_page(blocks, page_size).transpose(0, 1).flatten(1, 2),
        length=length,
        num_seen=num_seen,
        scale=softmax.scale,
        soft_cap=softmax.soft_cap,
        sinks=softmax.sinks_by_kv_head(cache.num_kv_heads),
        weigh=partial(weigh, cache.weigh) if cache.weigh is not None and is_own_page else None,
    )
