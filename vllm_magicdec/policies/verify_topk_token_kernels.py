# SPDX-License-Identifier: Apache-2.0
"""Scores of the tokens of a policy's best pages on a GPU: one Triton kernel for all layers.

The torch version is `verify_topk.VerifyTopK.score_tokens`, which gathers the keys; here they are read in
place.
"""

import torch
import triton
import triton.language as tl

from vllm_magicdec.policies.verify_topk_kernels import MIN_DOT_ROWS, LayerTable, block_rows_of

BLOCK_TOKENS = 64  # per tile of logits
# They differ from round to round; Triton would compile again for those that 16 divides.
VARYING = ["num_reqs", "num_candidates"]


@triton.jit
def _load_logits(  # type: ignore[no-untyped-def]
    q,  # [BLOCK_ROWS, HEAD_PADDED]
    first,  # of the block of candidate tokens
    pages,  # of this layer, request and KV head, [num_candidates] int64
    table,  # of the request's own pages
    keys,  # of this layer and KV head
    keys_block,  # strides, in elements
    keys_token,
    num_candidates,
    sink,
    end,
    scale,
    soft_cap,
    HEAD_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Logits of a block of candidate tokens, [BLOCK_ROWS, BLOCK], and which of them can be chosen."""
    tokens = first + tl.arange(0, BLOCK)
    dims = tl.arange(0, HEAD_PADDED)
    is_token = tokens < num_candidates * PAGE_SIZE
    page = tl.load(pages + tokens // PAGE_SIZE, mask=is_token, other=0)
    places = tokens % PAGE_SIZE
    position = page * PAGE_SIZE + places
    is_eligible = is_token & (position >= sink) & (position < end)
    block = tl.load(table + page, mask=is_eligible, other=0).to(tl.int64)
    key = tl.load(
        keys + block[None, :] * keys_block + places[None, :] * keys_token + dims[:, None],
        mask=is_eligible[None, :] & (dims < HEAD_SIZE)[:, None],
        other=0.0,
    )
    logit = tl.dot(q, key.to(q.dtype), input_precision="ieee") * scale
    # tanh(x) = 2 sigmoid(2 x) - 1
    capped = soft_cap * (2 * tl.sigmoid(2 * logit / tl.where(soft_cap > 0, soft_cap, 1.0)) - 1)
    logit = tl.where(soft_cap > 0, capped, logit)
    return tl.where(is_eligible[None, :], logit, float("-inf")), is_eligible


@triton.jit(do_not_specialize=VARYING)
def _token_scores_kernel(  # type: ignore[no-untyped-def]
    keys,  # of the first layer of all
    offsets,  # [num_layers] int64
    queries,  # [num_layers, max_num_reqs, num_queries, num_heads, head_size], contiguous
    positions,  # [max_num_reqs, num_queries] int64
    context_lens,  # [num_reqs] int64
    block_table,  # [num_reqs, max_blocks] int32
    pages,  # [num_layers, num_reqs, num_kv_heads, num_candidates] int64, contiguous
    ends,  # [num_reqs] int64
    scales,  # [num_layers, 2] float32, scale and soft cap
    sinks,  # [num_layers, num_kv_heads * GROUP] float32
    scores,  # [num_layers, num_reqs, num_kv_heads, NUM_ROW_BLOCKS, num_candidates * PAGE_SIZE], written
    num_reqs,
    num_candidates,
    sink,
    queries_layer,  # strides, in elements
    queries_req,
    queries_token,
    keys_block,
    keys_head,
    keys_token,
    table_req,
    NUM_QUERIES: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_ROW_BLOCKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Of one layer and request, one KV head's queries, or a block of them: weights of candidate tokens.

    The keys are few enough to stay in the cache, so logits are made twice and not kept.
    """
    pair = tl.program_id(0).to(tl.int64)
    layer, req = pair // num_reqs, pair % num_reqs
    kv_head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, HEAD_PADDED)
    is_row = rows < NUM_ROWS
    row_starts = rows // GROUP * queries_token + (kv_head * GROUP + rows % GROUP) * HEAD_SIZE
    q = tl.load(
        queries + layer * queries_layer + req * queries_req + row_starts[:, None] + dims[None, :],
        mask=is_row[:, None] & (dims < HEAD_SIZE)[None, :],
        other=0.0,
    )
    context_len = tl.load(context_lens + req)
    position = tl.load(positions + req * NUM_QUERIES + rows // GROUP, mask=is_row, other=context_len)
    is_accepted = position < context_len

    own_keys = keys + tl.load(offsets + layer) + kv_head * keys_head
    own_pages = pages + (pair * tl.num_programs(1) + kv_head) * num_candidates
    table = block_table + req * table_req
    end = tl.load(ends + req)
    scale = tl.load(scales + 2 * layer)
    soft_cap = tl.load(scales + 2 * layer + 1)
    num_tokens = num_candidates * PAGE_SIZE

    if SINKS:
        place = (layer * tl.num_programs(1) + kv_head) * GROUP + rows % GROUP
        peak = tl.load(sinks + place, mask=is_row, other=0.0)
        total = tl.full((BLOCK_ROWS,), 1.0, tl.float32)
    else:
        peak = tl.full((BLOCK_ROWS,), -1e38, tl.float32)  # finite, also where nothing can be chosen
        total = tl.zeros((BLOCK_ROWS,), tl.float32)
    for first in range(0, num_tokens, BLOCK):
        logit, _ = _load_logits(
            q,
            first,
            own_pages,
            table,
            own_keys,
            keys_block,
            keys_token,
            num_candidates,
            sink,
            end,
            scale,
            soft_cap,
            HEAD_SIZE,
            PAGE_SIZE,
            HEAD_PADDED,
            BLOCK,
        )
        new_peak = tl.maximum(peak, tl.max(logit, 1))
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(logit - new_peak[:, None]), 1)
        peak = new_peak
    share = tl.where(is_accepted, 1.0, 0.0) / tl.where(total > 0, total, 1.0)
    own_scores = (
        scores + ((pair * tl.num_programs(1) + kv_head) * NUM_ROW_BLOCKS + tl.program_id(2)) * num_tokens
    )
    for first in range(0, num_tokens, BLOCK):
        logit, is_eligible = _load_logits(
            q,
            first,
            own_pages,
            table,
            own_keys,
            keys_block,
            keys_token,
            num_candidates,
            sink,
            end,
            scale,
            soft_cap,
            HEAD_SIZE,
            PAGE_SIZE,
            HEAD_PADDED,
            BLOCK,
        )
        score = tl.sum(tl.exp(logit - peak[:, None]) * share[:, None], 0)
        tokens = first + tl.arange(0, BLOCK)
        tl.store(own_scores + tokens, tl.where(is_eligible, score, -1.0), mask=tokens < num_tokens)


def score_tokens(
    table: LayerTable,
    queries: torch.Tensor,  # [num_layers, max_num_reqs, num_queries, num_heads, head_size], contiguous
    positions: torch.Tensor,  # [max_num_reqs, num_queries] int64
    context_lens: torch.Tensor,  # [num_reqs] int64
    block_table: torch.Tensor,  # [num_reqs, max_blocks] int32
    pages: torch.Tensor,  # [len(layers), num_reqs, num_kv_heads, num_candidates] int64, contiguous
    ends: torch.Tensor,  # [num_reqs] int64
    *,
    layers: range,
    sink: int,
) -> torch.Tensor:
    """See `verify_topk.VerifyTopK.score_tokens`. No host synchronisation."""
    num_queries, num_heads, head_size = queries.shape[2:]
    num_kv_heads, page_size = table.keys.shape[1:3]
    num_rows = num_queries * (num_heads // num_kv_heads)
    block_rows = block_rows_of(num_rows)
    num_row_blocks = triton.cdiv(num_rows, block_rows)
    _, num_reqs, _, num_candidates = pages.shape
    shape = (len(layers), num_reqs, num_kv_heads, num_row_blocks, num_candidates * page_size)
    scores = torch.empty(shape, dtype=torch.float32, device=queries.device)
    own_layers = slice(layers.start, layers.stop)
    _token_scores_kernel[(len(layers) * num_reqs, num_kv_heads, num_row_blocks)](
        table.keys,
        table.offsets[own_layers],
        queries[own_layers],
        positions,
        context_lens,
        block_table,
        pages,
        ends,
        table.scales[own_layers],
        table.scales if table.sinks is None else table.sinks[own_layers],
        scores,
        num_reqs,
        num_candidates,
        sink,
        *queries.stride()[:3],
        *table.keys.stride()[:3],
        block_table.stride(0),
        NUM_QUERIES=num_queries,
        NUM_ROWS=num_rows,
        GROUP=num_heads // num_kv_heads,
        HEAD_SIZE=head_size,
        PAGE_SIZE=page_size,
        NUM_ROW_BLOCKS=num_row_blocks,
        BLOCK_ROWS=block_rows,
        HEAD_PADDED=max(MIN_DOT_ROWS, triton.next_power_of_2(head_size)),
        BLOCK=BLOCK_TOKENS,
        SINKS=table.sinks is not None,
    )
    return scores.squeeze(3) if num_row_blocks == 1 else scores.sum(3)
