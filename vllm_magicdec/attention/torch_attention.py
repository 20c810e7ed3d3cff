# SPDX-License-Identifier: Apache-2.0
"""Draft attention in plain torch: the reference of other implementations, and the CPU's own."""

import torch

from vllm_magicdec.attention.rows import KVRows
from vllm_magicdec.attention.softmax import Softmax, weights_of


def attend(
    query: torch.Tensor,
    rows: KVRows,
    slots: torch.Tensor,
    lens: torch.Tensor,
    softmax: Softmax,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Gather the rows and compute in float32.

    Args:
        query: [num_reqs, num_heads, head_size]; the heads of a KV head are adjacent.
        rows: the layer's cache.
        slots: [num_reqs, num_kv_heads, budget] int32; the first `lens` columns are read.
        lens: [num_reqs] int32, each from 1 to the budget.
        value_scale: scale of an fp8 cache's values.

    Returns:
        [num_reqs, num_heads, head_size] in the query's dtype, accumulated in float32.
    """
    # [num_reqs, 1, budget]
    in_view = torch.arange(slots.shape[-1], device=slots.device) < lens.view(-1, 1, 1)
    # Columns past the view may be invalid slots; the first one is valid.
    slots = torch.where(in_view, slots, slots[..., :1])
    return attend_where(query.unsqueeze(1), rows, slots, in_view, softmax, value_scale).squeeze(1)


def attend_where(
    query: torch.Tensor,  # [num_reqs, num_queries, num_heads, head_size]
    rows: KVRows,
    slots: torch.Tensor,  # [num_reqs, num_kv_heads, width] int32, slots of cached tokens
    is_seen: torch.Tensor,  # [num_reqs, num_queries, width] bool; each query sees at least one token
    softmax: Softmax,
    value_scale: float,
) -> torch.Tensor:
    """Attend from several query tokens per request under a mask; see `attend`.

    Returns:
        [num_reqs, num_queries, num_heads, head_size] in the query's dtype.
    """
    num_queries, num_kv_heads = query.shape[1], rows.num_kv_heads
    keys, values = rows.gather(slots)  # [num_reqs, num_kv_heads, width, head_size]
    # [num_reqs, num_kv_heads, num_queries, group, head_size]; one product per KV head
    grouped = query.float().unflatten(2, (num_kv_heads, -1)).transpose(1, 2)
    logits = softmax.capped(grouped.flatten(2, 3) @ keys.float().transpose(-1, -2) * softmax.scale)
    logits = logits.unflatten(2, (num_queries, -1)).masked_fill(~is_seen[:, None, :, None], -torch.inf)
    sinks = softmax.sinks_by_kv_head(num_kv_heads)
    if sinks is not None:
        sinks = sinks[:, None, :, None]
    attended = weights_of(logits, sinks).flatten(2, 3) @ values.float() * value_scale
    by_query = attended.unflatten(2, (num_queries, -1)).transpose(1, 2)
    return by_query.flatten(2, 3).to(query.dtype)
