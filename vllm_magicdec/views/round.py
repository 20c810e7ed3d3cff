# SPDX-License-Identifier: Apache-2.0
"""Types of a draft round: its batch, the passes of the draft, and the views that they read.

A pass takes query tokens of some requests. A draft step is a pass with one query of every request; with
lookups a request has several. Keys are cached with RoPE applied at their true positions, so a view may skip
some and positions stay true.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch

from vllm_magicdec.lookup.history import History


@dataclass(frozen=True)
class Batch:
    """The requests of one round, in the runner's order."""

    req_ids: Sequence[str]
    tokens: torch.Tensor  # [num_reqs], the last sampled token of each request
    block_tables: Sequence[torch.Tensor]  # [num_reqs, max_blocks] int32 each, by KV-cache group
    context_lens: torch.Tensor  # [num_reqs] int64, verified tokens before `tokens` = first drafted position
    # Tokens whose K/V and ids are available, on the device and as the host knows (an upper bound); with
    # asynchronous scheduling they may lag behind `context_lens`.
    observable_lens: torch.Tensor  # [num_reqs] int64
    known_lens: Sequence[int]
    is_prefilling: Sequence[bool]  # the prompt is not complete in the cache: drafts will be dropped
    is_first: Sequence[bool]  # nothing was generated before `tokens`
    kv_cache_group: int = 0  # group of `block_table`
    histories: Sequence[History] = ()  # token histories for lookups
    step: "TargetStep | None" = None  # for a draft with a KV cache of its own

    @property
    def block_table(self) -> torch.Tensor:
        """[num_reqs, max_blocks] int32, the requests' pages in `kv_cache_group`."""
        return self.block_tables[self.kv_cache_group]

    def part(self, first: int, end: int) -> "Batch":
        """Return the requests from `first` up to `end`."""
        requests = {name: values[first:end] for name, values in vars(self).items() if name not in _WHOLE}
        tables = [table[first:end] for table in self.block_tables]
        return replace(self, **requests, block_tables=tables, step=None)


# Fields of `Batch` without one entry per request.
_WHOLE = ("block_tables", "kv_cache_group", "step")


@dataclass(frozen=True)
class TargetStep:
    """The target's step before a round, with what the host knows of its result."""

    ends: np.ndarray  # [num_reqs] int64, verified tokens after it, at most
    num_tokens: np.ndarray  # [num_reqs] int64, how many of them the step has added, at most
    num_unsure: np.ndarray  # [num_reqs] int64, how many of them the target may have rejected
    has_prompt: np.ndarray  # [num_reqs] bool, they belong to a prompt
    seq_lens: torch.Tensor  # [num_reqs] int32 on the device, tokens after it, with rejected ones
    query_starts: torch.Tensor  # [num_reqs + 1] int32 on the device, cumulative numbers of its tokens

    @cached_property
    def starts(self) -> torch.Tensor:
        """[num_reqs] int64 on the device, position of the step's first token."""
        return self.seq_lens.long() - self.query_starts.long().diff()


@dataclass(frozen=True)
class Queries:
    """The query tokens of a pass, concatenated by request, as the host knows them."""

    requests: np.ndarray  # [num_running] int64, indices in the batch
    # [num_running] int64, the round's step of each request's first query; -1: the last verified token,
    # whose K/V the draft's cache lacks.
    firsts: np.ndarray
    lens: np.ndarray  # [num_running] int64, queries of each request; at least 1
    uniform_len: int | None = None  # set by `uniform`

    @classmethod
    @lru_cache(maxsize=256)  # every draft step has some
    def uniform(cls, num_reqs: int, first: int, length: int = 1) -> "Queries":
        """Return `length` queries from step `first` on of every request of the batch."""
        requests = np.arange(num_reqs)
        return cls(requests, np.full_like(requests, first), np.full_like(requests, length), length)

    @property
    def first_sampled(self) -> int:
        """The round's step of the first request's first sampled token."""
        return max(0, int(self.firsts[0]))

    @property
    def num_sampled(self) -> int:
        """Tokens sampled for the first request."""
        return int(self.lasts[0]) - self.first_sampled + 1

    @cached_property
    def has_verified(self) -> bool:
        """Whether some queries are verified tokens, after which nothing is sampled."""
        return bool(self.firsts.min() < 0)

    @cached_property
    def max_len(self) -> int:
        """Most queries of a request."""
        return int(self.lens.max())

    @cached_property
    def request_indices(self) -> np.ndarray:
        """[num_tokens] int64, the index in the batch of each query's request."""
        return self.requests.repeat(self.lens)

    @cached_property
    def steps(self) -> np.ndarray:
        """[num_tokens] int64, the round's step of each query."""
        return self.firsts.repeat(self.lens) + self._within

    @cached_property
    def lasts(self) -> np.ndarray:
        """[num_running] int64, the round's step of each request's last query."""
        return self.firsts + self.lens - 1

    @cached_property
    def starts(self) -> np.ndarray:
        """[num_running + 1] int32, cumulative numbers of queries, as vLLM's `query_start_loc`."""
        return np.concatenate([[0], self.lens.cumsum()]).astype(np.int32)

    @cached_property
    def sampled(self) -> np.ndarray:
        """Indices of the queries after which a token is sampled, int64: those of steps from 0 on."""
        return np.flatnonzero(self.steps >= 0)

    @cached_property
    def table(self) -> np.ndarray:
        """[num_running, max_len] int64, query indices by request, padded with its last one."""
        within = np.minimum(np.arange(self.max_len), self.lens[:, None] - 1)
        return self.starts[:-1, None].astype(np.int64) + within

    @cached_property
    def cells(self) -> np.ndarray:
        """[num_tokens] int64, the flat index of each query in `table`."""
        return np.arange(len(self.lens)).repeat(self.lens) * self.max_len + self._within

    @cached_property
    def _within(self) -> np.ndarray:
        """[num_tokens] int64, the index of each query within its request."""
        return np.arange(self.lens.sum()) - self.starts[:-1].repeat(self.lens)


@dataclass(frozen=True)
class PageView:
    """The same pages for all layers and heads; a pass's queries attend causally among themselves."""

    lens: torch.Tensor  # [num_running] int32, K/V entries in view of each request's last query, its own too
    block_table: torch.Tensor  # [num_running, max_pages] int32
    max_len: int  # upper bound of `lens`

    def of_layer(self, index: int) -> "PageView":
        """Return the view of one layer."""
        return self

    def of_requests(self, requests: torch.Tensor, lens: torch.Tensor) -> "PageView":
        """Return the view of some requests, [n] int64, that see `lens` [n] int32 entries."""
        return replace(self, lens=lens, block_table=self.block_table[requests])


@dataclass(frozen=True)
class LayerPageView:
    """Pages by layer."""

    lens: torch.Tensor  # [num_running] int32, as in `PageView`
    block_tables: torch.Tensor  # [num_layers, num_running, max_pages] int32
    max_len: int

    def of_layer(self, index: int) -> PageView:
        """Return the view of one layer."""
        return PageView(self.lens, self.block_tables[index], self.max_len)

    def of_requests(self, requests: torch.Tensor, lens: torch.Tensor) -> "LayerPageView":
        """See `PageView.of_requests`."""
        return replace(self, lens=lens, block_tables=self.block_tables[:, requests])


@dataclass(frozen=True)
class TokenMask:
    """Which of a token view's slots each query of a pass sees."""

    is_seen: torch.Tensor  # [num_running, max_len, width] bool, by the queries of `table`
    table: torch.Tensor  # [num_running, max_len] int64, see `Queries`
    cells: torch.Tensor  # [num_tokens] int64, see `Queries`


@dataclass(frozen=True)
class TokenView:
    """A list of slots for every layer and KV head, valid until the round's next pass."""

    lens: torch.Tensor  # [num_running] int32, valid columns of `slots`
    slots: torch.Tensor  # [num_layers, num_running, num_kv_heads, width] int32
    common_len: int | None = None  # the value of all `lens` in all steps of the round, if known on the host
    mask: TokenMask | None = None  # None: one query per request, which sees all valid columns


View = PageView | LayerPageView | TokenView


@dataclass(frozen=True)
class Part:
    """Input of a pass in the layers of one group."""

    positions: torch.Tensor  # [num_tokens] int64, true positions of the queries
    slots: torch.Tensor  # [num_tokens] int64, where their K/V goes, or PAD_SLOT
    view: View


@dataclass(frozen=True)
class Pass:
    """Input of a pass in all layers."""

    tokens: torch.Tensor  # [num_tokens] int32, the queries
    queries: Queries
    parts: Sequence[Part]  # by group of layers
    is_weighed: bool = False  # return the probabilities of the sampled tokens
    is_padding: torch.Tensor | None = None  # [num_tokens] bool, queries that only pad a CUDA graph

    @property
    def positions(self) -> torch.Tensor:
        """[num_tokens] int64, true positions of the queries."""
        return self.parts[0].positions


class Sampled(NamedTuple):
    """Result of a pass: a token after every query of `Queries.sampled`."""

    tokens: torch.Tensor  # [num_sampled] int32 or int64, valid until the next round
    probabilities: torch.Tensor | None = None  # [num_sampled] float32, if the pass asks for them


class Selector(Protocol):
    """The part of a policy that runs every round and updates the selections."""

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Device memory in addition to the selections, by purpose."""

    def update(self, batch: Batch, num_steps: int) -> None:
        """Select for the requests of a round that are due; all have rows, and `num_steps` drafts each."""


class RoundView(Protocol):
    """What the layers of one group see in a round, step by step or by passes of several steps."""

    def step(self, index: int) -> Part:
        """Return the input of a step; steps are taken in order."""

    def take(self, queries: Queries) -> Part:
        """Return the input of a pass. Not to be called after `step`.

        Args:
            queries: within the model's length. K/V of the steps before a request's first is cached.
        """


@dataclass(frozen=True)
class Round:
    """A round's passes, over the prepared view of each group of layers."""

    views: Sequence[RoundView]
    extend: Callable[[Pass], Pass] = lambda draft_pass: draft_pass  # `drafting.ports.Cache.extend`

    def step(self, index: int, tokens: torch.Tensor) -> Pass:
        """Return the pass of a step over the last tokens of all requests, [num_reqs]; in order."""
        parts = [view.step(index) for view in self.views]
        return self.extend(Pass(tokens.to(torch.int32), Queries.uniform(len(tokens), index), parts))

    def take(self, queries: Queries, tokens: torch.Tensor, *, is_weighed: bool = False) -> Pass:
        """Return a pass over `tokens` [num_tokens] int32. Not to be called after `step`."""
        return self.extend(Pass(tokens, queries, [view.take(queries) for view in self.views], is_weighed))


class Views(Protocol):
    """Prepares the views of each round, in buffers that live as long as the engine."""

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Device memory of the views, by purpose."""

    @property
    def common_lens(self) -> Sequence[int | None]:
        """Values of `TokenView.common_len`, including None, for which a draft step runs other kernels."""

    def prepare(self, batch: Batch, num_steps: int) -> RoundView:
        """Prepare a round of `num_steps` drafts for each request. No host synchronisation."""

    def capture_view(self, num_reqs: int, lens: torch.Tensor, common_len: int | None) -> View:
        """Return the view that the buffers hold, for a CUDA graph to read.

        Args:
            num_reqs: at most `max_num_seqs`; requests that the round lacks see data of an earlier round.
            lens: [num_reqs] int32, entries in view.
            common_len: one of `common_lens`.
        """
