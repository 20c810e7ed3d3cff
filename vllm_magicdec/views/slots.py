# SPDX-License-Identifier: Apache-2.0
"""Positions of a round's drafted tokens and the slots that they write to."""

import torch

from vllm_magicdec.views.round import Batch, Part, Queries, View
from vllm_magicdec.views.tensors import PAD_SLOT, on_device


class DraftSlots:
    """Positions of the drafted tokens and the slots they write to, in buffers that live with the engine."""

    def __init__(
        self,
        *,
        page_size: int,
        max_num_reqs: int,
        max_num_steps: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.max_model_len = max_model_len
        self._offsets = torch.arange(max_num_steps, device=device).unsqueeze(1)  # [steps, 1] int64
        shape = (max_num_steps, max_num_reqs)
        self.positions = torch.zeros(shape, dtype=torch.int64, device=device)
        self.slots = torch.full(shape, PAD_SLOT, dtype=torch.int64, device=device)

    def prepare(self, batch: Batch, num_steps: int) -> torch.Tensor:
        """Fill the buffers for a round and return its positions, [num_steps, num_reqs] int64.

        Positions at or above the model length are clamped and write to PAD_SLOT; their drafts are never
        scheduled.
        """
        num_reqs = batch.context_lens.shape[0]
        unclamped = batch.context_lens + self._offsets[:num_steps]
        positions = unclamped.clamp(max=self.max_model_len - 1)
        pages = batch.block_table.gather(1, (positions // self.page_size).T).T
        slots = pages * self.page_size + positions % self.page_size
        self.positions[:num_steps, :num_reqs] = positions
        self.slots[:num_steps, :num_reqs] = slots.masked_fill(unclamped != positions, PAD_SLOT)
        return positions

    def step(self, index: int, num_reqs: int, view: View) -> Part:
        """Return a step of the prepared round over a view."""
        return Part(self.positions[index, :num_reqs], self.slots[index, :num_reqs], view)

    def take(self, queries: Queries, requests: torch.Tensor, view: View) -> Part:
        """Return a pass over a view; `requests` is `queries.request_indices` on the device."""
        steps = on_device(queries.steps, requests.device)
        return Part(self.positions[steps, requests], self.slots[steps, requests], view)
