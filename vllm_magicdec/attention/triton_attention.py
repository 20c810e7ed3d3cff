# SPDX-License-Identifier: Apache-2.0
"""Draft attention by a Triton kernel that reads keys and values through the cache's strides."""

import torch
import triton
import triton.language as tl

from vllm_magicdec.attention.rows import FP8_DTYPES, KVRows
from vllm_magicdec.attention.softmax import Softmax

MAX_BLOCK_TOKENS = 64
# One block's keys or values; both must fit into the 99 KB of shared memory on Ada and smaller Ampere GPUs.
MAX_BLOCK_BYTES = 32 * 2**10
MIN_DOT_ROWS = 16  # minimum of `tl.dot`


@triton.jit
def _decode_kernel(  # type: ignore[no-untyped-def]
    query,  # [num_reqs, num_kv_heads * GROUP, HEAD_SIZE]
    keys,  # [num_blocks, num_kv_heads, PAGE_SIZE, HEAD_SIZE]
    values,  # [num_blocks, num_kv_heads, PAGE_SIZE, HEAD_SIZE]
    slots,  # [num_reqs, num_kv_heads, budget] int32
    lens,  # [num_reqs] int32
    sinks,  # [num_kv_heads * GROUP]
    output,  # [num_reqs, num_kv_heads * GROUP, HEAD_SIZE], contiguous
    scale,
    soft_cap,
    value_scale,
    query_req,  # strides, in elements, named tensor_dimension
    query_head,
    query_dim,
    key_block,
    key_head,
    key_token,
    key_dim,
    value_block,
    value_head,
    value_token,
    value_dim,
    slots_req,
    slots_head,
    slots_column,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_SIZE: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens read at once
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One program per request and KV head: an online softmax over blocks of the list of slots."""
    req = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    members = tl.arange(0, GROUP_PADDED)
    dims = tl.arange(0, HEAD_PADDED)
    heads = kv_head * GROUP + members
    head_mask = (members[:, None] < GROUP) & (dims[None, :] < HEAD_SIZE)
    q = tl.load(
        query + req * query_req + heads[:, None] * query_head + dims[None, :] * query_dim,
        mask=head_mask,
        other=0.0,
    )

    length = tl.load(lens + req)
    list_start = slots + req * slots_req + kv_head * slots_head
    if SINKS:
        # A sink acts as a token with value 0.
        highest = tl.load(sinks + heads, mask=members < GROUP, other=0.0).to(tl.float32)
        weight_sum = tl.full([GROUP_PADDED], 1.0, tl.float32)
    else:
        highest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
        weight_sum = tl.zeros([GROUP_PADDED], tl.float32)
    result = tl.zeros([GROUP_PADDED, HEAD_PADDED], tl.float32)
    for start in range(0, length, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        in_view = columns < length
        slot = tl.load(list_start + columns * slots_column, mask=in_view, other=0).to(tl.int64)
        block = slot // PAGE_SIZE
        token = slot % PAGE_SIZE

        key_rows = block * key_block + kv_head * key_head + token * key_token
        k = tl.load(
            keys + key_rows[None, :] + dims[:, None] * key_dim,
            mask=in_view[None, :] & (dims[:, None] < HEAD_SIZE),
            other=0.0,
        ).to(q.dtype)
        logits = tl.dot(q, k, input_precision="ieee") * scale
        if SOFT_CAP:
            # tanh(x) = 2 sigmoid(2 x) - 1
            logits = soft_cap * (2 * tl.sigmoid(2 * logits / soft_cap) - 1)
        logits = tl.where(in_view[None, :], logits, float("-inf"))

        new_highest = tl.maximum(highest, tl.max(logits, 1))
        rescale = tl.exp(highest - new_highest)
        weights = tl.exp(logits - new_highest[:, None])
        value_rows = block * value_block + kv_head * value_head + token * value_token
        v = tl.load(
            values + value_rows[:, None] + dims[None, :] * value_dim,
            mask=in_view[:, None] & (dims[None, :] < HEAD_SIZE),
            other=0.0,
        ).to(q.dtype)
        result = result * rescale[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        weight_sum = weight_sum * rescale + tl.sum(weights, 1)
        highest = new_highest

    result = result * (value_scale / weight_sum)[:, None]
    row = req * tl.num_programs(1) * GROUP + heads
    tl.store(
        output + row[:, None] * HEAD_SIZE + dims[None, :],
        result.to(output.dtype.element_ty),
        mask=head_mask,
    )


def block_tokens(head_padded: int, element_size: int) -> int:
    """Return the tokens per block of the kernel; `element_size` in bytes."""
    return max(MIN_DOT_ROWS, min(MAX_BLOCK_TOKENS, MAX_BLOCK_BYTES // (head_padded * element_size)))


def attend(
    query: torch.Tensor,  # [num_reqs, num_heads, head_size]
    rows: KVRows,
    slots: torch.Tensor,  # [num_reqs, num_kv_heads, budget] int32
    lens: torch.Tensor,  # [num_reqs] int32
    softmax: Softmax,  # its sinks are contiguous
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Attend without host synchronisation, also in a CUDA graph; see `torch_attention.attend`.

    As in other flash kernels, softmax weights are rounded to half precision for half-precision caches.
    """
    keys, values = rows.keys.by_token, rows.values.by_token
    if keys is None or values is None:
        raise ValueError("the Triton draft attention reads no packed KV cache; use the torch one")
    num_reqs, num_heads, head_size = query.shape
    group = num_heads // rows.num_kv_heads
    head_padded = max(MIN_DOT_ROWS, triton.next_power_of_2(head_size))
    output = torch.empty((num_reqs, num_heads, head_size), dtype=query.dtype, device=query.device)
    if keys.dtype not in FP8_DTYPES:  # half precision holds fp8 exactly
        query = query.to(torch.promote_types(query.dtype, keys.dtype))
    _decode_kernel[(num_reqs, rows.num_kv_heads)](
        query,
        keys,
        values,
        slots,
        lens,
        lens if softmax.sinks is None else softmax.sinks,
        output,
        softmax.scale,
        softmax.soft_cap,
        value_scale,
        *query.stride(),
        *keys.stride(),
        *values.stride(),
        *slots.stride(),
        PAGE_SIZE=rows.page_size,
        GROUP=group,
        HEAD_SIZE=head_size,
        GROUP_PADDED=max(MIN_DOT_ROWS, triton.next_power_of_2(group)),
        HEAD_PADDED=head_padded,
        BLOCK=block_tokens(head_padded, query.element_size()),
        SOFT_CAP=softmax.soft_cap > 0,
        SINKS=softmax.sinks is not None,
    )
    return output
