# SPDX-License-Identifier: Apache-2.0
"""Who looks at the target's queries, layer by layer, where `switch.py` sits."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.scales import Scales
from vllm_magicdec.attention.softmax import Softmax

# Called in every layer with the layer's number, its queries [num_tokens, num_heads, head_size] in the
# model's dtype, its KV cache, and what makes weights of their products.
LayerObserver = Callable[[int, torch.Tensor, KVRows, Softmax], None]


class QueryRecorder(Protocol):
    """Who wants the queries of every pass of the target."""

    def record(
        self,
        layer: int,
        queries: torch.Tensor,
        scales: Scales,
        metadata: Any,
        cache: KVRows,
        softmax: Softmax,
    ) -> None:
        """Called in every layer of the target's pass.

        A pass may have thousands of queries of which few are wanted: take those first, then scale them.

        Args:
            layer: its number.
            queries: [num_tokens, num_heads, head_size], as the layer hands them to its backend: in the
                model's dtype, or quantised.
            scales: the layer's; `Scales.scale_query` brings queries to the model's dtype.
            metadata: vLLM's, of one of `switch.BACKENDS_WITH_BLOCK_TABLES`.
            cache: the layer's.
            softmax: what makes weights of products of scaled queries and the cache's keys.
        """
        ...
