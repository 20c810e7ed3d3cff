# SPDX-License-Identifier: Apache-2.0
"""A round over page views, step by step or by passes."""

from collections.abc import Callable

import torch

from vllm_magicdec.views.round import LayerPageView, PageView, Part, Queries
from vllm_magicdec.views.slots import DraftSlots
from vllm_magicdec.views.tensors import on_device


class PageRound:
    """A round in the layers of a page view (`views.round.RoundView`).

    A page view ends with the round's drafted tokens in order, and each step sees one entry more than the
    step before, so causal attention among a pass's queries is exact.

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
        self._draft_slots = draft_slots
        self._lens = lens
        self._view_of = view_of

    def step(self, index: int) -> Part:
        """Return the input of a step."""
        return self._draft_slots.step(index, self._lens.shape[1], self._view_of(self._lens[index]))

    def take(self, queries: Queries) -> Part:
        """Return the input of a pass."""
        device = self._lens.device
        requests, lasts = on_device(queries.requests, device), on_device(queries.lasts, device)
        view = self._view_of(self._lens[0]).of_requests(requests, self._lens[lasts, requests])
        return self._draft_slots.take(queries, on_device(queries.request_indices, device), view)
