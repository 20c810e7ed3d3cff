# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel that writes a layer's row numbers for FlashInfer."""

import torch
import triton
import triton.language as tl

from vllm_magicdec.attention.rows import KVRows

BLOCK_TOKENS = 256


@triton.jit
def _fill_kernel(  # type: ignore[no-untyped-def]
    indices,  # int32, written
    slots,  # [num_reqs, num_kv_heads, budget] int32
    lens,  # [num_reqs] int32
    indptr,  # [num_reqs * num_kv_heads + 1] int32
    slots_req,  # strides, in elements
    slots_head,
    slots_column,
    block_rows,  # rows from one block, head, token in the block to the next
    head_rows,
    token_rows,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per request, KV head and block of its list."""
    req = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_view = columns < tl.load(lens + req)
    listed = slots + req * slots_req + kv_head * slots_head + columns * slots_column
    slot = tl.load(listed, mask=in_view, other=0).to(tl.int64)
    row = slot // PAGE_SIZE * block_rows + kv_head * head_rows + slot % PAGE_SIZE * token_rows
    start = tl.load(indptr + req * tl.num_programs(1) + kv_head)
    tl.store(indices + start + columns, row.to(tl.int32), mask=in_view)


def fill_page_indices(
    indices: torch.Tensor,  # from `make_page_indices`, written
    rows: KVRows,  # not packed
    slots: torch.Tensor,  # [num_reqs, num_kv_heads, budget] int32
    lens: torch.Tensor,  # [num_reqs] int32
    indptr: torch.Tensor,  # [num_reqs * num_kv_heads + 1] int32
) -> None:
    """Write the concatenated row numbers of all views. No host synchronisation."""
    num_reqs, num_kv_heads, budget = slots.shape
    block, head, token, _ = rows.keys.steps  # unpacked tiles have one token
    _fill_kernel[(num_reqs, num_kv_heads, triton.cdiv(budget, BLOCK_TOKENS))](
        indices,
        slots,
        lens,
        indptr,
        *slots.stride(),
        block,
        head,
        token,
        PAGE_SIZE=rows.page_size,
        BLOCK=BLOCK_TOKENS,
    )
