# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that summarise and score pages for all layers at once.

The torch versions in verify_topk.py take some thirty operations for every layer and gather the summaries;
here every summary is read once, in place. A page's weight depends on the logits of all pages, so logits are
kept between the kernels, in a byte each.
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.softmax import Softmax
from vllm_magicdec.policies.page_summaries import PageSummaries
from vllm_magicdec.policies.verification import Verification
from vllm_magicdec.views.round import Batch
from vllm_magicdec.views.tensors import on_device

MAX_SPLIT_PAGES = 128  # pages per program; their summaries are read once
SPLIT_BYTES = 32 * 2**10  # of minima, and of maxima, in the queries' dtype; both must fit shared memory
DOT_ROWS = 16  # queries of a KV head at once, the minimum of `tl.dot`; more take registers from loads
SCORE_ROWS = 64  # of all KV heads, at once
STEPS = 8  # a logit is stored as whole steps of 1/8 below the split's peak, at most 255
NO_SINK = -1e38  # finite and below all logits
SCRATCH_BYTES = 128 * 2**20  # logits of as many layers and requests as fit, at least of one
# These change from round to round; Triton would recompile for multiples of 16.
VARYING = ["first_pair", "num_reqs", "num_pages", "num_splits"]

Caches = Mapping[int, tuple[KVRows, Softmax]]  # by layer


class LayerTable:
    """Addresses and softmax parameters of all layers, on the device."""

    def __init__(self, caches: Caches) -> None:
        tables = [caches[layer][0].keys for layer in range(len(caches))]
        assert len({table.cells.stride() for table in tables}) == 1, "the layers' caches differ in strides"
        first = tables[0].by_token
        assert first is not None, "a GPU's KV cache is not packed"
        self.keys = first  # [num_blocks, num_kv_heads, page_size, head_size]
        self._addresses = _addresses(caches)
        # Elements from the first layer's keys to each layer's.
        offsets = [(address - self._addresses[0]) // first.element_size() for address in self._addresses]
        self.offsets = on_device(offsets, first.device)
        layers = [caches[layer][1] for layer in range(len(caches))]
        scales = [(layer.scale, layer.soft_cap) for layer in layers]
        self.scales = on_device(scales, first.device, torch.float32)
        self.sinks = _stacked([layer.sinks for layer in layers])  # [num_layers, num_heads] float32

    def holds(self, caches: Caches) -> bool:
        """Whether the table describes these caches."""
        return self._addresses == _addresses(caches)


def _stacked(sinks: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Stack the sinks of all layers, also of those without; None if no layer has any."""
    some = next((of_layer for of_layer in sinks if of_layer is not None), None)
    if some is None:
        return None
    none = torch.full_like(some, NO_SINK, dtype=torch.float32)  # out of float16's range
    return torch.stack([none if of_layer is None else of_layer.float() for of_layer in sinks])


def _addresses(caches: Caches) -> list[int]:
    return [caches[layer][0].keys.cells.data_ptr() for layer in range(len(caches))]


@triton.jit
def _summarise_kernel(  # type: ignore[no-untyped-def]
    keys,  # keys of the first layer
    offsets,  # [num_layers] int64
    blocks,  # [n] int64
    num_verified,  # [n] int64
    min_keys,  # [num_layers, num_blocks, num_kv_heads, head_size], written
    max_keys,  # the same
    keys_block,  # strides, in elements
    keys_head,
    keys_token,
    summary_layer,
    summary_block,
    summary_head,
    HEAD_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAGE_PADDED: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """One program per page, layer and KV head."""
    block = tl.load(blocks + tl.program_id(0))
    layer = tl.program_id(1).to(tl.int64)
    kv_head = tl.program_id(2).to(tl.int64)  # the stride of heads may be that of all blocks
    tokens = tl.arange(0, PAGE_PADDED)
    dims = tl.arange(0, HEAD_PADDED)
    # The page's first token replaces unverified ones.
    verified = tl.minimum(tl.load(num_verified + tl.program_id(0)), PAGE_SIZE)
    tokens = tl.where(tokens < verified, tokens, 0)
    is_dim = dims < HEAD_SIZE
    page = keys + tl.load(offsets + layer) + block * keys_block + kv_head * keys_head
    key = tl.load(page + tokens[:, None] * keys_token + dims[None, :], mask=is_dim[None, :], other=0.0)
    key = tl.clamp(key.to(tl.float32), -LIMIT, LIMIT)  # the summaries may be fp8
    summary = layer * summary_layer + block * summary_block + kv_head * summary_head + dims
    tl.store(min_keys + summary, tl.min(key, 0), mask=is_dim)
    tl.store(max_keys + summary, tl.max(key, 0), mask=is_dim)


def summarise(
    table: LayerTable,
    summaries: PageSummaries,  # written
    blocks: torch.Tensor,  # [n] int64
    num_verified: torch.Tensor,  # [n] int64, at least 1
) -> None:
    """Update the summaries of pages in all layers. No host synchronisation."""
    min_keys, max_keys = summaries.min_keys, summaries.max_keys
    num_kv_heads, page_size, head_size = table.keys.shape[1:]
    _summarise_kernel[(blocks.shape[0], min_keys.shape[0], num_kv_heads)](
        table.keys,
        table.offsets,
        blocks,
        num_verified,
        min_keys,
        max_keys,
        *table.keys.stride()[:3],
        *min_keys.stride()[:3],
        HEAD_SIZE=head_size,
        PAGE_SIZE=page_size,
        HEAD_PADDED=triton.next_power_of_2(head_size),
        PAGE_PADDED=triton.next_power_of_2(page_size),
        LIMIT=torch.finfo(min_keys.dtype).max,
    )


@triton.jit(do_not_specialize=VARYING)
def _logits_kernel(  # type: ignore[no-untyped-def]
    queries,  # [num_layers, num_rows, num_heads, head_size], contiguous
    query_rows,  # [max_num_reqs, num_queries] int64, into `queries`
    context_lens,  # [num_reqs] int64
    block_table,  # [num_reqs, max_blocks] int32
    min_keys,  # [num_layers, num_blocks, num_kv_heads, head_size]
    max_keys,
    scales,  # [num_layers, 2] float32, scale and soft cap
    logits,  # [pairs, num_splits, num_kv_heads, NUM_ROWS, SPLIT] uint8, written: steps below the peak
    peaks,  # [pairs, num_splits, num_kv_heads, NUM_ROWS] float32, written: greatest logit of a split
    sums,  # the same shape, written: exp(logit - peak), summed over the split
    first_pair,
    num_reqs,
    num_pages,
    queries_layer,  # strides, in elements
    queries_token,
    table_req,
    summary_layer,
    summary_block,
    summary_head,
    NUM_QUERIES: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    STEPS: tl.constexpr,
):
    """One program per pair of layer and request, split of pages, and KV head."""
    pair = first_pair + tl.program_id(0)
    layer, req = (pair // num_reqs).to(tl.int64), (pair % num_reqs).to(tl.int64)
    split, kv_head = tl.program_id(1), tl.program_id(2)
    dims = tl.arange(0, HEAD_PADDED)
    columns = tl.arange(0, SPLIT)
    is_dim = dims < HEAD_SIZE
    num_seen = tl.minimum((tl.load(context_lens + req) - 1) // PAGE_SIZE + 1, num_pages)
    pages = split * SPLIT + columns
    is_seen = pages < num_seen
    block = tl.load(block_table + req * table_req + pages, mask=is_seen, other=0).to(tl.int64)
    summaries = layer * summary_layer + kv_head * summary_head + dims
    cells = block[None, :] * summary_block + summaries[:, None]
    mask = is_seen[None, :] & is_dim[:, None]
    # Stay in the model's dtype: products are exact, on tensor cores.
    dtype = queries.dtype.element_ty
    high = tl.load(max_keys + cells, mask=mask, other=0.0).to(dtype)
    low = tl.load(min_keys + cells, mask=mask, other=0.0).to(dtype)

    scale = tl.load(scales + 2 * layer)
    soft_cap = tl.load(scales + 2 * layer + 1)
    divisor = tl.where(soft_cap > 0, soft_cap, 1.0)
    tile = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + split) * tl.num_programs(2) + kv_head
    for first_row in range(0, NUM_ROWS, BLOCK_ROWS):
        rows = first_row + tl.arange(0, BLOCK_ROWS)
        is_row = rows < NUM_ROWS
        token = tl.load(query_rows + req * NUM_QUERIES + rows // GROUP, mask=is_row, other=0)
        row_starts = token * queries_token + (kv_head * GROUP + rows % GROUP) * HEAD_SIZE
        q = tl.load(
            queries + layer * queries_layer + row_starts[:, None] + dims[None, :],
            mask=is_row[:, None] & is_dim[None, :],
            other=0.0,
        )
        above = tl.maximum(q.to(tl.float32), 0.0).to(dtype)
        below = tl.minimum(q.to(tl.float32), 0.0).to(dtype)
        logit = tl.dot(above, high, input_precision="ieee")
        logit += tl.dot(below, low, input_precision="ieee")
        logit *= scale
        # tanh(x) = 2 sigmoid(2 x) - 1
        capped = soft_cap * (2 * tl.sigmoid(2 * logit / divisor) - 1)
        logit = tl.where(soft_cap > 0, capped, logit)
        logit = tl.where(is_seen[None, :], logit, float("-inf"))
        peak = tl.maximum(tl.max(logit, 1), -1e38)  # finite even if nothing is seen
        distance = peak[:, None] - logit
        steps = tl.minimum(distance * STEPS + 0.5, 255.0).to(tl.uint8)
        row_index = tile * NUM_ROWS + rows
        tl.store(logits + row_index[:, None] * SPLIT + columns[None, :], steps, mask=is_row[:, None])
        tl.store(peaks + row_index, peak, mask=is_row)
        tl.store(sums + row_index, tl.sum(tl.exp(-distance), 1), mask=is_row)


@triton.jit(do_not_specialize=VARYING)
def _factors_kernel(  # type: ignore[no-untyped-def]
    peaks,  # from `_logits_kernel`; overwritten by the weight of each row's peak in its split
    sums,
    positions,  # [max_num_reqs, num_queries] int64
    context_lens,  # [num_reqs] int64
    sinks,  # [num_layers, num_kv_heads * GROUP] float32
    first_pair,
    num_reqs,
    num_splits,
    NUM_QUERIES: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One program per pair, KV head and block of its queries: weights over all splits; 0 if rejected."""
    pair = first_pair + tl.program_id(0).to(tl.int64)
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    rows = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    splits = tl.arange(0, SPLITS_PADDED)
    req = pair % num_reqs
    is_row = rows < NUM_ROWS
    context_len = tl.load(context_lens + req)
    position = tl.load(positions + req * NUM_QUERIES + rows // GROUP, mask=is_row, other=context_len)
    tiles = (tl.program_id(0).to(tl.int64) * num_splits + splits) * num_kv_heads + kv_head
    cells = tiles[:, None] * NUM_ROWS + rows[None, :]
    mask = (splits < num_splits)[:, None] & is_row[None, :]
    split_peaks = tl.load(peaks + cells, mask=mask, other=-1e38)
    split_sums = tl.load(sums + cells, mask=mask, other=0.0)
    peak = tl.max(split_peaks, 0)
    if SINKS:
        head = (pair // num_reqs * num_kv_heads + kv_head) * GROUP + rows % GROUP
        sink = tl.load(sinks + head, mask=is_row, other=-1e38)
        peak = tl.maximum(peak, sink)
    ratios = tl.exp(split_peaks - peak[None, :])
    total = tl.sum(split_sums * ratios, 0)
    if SINKS:
        total += tl.exp(sink - peak)
    weight = tl.where((position < context_len)[None, :], ratios / total[None, :], 0.0)
    tl.store(peaks + cells, weight, mask=mask)


@triton.jit(do_not_specialize=VARYING)
def _scores_kernel(  # type: ignore[no-untyped-def]
    logits,  # from `_logits_kernel`
    factors,  # from `_factors_kernel`, in the shape of peaks
    context_lens,  # [num_reqs] int64
    scores,  # [num_layers * num_reqs, num_pages] float32, written
    first_pair,
    num_reqs,
    num_pages,
    ALL_ROWS: tl.constexpr,  # num_kv_heads * NUM_ROWS
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    STEPS: tl.constexpr,
):
    """One program per pair and split: the attention weights of its pages, summed over heads and queries."""
    pair = first_pair + tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    columns = tl.arange(0, SPLIT)
    first = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + split) * ALL_ROWS
    score = tl.zeros((SPLIT,), tl.float32)
    for first_row in range(0, ALL_ROWS, BLOCK_ROWS):
        rows = first_row + tl.arange(0, BLOCK_ROWS)
        factor = tl.load(factors + first + rows, mask=rows < ALL_ROWS, other=0.0)
        steps = tl.load(
            logits + (first + rows)[:, None] * SPLIT + columns[None, :],
            mask=(factor > 0)[:, None],
            other=255,
        )
        score += tl.sum(factor[:, None] * tl.exp(steps.to(tl.float32) * (-1.0 / STEPS)), 0)
    pages = split * SPLIT + columns
    is_seen = pages < (tl.load(context_lens + pair % num_reqs) - 1) // PAGE_SIZE + 1
    tl.store(scores + pair * num_pages + pages, tl.where(is_seen, score, 0.0), mask=pages < num_pages)


def score_pages(
    table: LayerTable, summaries: PageSummaries, verification: Verification, batch: Batch, num_pages: int
) -> torch.Tensor:
    """Score pages; see `VerificationPolicy.score_pages`. No host synchronisation."""
    queries, context_lens, block_table = verification.queries, batch.context_lens, batch.block_table
    num_layers, _, num_heads, head_size = queries.shape
    num_queries = verification.rows.shape[1]
    num_kv_heads, page_size = table.keys.shape[1:3]
    group = num_heads // num_kv_heads
    num_rows = num_queries * group
    head_padded = max(DOT_ROWS, triton.next_power_of_2(head_size))
    split_pages = min(MAX_SPLIT_PAGES, SPLIT_BYTES // (head_padded * queries.element_size()))
    num_reqs = context_lens.shape[0]
    num_splits = triton.cdiv(num_pages, split_pages)
    scores = queries.new_empty((num_layers, num_reqs, num_pages), dtype=torch.float32)
    num_pairs, rows_of_pair = num_layers * num_reqs, num_kv_heads * num_rows
    pair_bytes = num_splits * rows_of_pair * (split_pages + 2 * 4)  # with a peak and a sum
    pairs_at_once = min(num_pairs, max(1, SCRATCH_BYTES // pair_bytes))
    shape = (pairs_at_once, num_splits * rows_of_pair)
    logits = queries.new_empty((*shape, split_pages), dtype=torch.uint8)
    # Halves of one tensor could differ in alignment, for which Triton compiles another kernel.
    peaks, sums = (queries.new_empty(shape, dtype=torch.float32) for _ in range(2))
    for first in range(0, num_pairs, pairs_at_once):
        num_programs = min(pairs_at_once, num_pairs - first)
        _logits_kernel[(num_programs, num_splits, num_kv_heads)](
            queries,
            verification.rows,
            context_lens,
            block_table,
            summaries.min_keys,
            summaries.max_keys,
            table.scales,
            logits,
            peaks,
            sums,
            first,
            num_reqs,
            num_pages,
            *queries.stride()[:2],
            block_table.stride(0),
            *summaries.min_keys.stride()[:3],
            NUM_QUERIES=num_queries,
            NUM_ROWS=num_rows,
            GROUP=group,
            HEAD_SIZE=head_size,
            PAGE_SIZE=page_size,
            BLOCK_ROWS=DOT_ROWS,
            HEAD_PADDED=head_padded,
            SPLIT=split_pages,
            STEPS=STEPS,
        )
        _factors_kernel[(num_programs, num_kv_heads, triton.cdiv(num_rows, DOT_ROWS))](
            peaks,
            sums,
            verification.positions,
            context_lens,
            table.scales if table.sinks is None else table.sinks,
            first,
            num_reqs,
            num_splits,
            NUM_QUERIES=num_queries,
            NUM_ROWS=num_rows,
            GROUP=group,
            BLOCK_ROWS=DOT_ROWS,
            SPLITS_PADDED=triton.next_power_of_2(triton.cdiv(block_table.shape[1], split_pages)),
            SINKS=table.sinks is not None,
        )
        _scores_kernel[(num_programs, num_splits)](
            logits,
            peaks,
            context_lens,
            scores,
            first,
            num_reqs,
            num_pages,
            ALL_ROWS=num_kv_heads * num_rows,
            PAGE_SIZE=page_size,
            BLOCK_ROWS=SCORE_ROWS,
            SPLIT=split_pages,
            STEPS=STEPS,
        )
    return scores
