# SPDX-License-Identifier: Apache-2.0
"""A round's steps, one by one, or by passes that take several at once: of each request as many as it has
tokens for.

A view of pages ends with the round's drafted tokens, in order, and one step sees one entry more of it than
the step before. So causal attention among a pass's tokens lets each of them see what its own step would.
Views of tokens say what each one sees: `token_steps.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from vllm_magicdec.views.base import DraftSlots, LayerPageView, PageView, View, ViewStep, on_device


@dataclass(frozen=True)
class Queries:
    """The query tokens of a pass, one request's after the other's."""

    requests: np.ndarray  # [num_running] int64, places in the batch
    firsts: np.ndarray  # [num_running] int64, the step of the round that each one's first token is
    lens: np.ndarray  # [num_running] int64, tokens of each; at least 1

    @cached_property
    def places(self) -> np.ndarray:
        """[num_tokens] int64, the place in the batch of each token's request."""
        return self.requests.repeat(self.lens)

    @cached_property
    def steps(self) -> np.ndarray:
        """[num_tokens] int64, the step of the round that each token is."""
        return self.firsts.repeat(self.lens) + self._within

    @cached_property
    def lasts(self) -> np.ndarray:
        """[num_running] int64, the step of the round that each one's last token is."""
        return self.firsts + self.lens - 1

    @cached_property
    def starts(self) -> np.ndarray:
        """[num_running + 1] int32, where each request's tokens begin, and where the last one's end."""
        return np.concatenate([[0], self.lens.cumsum()]).astype(np.int32)

    @cached_property
    def table(self) -> np.ndarray:
        """[num_running, most] int64, each request's tokens; its last one again where others have more."""
        within = np.minimum(np.arange(self.lens.max()), self.lens[:, None] - 1)
        return self.starts[:-1, None].astype(np.int64) + within

    @cached_property
    def cells(self) -> np.ndarray:
        """[num_tokens] int64, where each token is in the table, counted row by row."""
        return np.arange(len(self.lens)).repeat(self.lens) * self.lens.max() + self._within

    @cached_property
    def _within(self) -> np.ndarray:
        """[num_tokens] int64, the place of each token among its request's."""
        return np.arange(self.lens.sum()) - self.starts[:-1].repeat(self.lens)


@dataclass(frozen=True)
class TokenPassView:
    """Of the requests of a pass, all slots that its tokens read, and which of them each one sees."""

    slots: torch.Tensor  # [num_layers, num_running, num_kv_heads, width] int32
    is_seen: torch.Tensor  # [num_running, most, width] bool, by the tokens of `table`
    table: torch.Tensor  # [num_running, most] int64, see `Queries`
    cells: torch.Tensor  # [num_tokens] int64, see `Queries`


PassView = PageView | LayerPageView | TokenPassView


@dataclass(frozen=True)
class ViewPass:
    """What a pass reads and writes in the layers of a view."""

    positions: torch.Tensor  # [num_tokens] int64, true positions of the query tokens
    slots: torch.Tensor  # [num_tokens] int64, where their K/V goes
    view: PassView  # of the requests that run; `lens` of pages are of each one's last token


@dataclass(frozen=True)
class DraftPass:
    """What a pass reads and writes in all layers."""

    queries: Queries
    parts: Sequence[ViewPass]  # by group of layers
    is_weighed: bool = False  # the probabilities of the drawn tokens are asked for

    @property
    def positions(self) -> torch.Tensor:
        """[num_tokens] int64, true positions of the query tokens."""
        return self.parts[0].positions


class RoundSteps(ABC):
    """All steps of a round in the layers of a view: to be gone through in order, once, or taken by passes.

    Args:
        draft_slots: prepared for the round.
        num_steps: drafts of each request.
        num_reqs: of the batch.
    """

    def __init__(self, draft_slots: DraftSlots, num_steps: int, num_reqs: int) -> None:
        self._draft_slots = draft_slots
        self._num_steps = num_steps
        self._num_reqs = num_reqs

    def __iter__(self) -> Iterator[ViewStep]:
        for index in range(self._num_steps):
            yield self._draft_slots.step(index, self._num_reqs, self._view_of_step(index))

    def take(self, queries: Queries) -> ViewPass:
        """Those that a pass takes; not once the steps are gone through one by one.

        Args:
            queries: within the model's length. K/V of the steps before a request's first is there.
        """
        device = self._draft_slots.positions.device
        steps, places = on_device(queries.steps, device), on_device(queries.places, device)
        return ViewPass(
            self._draft_slots.positions[steps, places],
            self._draft_slots.slots[steps, places],
            self._view_of_pass(queries, on_device(queries.requests, device)),
        )

    @abstractmethod
    def _view_of_step(self, index: int) -> View:
        """Where the step looks."""

    @abstractmethod
    def _view_of_pass(self, queries: Queries, requests: torch.Tensor) -> PassView:
        """Where the pass looks; `requests` [num_running] int64, those of `queries`."""


class PageSteps(RoundSteps):
    """The steps of a round in the layers of a view of pages.

    Args:
        draft_slots: prepared for the round.
        lens: [num_steps, num_reqs] int32, entries in view.
        view_of: the view of all requests, with `lens` put in.
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

    def _view_of_step(self, index: int) -> PageView | LayerPageView:
        return self._view_of(self._lens[index])

    def _view_of_pass(self, queries: Queries, requests: torch.Tensor) -> PageView | LayerPageView:
        view = self._view_of(self._lens[on_device(queries.lasts, requests.device), requests])
        if isinstance(view, PageView):
            return replace(view, block_table=view.block_table[requests])
        return replace(view, block_tables=view.block_tables[:, requests])
