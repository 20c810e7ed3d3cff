# SPDX-License-Identifier: Apache-2.0
"""Page views of every layer's own: selected pages beside sinks and the latest ones.

Columns of a block table: [selected | sinks | recent]. Any attention backend whose metadata holds a block
table can run it, layer by layer. A context within the budget is seen whole.
"""

from collections.abc import Mapping
from functools import partial

import torch

from vllm_magicdec.views.base import (
    Batch,
    DraftSlots,
    LayerPageView,
    Selector,
    has_kernels,
)
from vllm_magicdec.views.pages import PageBudget
from vllm_magicdec.views.passes import PageSteps
from vllm_magicdec.views.selections import Selections


class LayerPageViews:
    """Selected pages for every layer.

    Args:
        selections: of pages, best first, with room for the budget's.
        selector: keeps them up to date.
        budget: of a request.
        draft_slots: where the drafted tokens go.
    """

    common_lens = (None,)

    def __init__(
        self,
        selections: Selections,
        selector: Selector,
        budget: PageBudget,
        draft_slots: DraftSlots,
    ) -> None:
        self._selections = selections
        self._selector = selector
        self._budget = budget
        self._draft_slots = draft_slots
        max_num_steps, max_num_reqs = draft_slots.positions.shape
        device = draft_slots.positions.device
        max_pages = budget.max_pages
        self._columns = torch.arange(max_pages, device=device)
        self._lens = torch.zeros((max_num_steps, max_num_reqs), dtype=torch.int32, device=device)
        shape = (selections.positions.shape[1], max_num_reqs, max_pages)
        self._block_tables = torch.zeros(shape, dtype=torch.int32, device=device)

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """See `Views`."""
        tables = self._block_tables.numel() * self._block_tables.element_size()
        return {"lists of pages": tables + self._selections.num_bytes, **self._selector.memory_bytes}

    def prepare(self, batch: Batch, num_steps: int) -> PageSteps:
        """See `Views`."""
        self._selector.update(batch, num_steps)
        num_reqs = batch.context_lens.shape[0]
        rows = self._selections.rows(batch.req_ids)
        write = self._write_with_kernel if has_kernels(rows.device) else self._write
        write(batch, rows, num_steps)
        lens = self._lens[:num_steps, :num_reqs]
        return PageSteps(self._draft_slots, lens, partial(self.capture_view, num_reqs))

    def _write(self, batch: Batch, rows: torch.Tensor, num_steps: int) -> None:
        budget, num_reqs = self._budget, batch.context_lens.shape[0]
        positions = self._draft_slots.prepare(batch, num_steps)
        last_pages = positions[-1] // budget.page_size
        total = last_pages + 1
        sinks = total.clamp(max=budget.sink_pages)
        pages = budget.pages(batch.context_lens)
        # The least number of recent pages stays, should a request have come back shorter.
        recent = budget.recent_pages
        start = torch.maximum(torch.minimum(self._selections.ends[rows], total - recent), sinks)
        counts = torch.minimum(self._selections.counts[rows], (pages - sinks - recent).clamp(min=0))
        fits = total <= pages
        counts = counts.masked_fill(fits, 0)
        start = torch.where(fits, sinks, torch.maximum(start, total - (pages - sinks - counts)))

        column = self._columns - counts.unsqueeze(1)  # negative: selected
        place = torch.where(column < sinks.unsqueeze(1), column, column + (start - sinks).unsqueeze(1))
        # Columns past the end are never read; the last page keeps them valid.
        place = torch.minimum(place.clamp(min=0), last_pages.unsqueeze(1))
        tables = self._block_tables[:, :num_reqs]
        tables[:] = batch.block_table.gather(1, place)
        chosen = self._selections.positions[rows, :, 0]  # [num_reqs, layers, selected]
        num_selected = chosen.shape[-1]
        chosen = torch.minimum(chosen.flatten(1).long(), last_pages.unsqueeze(1))
        blocks = batch.block_table.gather(1, chosen).view(num_reqs, len(tables), num_selected)
        part = tables[..., :num_selected]
        part[:] = torch.where(column[:, :num_selected] < 0, blocks.transpose(0, 1), part)
        skipped_tokens = (start - sinks - counts) * budget.page_size
        self._lens[:num_steps, :num_reqs] = positions + 1 - skipped_tokens

    def _write_with_kernel(self, batch: Batch, rows: torch.Tensor, num_steps: int) -> None:
        from vllm_magicdec.views.kernels import write_layer_page_round

        budget = self._budget
        write_layer_page_round(
            batch.context_lens,
            batch.block_table,
            rows,
            self._selections.positions,
            self._selections.counts,
            self._selections.ends,
            budget.pages(batch.context_lens),
            positions=self._draft_slots.positions,
            slots=self._draft_slots.slots,
            lens=self._lens,
            view_tables=self._block_tables,
            num_steps=num_steps,
            page_size=budget.page_size,
            sink_pages=budget.sink_pages,
            recent_pages=budget.recent_pages,
            max_pages=budget.max_pages,
            max_model_len=self._draft_slots.max_model_len,
        )

    def capture_view(
        self, num_reqs: int, lens: torch.Tensor, common_len: int | None = None
    ) -> LayerPageView:
        """See `Views`."""
        max_len = self._block_tables.shape[-1] * self._draft_slots.page_size
        return LayerPageView(lens, self._block_tables[:, :num_reqs], max_len)
