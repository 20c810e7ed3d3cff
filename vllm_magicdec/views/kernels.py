# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that prepare a round on a GPU, one for views of pages and one for those of tokens.

The torch versions in `pages.py`, `layer_pages.py` and `tokens.py` run where there is no GPU.
"""

import torch
import triton
import triton.language as tl

from vllm_magicdec.views.round import Batch
from vllm_magicdec.views.selections import Budget, Selections
from vllm_magicdec.views.slots import DraftSlots

BLOCK_COLUMNS = 128
# The number of drafts varies by round. For 1 and for multiples of 16 Triton would compile again, while
# requests wait.
VARYING = ["num_steps"]


@triton.jit
def _write_steps(  # type: ignore[no-untyped-def]
    req,
    context_len,
    table,  # the request's row of the block table
    positions,  # [max_num_steps, max_num_reqs] int64, written
    slots,  # as positions
    max_num_reqs,
    max_model_len,
    num_steps,
    PAGE_SIZE: tl.constexpr,
    STEPS_PADDED: tl.constexpr,
):
    """Write positions and slots of one request's drafted tokens; return its slots without padding."""
    steps = tl.arange(0, STEPS_PADDED)
    is_step = steps < num_steps
    unclamped = context_len + steps
    position = tl.minimum(unclamped, max_model_len - 1)
    page = tl.load(table + position // PAGE_SIZE, mask=is_step, other=0).to(tl.int64)
    slot = page * PAGE_SIZE + position % PAGE_SIZE
    cells = steps * max_num_reqs + req
    tl.store(positions + cells, position, mask=is_step)
    # Tokens beyond the model's length write to PAD_SLOT.
    tl.store(slots + cells, tl.where(unclamped == position, slot, -1), mask=is_step)
    return position, slot


@triton.jit(do_not_specialize=VARYING)
def _page_round_kernel(  # type: ignore[no-untyped-def]
    context_lens,  # [num_reqs] int64
    block_table,  # [num_reqs, max_blocks] int32
    num_pages,  # [num_reqs] int64, in budget, sinks included
    rows,  # [num_reqs] int64; this and the next three are read if SELECTS
    selected,  # [max_num_reqs, num_layers, 1, max_selected] int32, pages within the request, contiguous
    num_selected,  # [max_num_reqs] int64
    ends,  # [max_num_reqs] int64
    positions,  # the rest is written
    slots,
    lens,  # [max_num_steps, max_num_reqs] int32
    view_tables,  # [num_layers, max_num_reqs, >= max_pages] int32
    table_stride,
    selected_row,  # strides, in elements
    selected_layer,
    view_layer,
    view_req,
    max_num_reqs,
    max_model_len,
    num_steps,
    sink_pages,
    recent,
    max_pages,
    SELECTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STEPS_PADDED: tl.constexpr,
    PAGES_PADDED: tl.constexpr,
):
    """One program per request and layer; see `pages.PageViews` and `layer_pages.LayerPageViews`."""
    req = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    context_len = tl.load(context_lens + req)
    table = block_table + req * table_stride
    last_page = tl.minimum(context_len + num_steps - 1, max_model_len - 1) // PAGE_SIZE
    total = last_page + 1
    budget = tl.load(num_pages + req)
    sinks = tl.minimum(total, sink_pages)
    columns = tl.arange(0, PAGES_PADDED)
    is_column = columns < max_pages
    count, start = 0, sinks
    if SELECTS:
        row = tl.load(rows + req)
        fits = total <= budget
        count = tl.minimum(tl.load(num_selected + row), tl.maximum(budget - sinks - recent, 0))
        count = tl.where(fits, 0, count)
        start = tl.maximum(tl.minimum(tl.load(ends + row), total - recent), sinks)
        start = tl.where(fits, sinks, start)
    start = tl.maximum(start, total - (budget - sinks - count))
    column = columns - count
    page = tl.where(column < sinks, column, column + start - sinks)
    if SELECTS:
        own = selected + row * selected_row + layer * selected_layer
        best = tl.load(own + columns, mask=columns < count, other=0).to(tl.int64)
        page = tl.where(column < 0, best, page)
    page = tl.minimum(page, last_page)
    tl.store(
        view_tables + layer * view_layer + req * view_req + columns,
        tl.load(table + page, mask=is_column),
        mask=is_column,
    )
    if layer == 0:
        position, _ = _write_steps(
            req,
            context_len,
            table,
            positions,
            slots,
            max_num_reqs,
            max_model_len,
            num_steps,
            PAGE_SIZE,
            STEPS_PADDED,
        )
        steps = tl.arange(0, STEPS_PADDED)
        seen = position + 1 - (start - sinks - count) * PAGE_SIZE
        tl.store(lens + steps * max_num_reqs + req, seen.to(tl.int32), mask=steps < num_steps)


def write_page_round(
    batch: Batch,
    draft_slots: DraftSlots,  # written
    budget: Budget,
    num_pages: torch.Tensor,  # [num_reqs] int64, pages in budget, sinks included
    selections: Selections | None,  # None: sinks and latest pages only
    *,
    lens: torch.Tensor,  # [max_num_steps, max_num_reqs] int32, written
    view_tables: torch.Tensor,  # [num_layers, max_num_reqs, >= max_pages] int32, written
    num_steps: int,
) -> None:
    """Write selected pages, sinks and the latest pages by request and layer. No host synchronisation."""
    max_num_steps, max_num_reqs = draft_slots.positions.shape
    selected = [batch.context_lens] * 4  # not read
    selected_strides = (0, 0)
    if selections is not None:
        rows = selections.rows(batch.req_ids)
        selected = [rows, selections.positions, selections.counts, selections.ends]
        selected_strides = selections.positions.stride()[:2]
    _page_round_kernel[(batch.context_lens.shape[0], view_tables.shape[0])](
        batch.context_lens,
        batch.block_table,
        num_pages,
        *selected,
        draft_slots.positions,
        draft_slots.slots,
        lens,
        view_tables,
        batch.block_table.stride(0),
        *selected_strides,
        *view_tables.stride()[:2],
        max_num_reqs,
        draft_slots.max_model_len,
        num_steps,
        budget.num_sinks,
        budget.num_recent,
        budget.max_entries,
        SELECTS=selections is not None,
        PAGE_SIZE=draft_slots.page_size,
        STEPS_PADDED=triton.next_power_of_2(max_num_steps),
        PAGES_PADDED=triton.next_power_of_2(view_tables.shape[2]),
    )


@triton.jit(do_not_specialize=VARYING)
def _token_round_kernel(  # type: ignore[no-untyped-def]
    context_lens,  # [num_reqs] int64
    block_table,  # [num_reqs, max_blocks] int32
    rows,  # [num_reqs] int64, of the selections
    selected,  # [max_num_reqs, num_layers, num_kv_heads, max_selected] int32, positions
    num_selected,  # [max_num_reqs] int64
    ends,  # [max_num_reqs] int64
    tokens,  # [num_reqs] int64, in budget
    positions,  # the rest is written
    slots,
    lens,  # [max_num_steps, max_num_reqs] int32
    query_columns,  # [max_num_steps, max_num_reqs] int64
    query_slots,  # [max_num_steps, max_num_reqs] int32
    view_slots,  # [num_layers, max_num_reqs, num_kv_heads, width] int32
    table_stride,
    selected_row,  # strides, in elements
    selected_head,
    view_layer,
    view_req,
    view_head,
    max_num_reqs,
    max_model_len,
    num_steps,
    sink,
    window,
    max_tokens,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STEPS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per request, layer and KV head, and block of columns; see `tokens.TokenViews`."""
    req = tl.program_id(0).to(tl.int64)
    layer_head = tl.program_id(1).to(tl.int64)
    context_len = tl.load(context_lens + req)
    table = block_table + req * table_stride
    row = tl.load(rows + req)
    first = tl.minimum(context_len, max_model_len - 1)
    sinks = tl.minimum(first + 1, sink)
    start = tl.maximum(tl.minimum(tl.load(ends + row), context_len), sinks)
    budget = tl.load(tokens + req)
    count = tl.minimum(tl.load(num_selected + row), tl.maximum(budget - sinks - window, 0))
    room = budget - sinks - count
    start = tl.maximum(start, first + 1 - room)

    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < max_tokens
    chosen = tl.load(
        selected + row * selected_row + layer_head * selected_head + columns,
        mask=is_column & (columns < count),
        other=0,
    ).to(tl.int64)
    column = columns - count
    token = tl.where(column < sinks, column, column + start - sinks)
    token = tl.where(column < 0, chosen, tl.maximum(token, 0))
    token = tl.minimum(token, first)
    page = tl.load(table + token // PAGE_SIZE, mask=is_column, other=0).to(tl.int64)
    layer, kv_head = layer_head // NUM_KV_HEADS, layer_head % NUM_KV_HEADS
    tl.store(
        view_slots + layer * view_layer + req * view_req + kv_head * view_head + columns,
        (page * PAGE_SIZE + token % PAGE_SIZE).to(tl.int32),
        mask=is_column,
    )

    if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        position, slot = _write_steps(
            req,
            context_len,
            table,
            positions,
            slots,
            max_num_reqs,
            max_model_len,
            num_steps,
            PAGE_SIZE,
            STEPS_PADDED,
        )
        steps = tl.arange(0, STEPS_PADDED)
        cells, is_step = steps * max_num_reqs + req, steps < num_steps
        num_recent = position - start + 1
        seen = count + sinks + tl.minimum(num_recent, room)
        tl.store(lens + cells, seen.to(tl.int32), mask=is_step)
        # Non-negative remainder, as in Python.
        ring = (num_recent - 1 + room) % room
        tl.store(query_columns + cells, count + sinks + ring, mask=is_step)
        tl.store(query_slots + cells, slot.to(tl.int32), mask=is_step)


def write_token_round(
    batch: Batch,
    draft_slots: DraftSlots,  # written
    budget: Budget,
    selections: Selections,
    rows: torch.Tensor,  # [num_reqs] int64, rows of the selections
    *,
    lens: torch.Tensor,  # [max_num_steps, max_num_reqs] int32, written
    query_columns: torch.Tensor,  # [max_num_steps, max_num_reqs] int64, written
    query_slots: torch.Tensor,  # [max_num_steps, max_num_reqs] int32, written
    view_slots: torch.Tensor,  # [num_layers, max_num_reqs, num_kv_heads, >= max_tokens] int32, written
    num_steps: int,
) -> None:
    """Write the views of a round's first step and the columns of all queries. No host synchronisation."""
    max_num_steps, max_num_reqs = draft_slots.positions.shape
    num_layers, _, num_kv_heads, _ = view_slots.shape
    num_blocks = triton.cdiv(budget.max_entries, BLOCK_COLUMNS)
    _token_round_kernel[(batch.context_lens.shape[0], num_layers * num_kv_heads, num_blocks)](
        batch.context_lens,
        batch.block_table,
        rows,
        selections.positions,
        selections.counts,
        selections.ends,
        budget.entries(batch.context_lens),
        draft_slots.positions,
        draft_slots.slots,
        lens,
        query_columns,
        query_slots,
        view_slots,
        batch.block_table.stride(0),
        selections.positions.stride(0),
        selections.positions.stride(2),
        view_slots.stride(0),
        view_slots.stride(1),
        view_slots.stride(2),
        max_num_reqs,
        draft_slots.max_model_len,
        num_steps,
        budget.num_sinks,
        budget.num_recent,
        budget.max_entries,
        NUM_KV_HEADS=num_kv_heads,
        PAGE_SIZE=draft_slots.page_size,
        STEPS_PADDED=triton.next_power_of_2(max_num_steps),
        BLOCK=BLOCK_COLUMNS,
    )
