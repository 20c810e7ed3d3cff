# SPDX-License-Identifier: Apache-2.0
"""SnapKV (Li et al. 2024, arXiv 2404.14469), as MagicDec (ICLR 2025) drafts with it."""

from typing import Any

import torch
from torch.nn.functional import avg_pool1d, max_pool1d

from vllm_magicdec.policies.observing import Observation, TokenPolicy

_POOLING = {"max": max_pool1d, "avg": avg_pool1d}


class SnapKV(TokenPolicy):
    """Tokens that the prompt's last `snapkv_window` tokens attend to most, and their neighbours.

    By page, what is summed are these pooled scores.
    """

    def __init__(self, fields: Any) -> None:
        super().__init__(fields)
        self.window = fields.snapkv_window
        self.recent = fields.snapkv_recent
        self._kernel = fields.snapkv_kernel
        self._pool = _POOLING[fields.snapkv_pooling]

    @classmethod
    def granularity(cls, fields: Any, device_type: str) -> str:
        """See `Policy`. A CPU reads single tokens slowly: vLLM keeps a page's keys transposed there."""
        return fields.draft_kv_granularity or ("page" if device_type == "cpu" else "token")

    def score(self, observation: Observation) -> torch.Tensor:
        """What the window's queries weigh it with (`Observation.weights`), pooled over neighbours.

        The window is in view anyway, and does not count.
        """
        scores = observation.weights()
        places = torch.arange(scores.shape[-1], device=scores.device)
        scores.masked_fill_(places >= observation.length - observation.window, 0.0)
        return self._pool(scores, self._kernel, stride=1, padding=self._kernel // 2)
