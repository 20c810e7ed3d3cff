# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's draft attention as one call."""

import torch

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.flashinfer_attention import (
    FlashInferDecode,
    Geometry,
    make_page_indices,
    make_workspace,
)


def attend_with_flashinfer(
    query: torch.Tensor,
    rows: KVRows,
    slots: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    **options,
) -> torch.Tensor:
    """Plan and run once; see `torch_attention.attend`."""
    num_reqs, num_heads, size = query.shape
    geometry = Geometry(
        num_heads, rows.num_kv_heads, size, query.dtype, rows.keys.rows.dtype, scale, soft_cap
    )
    decode = FlashInferDecode(
        geometry,
        num_reqs=num_reqs,
        workspace=make_workspace(geometry, num_reqs, query.device),
        indices=make_page_indices(num_reqs * rows.num_kv_heads, slots.shape[-1], query.device),
    )
    decode.plan(lens.cpu())
    return decode.run(query, rows, slots, **options)
