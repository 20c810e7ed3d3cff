# SPDX-License-Identifier: Apache-2.0
"""Draft attention in plain torch: what the other implementations must equal, and the CPU's own."""

import torch

from vllm_magicdec.attention.rows import KVRows
from vllm_magicdec.attention.softmax import weights_of


def attend(
    query: torch.Tensor,  # [num_reqs, num_heads, head_size]
    rows: KVRows,
    slots: torch.Tensor,  # [num_reqs, num_kv_heads, budget] int32
    lens: torch.Tensor,  # [num_reqs] int32
    *,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [num_heads]
    value_scale: float = 1.0,
) -> torch.Tensor:
    """See `vllm_magicdec.attention.attend`. Gathers the rows, then computes in float32."""
    # [num_reqs, 1, budget]
    in_view = torch.arange(slots.shape[-1], device=slots.device) < lens.view(-1, 1, 1)
    # What lies behind the view may be no slot at all; the first one is always read.
    slots = torch.where(in_view, slots, slots[..., :1])
    attended = attend_where(
        query.unsqueeze(1),
        rows,
        slots,
        in_view,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
        value_scale=value_scale,
    )
    return attended.squeeze(1)


def attend_where(
    query: torch.Tensor,
    rows: KVRows,
    slots: torch.Tensor,
    is_seen: torch.Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Attend from several query tokens per request, each of which sees some of the request's tokens.

    Args:
        query: [num_reqs, num_queries, num_heads, head_size]; the heads of one KV head are neighbours.
        rows: the layer's cache.
        slots: [num_reqs, num_kv_heads, width] int32, of tokens that are in the cache.
        is_seen: [num_reqs, num_queries, width] bool; each query sees a token at least.
        scale: this and the rest: see `vllm_magicdec.attention.attend`.
        soft_cap: see there.
        sinks: [num_heads].
        value_scale: see there.

    Returns:
        [num_reqs, num_queries, num_heads, head_size] in the query's dtype.
    """
    num_queries, num_kv_heads = query.shape[1], rows.num_kv_heads
    keys, values = rows.gather(slots)  # [num_reqs, num_kv_heads, width, head_size]
    # [num_reqs, num_kv_heads, num_queries, group, head_size]; a KV head's queries are read in one product
    grouped = query.float().unflatten(2, (num_kv_heads, -1)).transpose(1, 2)
    logits = grouped.flatten(2, 3) @ keys.float().transpose(-1, -2) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.unflatten(2, (num_queries, -1)).masked_fill(~is_seen[:, None, :, None], -torch.inf)
    if sinks is not None:
        sinks = sinks.float().view(1, num_kv_heads, 1, -1, 1)
    attended = weights_of(logits, sinks).flatten(2, 3) @ values.float() * value_scale
    by_query = attended.unflatten(2, (num_queries, -1)).transpose(1, 2)
    return by_query.flatten(2, 3).to(query.dtype)
