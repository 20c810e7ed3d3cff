# SPDX-License-Identifier: Apache-2.0
"""Draft passes that take several of a round's steps at once, of each request as many as it has tokens for.

A view of pages ends with the round's drafted tokens, in order, and one step sees one entry more of it than
the step before. So causal attention among a pass's tokens lets each of them see what its own step would.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from vllm_magicdec.views.base import LayerPageView, PageView, ViewStep, on_device


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
        ends = self.lens.cumsum()
        within = np.arange(ends[-1]) - (ends - self.lens).repeat(self.lens)
        return self.firsts.repeat(self.lens) + within

    @cached_property
    def starts(self) -> np.ndarray:
        """[num_running + 1] int32, where each request's tokens begin, and where the last one's end."""
        return np.concatenate([[0], self.lens.cumsum()]).astype(np.int32)


@dataclass(frozen=True)
class ViewPass:
    """What a pass reads and writes in the layers of a view."""

    positions: torch.Tensor  # [num_tokens] int64, true positions of the query tokens
    slots: torch.Tensor  # [num_tokens] int64, where their K/V goes
    view: PageView | LayerPageView  # of the requests that run; `lens` are of each one's last token


@dataclass(frozen=True)
class DraftPass:
    """What a pass reads and writes in all layers."""

    queries: Queries
    parts: Sequence[ViewPass]  # by group of layers

    @property
    def positions(self) -> torch.Tensor:
        """[num_tokens] int64, true positions of the query tokens."""
        return self.parts[0].positions


class RoundSteps:
    """All steps of a round in the layers of a view of pages.

    Args:
        steps: in order.
    """

    def __init__(self, steps: Sequence[ViewStep]) -> None:
        view = steps[0].view
        assert isinstance(view, PageView | LayerPageView)  # the lists of others are good for one step
        self._view = view
        self._positions = torch.stack([step.positions for step in steps])  # [num_steps, num_reqs]
        self._slots = torch.stack([step.slots for step in steps])
        self._lens = torch.stack([step.view.lens for step in steps])

    def take(self, queries: Queries) -> ViewPass:
        """Those that a pass takes."""
        device = self._positions.device
        steps, places = on_device(queries.steps, device), on_device(queries.places, device)
        requests = on_device(queries.requests, device)
        last = on_device(queries.firsts + queries.lens - 1, device)
        view, lens = self._view, self._lens[last, requests]
        taken: PageView | LayerPageView
        if isinstance(view, PageView):
            taken = replace(view, lens=lens, block_table=view.block_table[requests])
        else:
            taken = replace(view, lens=lens, block_tables=view.block_tables[:, requests])
        return ViewPass(self._positions[steps, places], self._slots[steps, places], taken)
