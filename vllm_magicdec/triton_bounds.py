# SPDX-License-Identifier: Apache-2.0
"""Upper bounds of pages' logits, by one Triton kernel that reads every summary once.

Gathering the summaries of a batch first, as torch has to, moves each of their bytes four times.
"""

import torch
import triton
import triton.language as tl

BLOCK_PAGES = 32
MIN_DOT_ROWS = 16  # of `tl.dot`


@triton.jit
def _bounds_kernel(  # type: ignore[no-untyped-def]
    queries,  # [num_reqs, num_kv_heads, num_queries, head_size] float32, contiguous
    least,  # [num_blocks, num_kv_heads, head_size]
    greatest,
    blocks,  # [num_reqs, num_pages] int32 or int64
    bounds,  # [num_reqs, num_kv_heads, num_queries, num_pages] float32, written
    num_pages,
    block_stride,  # of the summaries, in elements
    head_stride,
    blocks_req,
    NUM_QUERIES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    QUERIES_PADDED: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One request, KV head and block of pages."""
    req = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    pages = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, QUERIES_PADDED)
    dims = tl.arange(0, HEAD_PADDED)
    is_page = pages < num_pages

    first_row = (req * tl.num_programs(1) + kv_head) * NUM_QUERIES
    q = tl.load(
        queries + (first_row + rows[:, None]) * HEAD_SIZE + dims[None, :],
        mask=(rows[:, None] < NUM_QUERIES) & (dims[None, :] < HEAD_SIZE),
        other=0.0,
    )
    block = tl.load(blocks + req * blocks_req + pages, mask=is_page, other=0).to(tl.int64)
    summaries = block[None, :] * block_stride + kv_head * head_stride + dims[:, None]
    in_summary = is_page[None, :] & (dims[:, None] < HEAD_SIZE)
    low = tl.load(least + summaries, mask=in_summary, other=0.0).to(tl.float32)
    high = tl.load(greatest + summaries, mask=in_summary, other=0.0).to(tl.float32)
    bound = tl.dot(tl.maximum(q, 0.0), high, input_precision="ieee")
    bound += tl.dot(tl.minimum(q, 0.0), low, input_precision="ieee")
    tl.store(
        bounds + (first_row + rows[:, None]) * num_pages + pages[None, :],
        bound,
        mask=(rows[:, None] < NUM_QUERIES) & is_page[None, :],
    )


def bounds(
    queries: torch.Tensor,  # [num_reqs, num_kv_heads, num_queries, head_size] float32
    least: torch.Tensor,  # [num_blocks, num_kv_heads, head_size], the last dimension contiguous
    greatest: torch.Tensor,  # the same strides
    blocks: torch.Tensor,  # [num_reqs, num_pages] int
) -> torch.Tensor:
    """See `verification.PageSummaries.bounds`. No host synchronisation."""
    num_reqs, num_kv_heads, num_queries, head_size = queries.shape
    num_pages = blocks.shape[1]
    result = torch.empty(
        (num_reqs, num_kv_heads, num_queries, num_pages), dtype=torch.float32, device=queries.device
    )
    _bounds_kernel[(num_reqs, num_kv_heads, triton.cdiv(num_pages, BLOCK_PAGES))](
        queries.contiguous(),
        least,
        greatest,
        blocks,
        result,
        num_pages,
        least.stride(0),
        least.stride(1),
        blocks.stride(0),
        NUM_QUERIES=num_queries,
        HEAD_SIZE=head_size,
        QUERIES_PADDED=max(MIN_DOT_ROWS, triton.next_power_of_2(num_queries)),
        HEAD_PADDED=max(MIN_DOT_ROWS, triton.next_power_of_2(head_size)),
        BLOCK=BLOCK_PAGES,
    )
    return result
