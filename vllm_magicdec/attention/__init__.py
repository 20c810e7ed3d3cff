# SPDX-License-Identifier: Apache-2.0
"""Draft attention over token views."""

import torch

from vllm_magicdec.attention import torch_attention, triton_attention
from vllm_magicdec.attention.rows import KVRows

__all__ = ["IMPLEMENTATIONS", "KVRows", "attend"]

IMPLEMENTATIONS = {"torch": torch_attention.attend, "triton": triton_attention.attend}


def attend(
    query: torch.Tensor,
    rows: KVRows,
    slots: torch.Tensor,
    lens: torch.Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attention of one query token per request over its own list of slots per KV head.

    Args:
        query: [num_reqs, num_heads, head_size].
        rows: the layer's KV cache.
        slots: [num_reqs, num_kv_heads, budget] int32; the first `lens` columns count.
        lens: [num_reqs] int32, at least 1.
        scale: of the logits.
        soft_cap: of the logits, 0: none.

    Returns:
        [num_reqs, num_heads, head_size] in the query's dtype, accumulated in float32.
    """
    name = "triton" if query.is_cuda else "torch"
    return IMPLEMENTATIONS[name](query, rows, slots, lens, scale=scale, soft_cap=soft_cap)
