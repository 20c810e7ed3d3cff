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
    in_view = torch.arange(slots.shape[-1], device=slots.device) < lens.view(
        -1, 1, 1
    )  # [num_reqs, 1, budget]
    # What lies behind the view may be no slot at all; the first one is always read.
    slots = torch.where(in_view, slots, slots[..., :1])
    keys, values = rows.gather(slots)  # [num_reqs, num_kv_heads, budget, head_size]
    grouped = query.float().unflatten(
        1, (rows.num_kv_heads, -1)
    )  # [num_reqs, num_kv_heads, group, head_size]
    logits = grouped @ keys.float().transpose(-1, -2) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.masked_fill(~in_view.unsqueeze(1), -torch.inf)
    if sinks is not None:
        sinks = sinks.float().view(1, *grouped.shape[1:3], 1)
    attended = weights_of(logits, sinks) @ values.float() * value_scale
    return attended.flatten(1, 2).to(query.dtype)
