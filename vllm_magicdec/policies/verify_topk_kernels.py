# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that summarise and score pages for all layers at once.

The torch versions in verify_topk.py take some thirty operations for every layer and gather the summaries;
here every summary is read once, in place.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.softmax import Softmax
from vllm_magicdec.policies.verification import Verification
from vllm_magicdec.views.base import Batch

if TYPE_CHECKING:  # verify_topk.py imports this module
    from vllm_magicdec.policies.verify_topk import PageSummaries

BLOCK_PAGES = 32  # per tile of logits
SPLIT_PAGES = 256  # per program that bounds logits
SCORE_PAGES = 128  # per program that sums weights
MAX_BLOCK_ROWS = 64
MIN_DOT_ROWS = 16  # minimum of `tl.dot`
NO_SINK = -1e38  # finite and below all logits
SCRATCH_BYTES = 128 * 2**20  # logits of as many layers and requests as fit
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
        self.offsets = torch.tensor(offsets, dtype=torch.int64, device=first.device)
        layers = [caches[layer][1] for layer in range(len(caches))]
        scales = [(layer.scale, layer.soft_cap) for layer in layers]
        self.scales = torch.tensor(scales, dtype=torch.float32, device=first.device)
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
    key = key.to(tl.float32)
    summary = layer * summary_layer + block * summary_block + kv_head * summary_head + dims
    tl.store(min_keys + summary, tl.min(key, 0), mask=is_dim)
    tl.store(max_keys + summary, tl.max(key, 0), mask=is_dim)


def summarise(
    table: LayerTable,
    summaries: "PageSummaries",  # written
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
    )


@triton.jit(do_not_specialize=VARYING)
def _logits_kernel(  # type: ignore[no-untyped-def]
    queries,  # [num_layers, max_num_reqs, num_queries, num_heads, head_size], contiguous
    context_lens,  # [num_reqs] int64
    block_table,  # [num_reqs, max_blocks] int32
    min_keys,  # [num_layers, num_blocks, num_kv_heads, head_size]
    max_keys,
    scales,  # [num_layers, 2] float32, scale and soft cap
    logits,  # [pairs, num_kv_heads, NUM_ROWS, num_pages] float32, written like the next two
    peaks,  # [pairs, num_kv_heads, NUM_ROWS, num_splits] float32, greatest logit of a split
    sums,  # the same shape: exp(logit - peak), summed over the split
    first_pair,
    num_reqs,
    num_pages,
    num_splits,
    queries_layer,  # strides, in elements
    queries_req,
    queries_token,
    table_req,
    summary_layer,
    summary_block,
    summary_head,
    NUM_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_ROW_BLOCKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program per pair of layer and request, block of a KV head's queries, and split of pages."""
    pair = first_pair + tl.program_id(0)
    layer, req = (pair // num_reqs).to(tl.int64), (pair % num_reqs).to(tl.int64)
    kv_head = tl.program_id(1) // NUM_ROW_BLOCKS
    rows = tl.program_id(1) % NUM_ROW_BLOCKS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(2)
    dims = tl.arange(0, HEAD_PADDED)
    is_row, is_dim = rows < NUM_ROWS, dims < HEAD_SIZE

    row_starts = rows // GROUP * queries_token + (kv_head * GROUP + rows % GROUP) * HEAD_SIZE
    q = tl.load(
        queries + layer * queries_layer + req * queries_req + row_starts[:, None] + dims[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )
    # Stay in the model's dtype: products are exact, on tensor cores.
    above = tl.maximum(q.to(tl.float32), 0.0).to(q.dtype)
    below = tl.minimum(q.to(tl.float32), 0.0).to(q.dtype)
    scale = tl.load(scales + 2 * layer)
    soft_cap = tl.load(scales + 2 * layer + 1)
    divisor = tl.where(soft_cap > 0, soft_cap, 1.0)

    num_seen = (tl.load(context_lens + req) - 1) // PAGE_SIZE + 1
    summaries = layer * summary_layer + kv_head * summary_head + dims
    num_kv_heads = tl.num_programs(1) // NUM_ROW_BLOCKS
    row_index = (tl.program_id(0).to(tl.int64) * num_kv_heads + kv_head) * NUM_ROWS + rows
    peak = tl.full((BLOCK_ROWS,), -1e38, tl.float32)  # finite even if nothing is seen
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    end = tl.minimum(tl.minimum((split + 1) * SPLIT, num_pages), num_seen)
    for first_page in range(split * SPLIT, end, BLOCK):
        pages = first_page + tl.arange(0, BLOCK)
        is_seen = pages < end
        block = tl.load(block_table + req * table_req + pages, mask=is_seen, other=0).to(tl.int64)
        cells = block[None, :] * summary_block + summaries[:, None]
        mask = is_seen[None, :] & is_dim[:, None]
        high = tl.load(max_keys + cells, mask=mask, other=0.0).to(q.dtype)
        low = tl.load(min_keys + cells, mask=mask, other=0.0).to(q.dtype)
        logit = tl.dot(above, high, input_precision="ieee")
        logit += tl.dot(below, low, input_precision="ieee")
        logit *= scale
        # tanh(x) = 2 sigmoid(2 x) - 1
        capped = soft_cap * (2 * tl.sigmoid(2 * logit / divisor) - 1)
        logit = tl.where(soft_cap > 0, capped, logit)
        tl.store(
            logits + row_index[:, None] * num_pages + pages[None, :],
            logit,
            mask=is_row[:, None] & is_seen[None, :],
        )
        logit = tl.where(is_seen[None, :], logit, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logit, 1))
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(logit - new_peak[:, None]), 1)
        peak = new_peak
    tl.store(peaks + row_index * num_splits + split, peak, mask=is_row)
    tl.store(sums + row_index * num_splits + split, total, mask=is_row)


@triton.jit(do_not_specialize=VARYING)
def _scores_kernel(  # type: ignore[no-untyped-def]
    logits,  # from `_logits_kernel`, like the next two
    peaks,
    sums,
    positions,  # [max_num_reqs, num_queries] int64
    context_lens,  # [num_reqs] int64
    sinks,  # [num_layers, num_kv_heads * GROUP] float32
    scores,  # [num_layers * num_reqs, num_pages] float32, written
    first_pair,
    num_reqs,
    num_pages,
    num_splits,
    NUM_QUERIES: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_ROW_BLOCKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One program per pair and block of pages: their attention weights, summed over heads."""
    pair = first_pair + tl.program_id(0).to(tl.int64)
    req = pair % num_reqs
    pages = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    splits = tl.arange(0, SPLITS_PADDED)
    context_len = tl.load(context_lens + req)
    is_seen = pages < tl.minimum((context_len - 1) // PAGE_SIZE + 1, num_pages)
    first_head = tl.program_id(0).to(tl.int64) * NUM_KV_HEADS

    score = tl.zeros((BLOCK,), tl.float32)
    for index in range(NUM_KV_HEADS * NUM_ROW_BLOCKS):
        rows = index % NUM_ROW_BLOCKS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_row = rows < NUM_ROWS
        position = tl.load(positions + req * NUM_QUERIES + rows // GROUP, mask=is_row, other=context_len)
        is_accepted = position < context_len
        row_index = (first_head + index // NUM_ROW_BLOCKS) * NUM_ROWS + rows
        cells = row_index[:, None] * num_splits + splits[None, :]
        mask = is_accepted[:, None] & (splits[None, :] < num_splits)
        split_peaks = tl.load(peaks + cells, mask=mask, other=-1e38)
        split_sums = tl.load(sums + cells, mask=mask, other=0.0)
        peak = tl.max(split_peaks, 1)
        if SINKS:
            kv_head = index // NUM_ROW_BLOCKS
            head = (pair // num_reqs * NUM_KV_HEADS + kv_head) * GROUP + rows % GROUP
            sink = tl.load(sinks + head, mask=is_accepted, other=float("-inf"))
            peak = tl.maximum(peak, sink)
        total = tl.sum(split_sums * tl.exp(split_peaks - peak[:, None]), 1)
        if SINKS:
            total += tl.exp(sink - peak)
        logit = tl.load(
            logits + row_index[:, None] * num_pages + pages[None, :],
            mask=is_accepted[:, None] & is_seen[None, :],
            other=float("-inf"),
        )
        weight = tl.exp(logit - peak[:, None]) / tl.where(is_accepted, total, 1.0)[:, None]
        score += tl.sum(weight, 0)
    tl.store(scores + pair * num_pages + pages, score, mask=pages < num_pages)


def _pairs_at_once(num_pairs: int, rows_of_pair: int, num_pages: int) -> int:
    """Return the number of pairs of a layer and a request whose logits fit the scratch, at least 1."""
    return min(num_pairs, max(1, SCRATCH_BYTES // (4 * rows_of_pair * num_pages)))


def logits_bytes(num_pairs: int, rows_of_pair: int, num_pages: int) -> int:
    """Return the memory of the logits of `score_pages`.

    Args:
        num_pairs: layers x requests.
        rows_of_pair: queries x query heads.
        num_pages: maximum pages of a request.
    """
    return 4 * _pairs_at_once(num_pairs, rows_of_pair, num_pages) * rows_of_pair * num_pages


def score_pages(
    table: LayerTable, summaries: "PageSummaries", verification: Verification, batch: Batch, num_pages: int
) -> torch.Tensor:
    """Score pages; see `VerificationPolicy.score_pages`. No host synchronisation."""
    queries, context_lens, block_table = verification.queries, batch.context_lens, batch.block_table
    num_layers, _, num_queries, num_heads, head_size = queries.shape
    num_kv_heads, page_size = table.keys.shape[1:3]
    group = num_heads // num_kv_heads
    num_rows = num_queries * group
    block_rows = min(MAX_BLOCK_ROWS, max(MIN_DOT_ROWS, triton.next_power_of_2(num_rows)))
    num_row_blocks = triton.cdiv(num_rows, block_rows)
    num_reqs = context_lens.shape[0]
    num_splits = triton.cdiv(num_pages, SPLIT_PAGES)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=queries.device)

    scores = empty(num_layers, num_reqs, num_pages)
    rows_of_pair = num_kv_heads * num_rows
    num_pairs = num_layers * num_reqs
    pairs_at_once = _pairs_at_once(num_pairs, rows_of_pair, num_pages)
    logits = empty(pairs_at_once, rows_of_pair, num_pages)
    peaks, sums = empty(2, pairs_at_once, rows_of_pair, num_splits)
    for first in range(0, num_pairs, pairs_at_once):
        num_programs = min(pairs_at_once, num_pairs - first)
        _logits_kernel[(num_programs, num_kv_heads * num_row_blocks, num_splits)](
            queries,
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
            num_splits,
            *queries.stride()[:3],
            block_table.stride(0),
            *summaries.min_keys.stride()[:3],
            NUM_ROWS=num_rows,
            GROUP=group,
            HEAD_SIZE=head_size,
            PAGE_SIZE=page_size,
            NUM_ROW_BLOCKS=num_row_blocks,
            BLOCK_ROWS=block_rows,
            HEAD_PADDED=max(MIN_DOT_ROWS, triton.next_power_of_2(head_size)),
            BLOCK=BLOCK_PAGES,
            SPLIT=SPLIT_PAGES,
        )
        _scores_kernel[(num_programs, triton.cdiv(num_pages, SCORE_PAGES))](
            logits,
            peaks,
            sums,
            verification.positions,
            context_lens,
            table.scales if table.sinks is None else table.sinks,
            scores,
            first,
            num_reqs,
            num_pages,
            num_splits,
            NUM_QUERIES=num_queries,
            NUM_ROWS=num_rows,
            GROUP=group,
            PAGE_SIZE=page_size,
            NUM_KV_HEADS=num_kv_heads,
            NUM_ROW_BLOCKS=num_row_blocks,
            BLOCK_ROWS=block_rows,
            SPLITS_PADDED=triton.next_power_of_2(triton.cdiv(block_table.shape[1], SPLIT_PAGES)),
            BLOCK=SCORE_PAGES,
            SINKS=table.sinks is not None,
        )
    return scores
