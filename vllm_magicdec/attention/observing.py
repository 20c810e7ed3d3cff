# SPDX-License-Identifier: Apache-2.0
"""Who looks at the target's queries, layer by layer, where `switch.py` sits."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from vllm_magicdec.attention import KVRows

# Called in every layer with the layer's number, its queries [num_tokens, num_heads, head_size], its KV
# cache, and the scale and soft cap of its logits.
LayerObserver = Callable[[int, torch.Tensor, KVRows, float, float], None]


class QueryRecorder(Protocol):
    """Who wants the queries of every pass of the target."""

    def record(
        self, layer: int, queries: torch.Tensor, metadata: Any, cache: KVRows, scale: float, soft_cap: float
    ) -> None:
        """Called in every layer of the target's pass; `queries` [num_tokens, num_heads, head_size].

        `metadata` is vLLM's, of one of `switch.BACKENDS_WITH_BLOCK_TABLES`.
        """
        ...
