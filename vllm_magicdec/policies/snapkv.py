# SPDX-License-Identifier: Apache-2.0
"""SnapKV (Li et al. 2024, arXiv 2404.14469), as MagicDec (ICLR 2025) drafts with it."""

from typing import Any

import torch
from torch.nn.functional import avg_pool1d, max_pool1d

from vllm_magicdec.attention.softmax import weights_of
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
        """Softmax over the whole context, causal in the window; summed over the window's queries and the
        query heads of each KV head; pooled over neighbours before the window."""
        window, first = observation.window, observation.num_seen
        num_kv_heads, num_tokens, size = observation.keys.shape
        places = torch.arange(num_tokens, device=observation.keys.device)
        own = observation.length - window + torch.arange(window, device=places.device)
        hidden = places[first:] > own.unsqueeze(1)  # [window, num_tokens - first]
        # [num_kv_heads, group, window, size], in the cache's dtype: in float32 the product would be slow
        queries = observation.queries.view(window, num_kv_heads, -1, size).permute(1, 2, 0, 3)
        # Scaled first: float16 ends at 65,504.
        queries = (queries.float() * observation.scale).to(observation.keys.dtype)
        scores = torch.empty((num_kv_heads, num_tokens), device=places.device)
        # Head by head: all heads at once would need heads x window x tokens floats.
        for head in range(num_kv_heads):
            product = queries[head].flatten(0, 1) @ observation.keys[head].T
            logits = product.float().unflatten(0, (-1, window))
            if observation.soft_cap:
                logits = observation.soft_cap * torch.tanh(logits / observation.soft_cap)
            logits[..., first:].masked_fill_(hidden, float("-inf"))
            sinks = None if observation.sinks is None else observation.sinks[head, :, None, None]
            scores[head] = weights_of(logits, sinks).sum((0, 1))
        scores.masked_fill_(places >= observation.length - window, 0.0)
        return self._pool(scores, self._kernel, stride=1, padding=self._kernel // 2)
