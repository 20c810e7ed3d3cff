# SPDX-License-Identifier: Apache-2.0
"""Draft attention in plain torch: what the CPU uses, and the truth for the other implementations."""

import torch

from vllm_magicdec.attention.rows import KVRows


def attend(
    query: torch.Tensor,
    rows: KVRows,
    slots: torch.Tensor,
    lens: torch.Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """See `attention.attend`."""
    num_reqs, num_heads, size = query.shape
    keys, values = rows.gather(slots)
    # The query heads of one KV head are the rows of one matrix.
    grouped = query.view(num_reqs, rows.num_kv_heads, -1, size).float()
    logits = torch.matmul(grouped, keys.float().transpose(2, 3)) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    is_past_end = torch.arange(slots.shape[-1], device=lens.device) >= lens.unsqueeze(1)
    logits.masked_fill_(is_past_end[:, None, None], float("-inf"))
    attended = torch.matmul(logits.softmax(-1), values.float())
    return attended.view(num_reqs, num_heads, size).to(query.dtype)
