# SPDX-License-Identifier: Apache-2.0
"""A round over token views, step by step or by passes.

From one step to the next a list changes in one column: the query's slot is appended or, if the budget is
full, replaces the oldest recent token. One by one, the lists are changed in place. For a pass, the slots
of the later steps' queries are appended, and a mask selects the slots of each query's own step.
"""

from functools import cached_property

import numpy as np
import torch

from vllm_magicdec.views.round import Part, Queries, TokenMask, TokenView
from vllm_magicdec.views.slots import DraftSlots
from vllm_magicdec.views.tensors import on_device


class TokenRound:
    """A round in the layers of a token view (`views.round.RoundView`).

    Args:
        draft_slots: prepared for the round.
        lens: [num_steps, num_reqs] int32, entries in view.
        slots: [num_layers, num_reqs, num_kv_heads, budget] int32, the first step's lists; `step` writes to
            them.
        query_columns: [num_steps, num_reqs] int64, the column of each step's query in its list.
        query_slots: [num_steps, num_reqs] int32, the slot of each step's query.
        common_len: see `TokenView`.
    """

    def __init__(
        self,
        draft_slots: DraftSlots,
        *,
        lens: torch.Tensor,
        slots: torch.Tensor,
        query_columns: torch.Tensor,
        query_slots: torch.Tensor,
        common_len: int | None,
    ) -> None:
        self._draft_slots = draft_slots
        self._num_steps, self._num_reqs = lens.shape
        self._lens = lens
        self._slots = slots
        self._query_columns = query_columns
        self._query_slots = query_slots
        self._common_len = common_len

    def step(self, index: int) -> Part:
        """Return the input of a step."""
        if index:
            columns, query_slots = (
                values[index].view(1, -1, 1, 1).expand(*self._slots.shape[:3], 1)
                for values in (self._query_columns, self._query_slots)
            )
            self._slots.scatter_(-1, columns, query_slots)
        view = TokenView(self._lens[index], self._slots, self._common_len)
        return self._draft_slots.step(index, self._num_reqs, view)

    def take(self, queries: Queries) -> Part:
        """Return the input of a pass."""
        device = self._lens.device
        view = self._masked_view(queries, on_device(queries.requests, device))
        return self._draft_slots.take(queries, on_device(queries.request_indices, device), view)

    def _masked_view(self, queries: Queries, requests: torch.Tensor) -> TokenView:
        device = requests.device
        steps = on_device(queries.steps[queries.table], device).unsqueeze(-1)  # [num_running, max_len, 1]
        later = np.arange(1, queries.lasts.max() + 1)
        is_seen = torch.cat(
            [steps < self._seen_until[requests].unsqueeze(1), steps >= on_device(later, device)], dim=-1
        )
        # Steps after a request's last one have no K/V yet; its last slot pads them.
        written = on_device(np.minimum(later, queries.lasts[:, None]), device)  # [num_running, later]
        drafted = self._query_slots[written, requests.unsqueeze(1)]
        all_run = np.array_equal(queries.requests, np.arange(self._num_reqs))
        slots = self._slots if all_run else self._slots[:, requests]
        drafted = drafted[:, None].expand(*slots.shape[:3], len(later))
        mask = TokenMask(is_seen, on_device(queries.table, device), on_device(queries.cells, device))
        slots = torch.cat([slots, drafted], dim=-1)
        lens = torch.full((len(requests),), slots.shape[-1], dtype=torch.int32, device=device)
        return TokenView(lens, slots, mask=mask)

    @cached_property
    def _seen_until(self) -> torch.Tensor:
        """[num_reqs, budget] int64, the first step that does not see a column of the first step's lists."""
        columns = torch.arange(self._slots.shape[-1], device=self._slots.device)
        seen_until = torch.where(columns < self._lens[0].unsqueeze(1), self._num_steps, 0)
        steps = torch.arange(self._num_steps, device=columns.device).expand(self._num_reqs, -1)
        # Steps beyond the model's length have the last token's column.
        return seen_until.scatter_reduce_(1, self._query_columns[1:].T, steps[:, 1:], "amin")
