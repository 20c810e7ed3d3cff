# SPDX-License-Identifier: Apache-2.0
"""A round's steps, run one by one or by passes over several steps of each request.

A page view ends with the round's drafted tokens in order, and each step sees one entry more than the step
before, so causal attention among a pass's tokens is exact. Token views need a mask: `token_steps.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from typing_extensions import override

from vllm_magicdec.views.base import DraftSlots, LayerPageView, PageView, View, ViewStep, on_device


@dataclass(frozen=True)
class Queries:
    """The query tokens of a pass, concatenated by request."""

    requests: np.ndarray  # [num_running] int64, indices in the batch
    firsts: np.ndarray  # [num_running] int64, the round's step of each request's first token
    lens: np.ndarray  # [num_running] int64, tokens of each request; at least 1

    @cached_property
    def request_indices(self) -> np.ndarray:
        """[num_tokens] int64, the index in the batch of each token's request."""
        return self.requests.repeat(self.lens)

    @cached_property
    def steps(self) -> np.ndarray:
        """[num_tokens] int64, the round's step of each token."""
        return self.firsts.repeat(self.lens) + self._within

    @cached_property
    def lasts(self) -> np.ndarray:
        """[num_running] int64, the round's step of each request's last token."""
        return self.firsts + self.lens - 1

    @cached_property
    def starts(self) -> np.ndarray:
        """[num_running + 1] int32, cumulative numbers of tokens, as vLLM's `query_start_loc`."""
        return np.concatenate([[0], self.lens.cumsum()]).astype(np.int32)

    @cached_property
    def table(self) -> np.ndarray:
        """[num_running, max_len] int64, token indices by request, padded with its last one."""
        within = np.minimum(np.arange(self.lens.max()), self.lens[:, None] - 1)
        return self.starts[:-1, None].astype(np.int64) + within

    @cached_property
    def cells(self) -> np.ndarray:
        """[num_tokens] int64, the flat index of each token in `table`."""
        return np.arange(len(self.lens)).repeat(self.lens) * self.lens.max() + self._within

    @cached_property
    def _within(self) -> np.ndarray:
        """[num_tokens] int64, the index of each token within its request."""
        return np.arange(self.lens.sum()) - self.starts[:-1].repeat(self.lens)


@dataclass(frozen=True)
class TokenPassView:
    """The slots that the tokens of a pass read, and a mask by token."""

    slots: torch.Tensor  # [num_layers, num_running, num_kv_heads, width] int32
    is_seen: torch.Tensor  # [num_running, max_len, width] bool, by the tokens of `table`
    table: torch.Tensor  # [num_running, max_len] int64, see `Queries`
    cells: torch.Tensor  # [num_tokens] int64, see `Queries`


PassView = PageView | LayerPageView | TokenPassView


@dataclass(frozen=True)
class ViewPass:
    """Input of a pass in the layers of a view."""

    positions: torch.Tensor  # [num_tokens] int64, true positions of the query tokens
    slots: torch.Tensor  # [num_tokens] int64, slots of their K/V
    view: PassView  # view of the running requests; `lens` of pages are of each one's last token


@dataclass(frozen=True)
class DraftPass:
    """Input of a pass in all layers."""

    queries: Queries
    parts: Sequence[ViewPass]  # by group of layers
    is_weighed: bool = False  # return the probabilities of the sampled tokens

    @property
    def positions(self) -> torch.Tensor:
        """[num_tokens] int64, true positions of the query tokens."""
        return self.parts[0].positions


class RoundSteps(ABC):
    """All steps of a round in the layers of a view: iterated once in order, or taken by passes.

    Args:
        draft_slots: prepared for the round.
        num_steps: drafts of each request.
        num_reqs: requests of the batch.
    """

    def __init__(self, draft_slots: DraftSlots, num_steps: int, num_reqs: int) -> None:
        self._draft_slots = draft_slots
        self._num_steps = num_steps
        self._num_reqs = num_reqs

    def __iter__(self) -> Iterator[ViewStep]:
        for index in range(self._num_steps):
            yield self._draft_slots.step(index, self._num_reqs, self._view_of_step(index))

    def take(self, queries: Queries) -> ViewPass:
        """Return the input of a pass. Not to be called after an iteration over the steps.

        Args:
            queries: within the model's length. K/V of the steps before a request's first is cached.
        """
        device = self._draft_slots.positions.device
        steps, requests = on_device(queries.steps, device), on_device(queries.request_indices, device)
        return ViewPass(
            self._draft_slots.positions[steps, requests],
            self._draft_slots.slots[steps, requests],
            self._view_of_pass(queries, on_device(queries.requests, device)),
        )

    @abstractmethod
    def _view_of_step(self, index: int) -> View:
        """Return the view of a step."""

    @abstractmethod
    def _view_of_pass(self, queries: Queries, requests: torch.Tensor) -> PassView:
        """Return the view of a pass; `requests` is `queries.requests` on the device."""


class PageSteps(RoundSteps):
    """The steps of a round in the layers of a page view.

    Args:
        draft_slots: prepared for the round.
        lens: [num_steps, num_reqs] int32, entries in view.
        view_of: returns the view of all requests for given `lens`.
    """

    def __init__(
        self,
        draft_slots: DraftSlots,
        lens: torch.Tensor,
        view_of: Callable[[torch.Tensor], PageView | LayerPageView],
    ) -> None:
        super().__init__(draft_slots, *lens.shape)
        self._lens = lens
        self._view_of = view_of

    @override
    def _view_of_step(self, index: int) -> PageView | LayerPageView:
        return self._view_of(self._lens[index])

    @override
    def _view_of_pass(self, queries: Queries, requests: torch.Tensor) -> PageView | LayerPageView:
        view = self._view_of(self._lens[on_device(queries.lasts, requests.device), requests])
        if isinstance(view, PageView):
            return replace(view, block_table=view.block_table[requests])
        return replace(view, block_tables=view.block_tables[:, requests])
