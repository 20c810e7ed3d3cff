# SPDX-License-Identifier: Apache-2.0
"""Draft attention as a Triton kernel: flash decoding over lists of slots, read in place."""

import os

import torch
from vllm.triton_utils import tl, triton

from vllm_magicdec.attention.rows import KVRows

_TILE = 64  # slots per iteration
_LEAST_DOT = 16  # tl.dot takes no fewer rows
# Triton's interpreter (3.9) multiplies the bit patterns of bfloat16.
_UPCAST = os.environ.get("TRITON_INTERPRET") == "1"


def attend(
    query: torch.Tensor,
    rows: KVRows,
    slots: torch.Tensor,
    lens: torch.Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """See `attention.attend`; needs a cache whose head dims lie side by side."""
    num_reqs, num_heads, size = query.shape
    keys, values = rows.keys, rows.values
    assert keys.ndim == values.ndim == 4 and keys.stride(-1) == values.stride(-1) == 1
    query, slots = query.contiguous(), slots if slots.stride(-1) == 1 else slots.contiguous()
    output = torch.empty_like(query)
    group = num_heads // rows.num_kv_heads
    _attend_kernel[(num_reqs, rows.num_kv_heads)](
        query,
        keys,
        values,
        slots,
        lens,
        output,
        scale,
        soft_cap,
        *keys.stride()[:3],
        *values.stride()[:3],
        *slots.stride()[:2],
        PAGE=rows.page_size,
        GROUP=group,
        GROUP_PADDED=max(_LEAST_DOT, triton.next_power_of_2(group)),
        SIZE=size,
        SIZE_PADDED=max(_LEAST_DOT, triton.next_power_of_2(size)),
        HAS_SOFT_CAP=soft_cap > 0,
        UPCAST=_UPCAST,
        TILE=_TILE,
    )
    return output


@triton.jit
def _attend_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [num_reqs, num_heads, size], contiguous; the output too
    key_ptr,  # [num_blocks, num_kv_heads, page, size]
    value_ptr,
    slot_ptr,  # [num_reqs, num_kv_heads, budget]
    len_ptr,  # [num_reqs]
    output_ptr,
    scale,
    soft_cap,
    key_block,
    key_head,
    key_place,
    value_block,
    value_head,
    value_place,
    slot_req,
    slot_head,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    UPCAST: tl.constexpr,
    TILE: tl.constexpr,
):
    """One request and KV head: online softmax over tiles of its list, a group of query heads at once."""
    req = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    members = tl.arange(0, GROUP_PADDED)
    dims = tl.arange(0, SIZE_PADDED)
    is_member = (members < GROUP)[:, None] & (dims < SIZE)[None, :]
    own = (req * tl.num_programs(1) + head) * GROUP * SIZE + members[:, None] * SIZE + dims[None, :]
    query = tl.load(query_ptr + own, mask=is_member, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    length = tl.load(len_ptr + req)
    slot_ptr += req * slot_req + head * slot_head

    greatest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    attended = tl.zeros([GROUP_PADDED, SIZE_PADDED], tl.float32)
    for start in range(0, length, TILE):
        columns = start + tl.arange(0, TILE)
        is_valid = columns < length
        slots = tl.load(slot_ptr + columns, mask=is_valid, other=0)
        block, place = (slots // PAGE).to(tl.int64), (slots % PAGE).to(tl.int64)
        is_read = is_valid[:, None] & (dims < SIZE)[None, :]
        at = block * key_block + head * key_head + place * key_place
        keys = tl.load(key_ptr + at[:, None] + dims[None, :], mask=is_read, other=0.0)
        logits = tl.dot(query, tl.trans(keys).to(query.dtype), input_precision="ieee") * scale
        if HAS_SOFT_CAP:
            # tanh(x) = 2 sigmoid(2 x) - 1
            logits = soft_cap * (2 * tl.sigmoid(2 * logits / soft_cap) - 1)
        logits = tl.where(is_valid[None, :], logits, float("-inf"))
        new_greatest = tl.maximum(greatest, tl.max(logits, 1))
        weights = tl.exp(logits - new_greatest[:, None])
        shrink = tl.exp(greatest - new_greatest)
        at = block * value_block + head * value_head + place * value_place
        values = tl.load(value_ptr + at[:, None] + dims[None, :], mask=is_read, other=0.0)
        if UPCAST:
            values = values.to(tl.float32)
        part = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        attended = attended * shrink[:, None] + part
        total = total * shrink + tl.sum(weights, 1)
        greatest = new_greatest
    attended = attended / total[:, None]
    tl.store(output_ptr + own, attended.to(output_ptr.dtype.element_ty), mask=is_member)
