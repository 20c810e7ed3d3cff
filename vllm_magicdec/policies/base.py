# SPDX-License-Identifier: Apache-2.0
"""What a policy is. Subclass one of these and name it in the entry-point group `vllm_magicdec.policies`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from vllm_magicdec.views.pages import PageBudget


class PagePolicy(ABC):
    """Chooses pages, the same for all layers and heads. Any attention backend reads such a view.

    Args:
        fields: the speculative configuration (`config.MagicDecFields`).
        budget: in whole pages.
        device: where `choose_pages` works.
    """

    def __init__(self, fields: Any, budget: PageBudget, device: torch.device) -> None:
        self.budget = budget
        self.device = device

    @property
    def max_pages(self) -> int:
        """Columns of the view's block table."""
        return self.budget.max_pages

    @property
    def is_sinks_and_latest(self) -> bool:
        """Whether `choose_pages` takes the sinks and the latest pages; on a GPU a kernel then does it."""
        return False

    @abstractmethod
    def choose_pages(
        self, context_lens: torch.Tensor, last_pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the pages of one round.

        Args:
            context_lens: [num_reqs] int64, verified tokens.
            last_pages: [num_reqs] int64, page of the round's last drafted token.

        Returns:
            pages: [num_reqs, max_pages] int64, page numbers within the request, ascending. The chosen
                ones come first and end with a run of neighbours up to `last_pages`.
            num_pages: [num_reqs] int64.
        """


@dataclass(frozen=True)
class Observation:
    """What one request's latest tokens ask for, in one layer."""

    queries: torch.Tensor  # [window, num_heads, head_size], of the last `window` tokens, oldest first
    keys: torch.Tensor  # [num_kv_heads, num_tokens, head_size], position by position
    length: torch.Tensor  # [] int64, valid keys; the last query is at position length - 1
    scale: float  # of the logits
    soft_cap: float  # of the logits, 0: none

    @property
    def window(self) -> int:
        return self.queries.shape[0]


class TokenPolicy(ABC):
    """Chooses tokens per layer and KV head when a prompt ends, and again every `refresh` tokens.

    Sinks and recent tokens are always in view; the policy chooses among those between.

    Args:
        fields: the speculative configuration (`config.MagicDecFields`).
    """

    window: int  # latest tokens whose queries it wants to see; they stay in view
    recent: float = 0.0  # latest tokens that stay in view, see `views.tokens.TokenBudget.from_fields`
    refresh: int  # generated tokens after which it chooses again; 0: never

    def __init__(self, fields: Any) -> None:
        self.refresh = fields.draft_kv_refresh or 0

    @abstractmethod
    def score(self, observation: Observation) -> torch.Tensor:
        """How much the draft needs each token, [num_kv_heads, num_tokens] float32; the highest are taken.

        Scores of positions that are in view anyway, or not valid, are ignored.
        """
