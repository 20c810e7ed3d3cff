# SPDX-License-Identifier: Apache-2.0
"""Attention sinks and a recent window (StreamingLLM, Xiao et al. 2023; MagicDec, arXiv 2408.11049)."""

import torch
from typing_extensions import override

from vllm_magicdec.policies.base import PagePolicy
from vllm_magicdec.views.pages import sinks_and_latest


class StreamingLLM(PagePolicy):
    """Chooses the sink pages and the latest ones up to the budget. Keeps no state per request."""

    @property
    @override
    def is_sinks_and_latest(self) -> bool:
        return type(self).choose_pages is StreamingLLM.choose_pages

    @override
    def choose_pages(
        self, context_lens: torch.Tensor, last_pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_pages = torch.minimum(self.budget.entries(context_lens), last_pages + 1)
        skipped = last_pages + 1 - num_pages
        return sinks_and_latest(self.budget.max_entries, self.budget.num_sinks, skipped), num_pages
