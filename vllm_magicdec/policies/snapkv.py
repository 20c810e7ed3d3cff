# SPDX-License-Identifier: Apache-2.0
"""SnapKV (Li et al. 2024, arXiv 2404.14469), as MagicDec (ICLR 2025) drafts with it."""

from typing import Any

import torch
from torch.nn.functional import avg_pool1d, max_pool1d
from typing_extensions import override

from vllm_magicdec.policies.observing import Observation, TokenPolicy

_POOLING = {"max": max_pool1d, "avg": avg_pool1d}


class SnapKV(TokenPolicy):
    """Selects the tokens that the prompt's last `snapkv_window` tokens attend to most.

    Scores are pooled, so that neighbours of strong tokens are selected too. By page, the score of a page is
    the sum of its tokens' pooled scores.
    """

    def __init__(self, fields: Any) -> None:
        super().__init__(fields)
        self.window = fields.snapkv_window
        self.recent = fields.snapkv_recent
        self._kernel = fields.snapkv_kernel
        self._pool = _POOLING[fields.snapkv_pooling]

    @classmethod
    @override
    def granularity(cls, fields: Any, device_type: str) -> str:
        # A CPU reads single tokens slowly because vLLM stores a page's keys transposed there.
        return fields.draft_kv_granularity or ("page" if device_type == "cpu" else "token")

    @override
    def score(self, observation: Observation) -> torch.Tensor:
        scores = observation.weights()
        positions = torch.arange(scores.shape[-1], device=scores.device)
        # The window is in view anyway and must not pool into its neighbours.
        scores.masked_fill_(positions >= observation.length - observation.window, 0.0)
        return self._pool(scores, self._kernel, stride=1, padding=self._kernel // 2)
