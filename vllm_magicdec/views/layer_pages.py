# SPDX-License-Identifier: Apache-2.0
"""Page views per layer: selected pages, sinks and the latest pages.

The columns of a block table are [selected | sinks | recent]. A context within the budget is seen whole.
"""

from collections.abc import Mapping
from functools import partial

import torch
from typing_extensions import override

from vllm_magicdec.views.pages import PageBudget, PageRound
from vllm_magicdec.views.round import Batch, LayerPageView, Selector, Views
from vllm_magicdec.views.selections import Selections
from vllm_magicdec.views.slots import DraftSlots
from vllm_magicdec.views.tensors import has_kernels


class LayerPageViews(Views):
    """Selected pages for every layer.

    Args:
        selections: pages, best first, with room for the budget's.
        selector: updates `selections`.
    """

    common_lens = (None,)

    def __init__(
        self, selections: Selections, selector: Selector, budget: PageBudget, draft_slots: DraftSlots
    ) -> None:
        self._selections = selections
        self._selector = selector
        self._budget = budget
        self._draft_slots = draft_slots
        max_num_steps, max_num_reqs = draft_slots.positions.shape
        device = draft_slots.positions.device
        max_pages = budget.max_entries
        self._columns = torch.arange(max_pages, device=device)
        self._lens = torch.zeros((max_num_steps, max_num_reqs), dtype=torch.int32, device=device)
        shape = (selections.positions.shape[1], max_num_reqs, max_pages)
        self._block_tables = torch.zeros(shape, dtype=torch.int32, device=device)

    @property
    @override
    def memory_bytes(self) -> Mapping[str, int]:
        lists = self._block_tables.nbytes + self._selections.positions.nbytes
        return {"lists of pages": lists, **self._selector.memory_bytes}

    @override
    def prepare(self, batch: Batch, num_steps: int) -> PageRound:
        self._selections.begin_round(batch.req_ids)
        self._selector.update(batch, num_steps)
        num_reqs = batch.context_lens.shape[0]
        if has_kernels(self._lens.device):
            from vllm_magicdec.views.kernels import write_page_round

            write_page_round(
                batch,
                self._draft_slots,
                self._budget,
                self._budget.entries(batch.context_lens),
                self._selections,
                lens=self._lens,
                view_tables=self._block_tables,
                num_steps=num_steps,
            )
        else:
            self._write(batch, self._selections.rows(batch.req_ids), num_steps)
        lens = self._lens[:num_steps, :num_reqs]
        return PageRound(self._draft_slots, lens, partial(self.capture_view, num_reqs))

    def _write(self, batch: Batch, rows: torch.Tensor, num_steps: int) -> None:
        budget, num_reqs = self._budget, batch.context_lens.shape[0]
        positions = self._draft_slots.prepare(batch, num_steps)
        last_pages = positions[-1] // budget.unit
        total = last_pages + 1
        sinks = total.clamp(max=budget.num_sinks)
        pages = budget.entries(batch.context_lens)
        # Keep the minimum of recent pages even if a resumed request is shorter than at its selection.
        recent = budget.num_recent
        start = torch.maximum(torch.minimum(self._selections.ends[rows], total - recent), sinks)
        counts = torch.minimum(self._selections.counts[rows], (pages - sinks - recent).clamp(min=0))
        fits = total <= pages
        counts = counts.masked_fill(fits, 0)
        start = torch.where(fits, sinks, torch.maximum(start, total - (pages - sinks - counts)))

        column = self._columns - counts.unsqueeze(1)  # negative: selected
        page = torch.where(column < sinks.unsqueeze(1), column, column + (start - sinks).unsqueeze(1))
        # Columns past the end are never read; the last page keeps them valid.
        page = torch.minimum(page.clamp(min=0), last_pages.unsqueeze(1))
        tables = self._block_tables[:, :num_reqs]
        tables[:] = batch.block_table.gather(1, page)
        chosen = self._selections.positions[rows, :, 0]  # [num_reqs, layers, selected]
        num_selected = chosen.shape[-1]
        chosen = torch.minimum(chosen.flatten(1).long(), last_pages.unsqueeze(1))
        blocks = batch.block_table.gather(1, chosen).view(num_reqs, len(tables), num_selected)
        part = tables[..., :num_selected]
        part[:] = torch.where(column[:, :num_selected] < 0, blocks.transpose(0, 1), part)
        skipped_tokens = (start - sinks - counts) * budget.unit
        self._lens[:num_steps, :num_reqs] = positions + 1 - skipped_tokens

    @override
    def capture_view(
        self, num_reqs: int, lens: torch.Tensor, common_len: int | None = None
    ) -> LayerPageView:
        return LayerPageView(lens, self._block_tables[:, :num_reqs], self._budget.max_tokens)
