# SPDX-License-Identifier: Apache-2.0
"""Attention sinks and a recent window (StreamingLLM, Xiao et al. 2023; MagicDec, arXiv 2408.11049)."""

from typing import Any

import torch
from typing_extensions import override

from vllm_magicdec.policies.base import PagePolicy
from vllm_magicdec.views.pages import PageBudget


class StreamingLLM(PagePolicy):
    """Chooses the sink pages and the latest ones up to the budget. Keeps no state per request."""

    def __init__(self, fields: Any, budget: PageBudget, device: torch.device) -> None:
        super().__init__(fields, budget, device)
        self._columns = torch.arange(budget.max_entries, device=device)
        self._is_sink = self._columns < budget.num_sinks

    @property
    @override
    def is_sinks_and_latest(self) -> bool:
        return type(self).choose_pages is StreamingLLM.choose_pages

    @override
    def choose_pages(
        self, context_lens: torch.Tensor, last_pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_pages = torch.minimum(self.budget.entries(context_lens), last_pages + 1)
        skipped = (last_pages + 1 - num_pages).unsqueeze(1)
        pages = torch.where(self._is_sink, self._columns, self._columns + skipped)
        return pages, num_pages
