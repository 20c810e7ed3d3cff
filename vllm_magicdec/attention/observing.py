# SPDX-License-Identifier: Apache-2.0
"""Interfaces for observers of the target's queries, called by `switch.py`."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.scales import Scales
from vllm_magicdec.attention.softmax import Softmax

# Called in every layer with its index, queries [num_tokens, num_heads, head_size] in the model's dtype, KV
# cache, and softmax parameters.
LayerObserver = Callable[[int, torch.Tensor, KVRows, Softmax], None]


class QueryRecorder(Protocol):
    """Receives the queries of every pass of the target."""

    def record(
        self,
        layer: int,
        queries: torch.Tensor,
        scales: Scales,
        metadata: Any,
        cache: KVRows,
        softmax: Softmax,
    ) -> None:
        """Record the queries of a layer in the target's pass.

        Args:
            queries: [num_tokens, num_heads, head_size], in the model's dtype or quantised.
            scales: scales of the layer; select queries before `Scales.scale_query`.
            metadata: vLLM's metadata of one of `switch.BACKENDS_WITH_BLOCK_TABLES`.
        """
