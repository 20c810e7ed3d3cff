# SPDX-License-Identifier: Apache-2.0
"""The native kernel over chosen tokens, and their weights, in every variant that runs, against float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (  # noqa: F401
    GARBAGE,
    batches,
    check,
    kernel_of,
    two_threads,
    variants_and_layouts,
    write,
)
from reference import dense_attention


@variants_and_layouts
@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5))
def test_tokens_are_weighed_as_in_float64(variant, layout, data, threads):
    batch = data.draw(batches(layout, windows=None))
    kernel = kernel_of(variant)
    torch.set_num_threads(threads)
    group = batch.query.shape[1] // batch.keys.shape[2]
    del batch.options["value_scale"]
    for request, (context, length) in enumerate(zip(batch.context_lens, batch.query_lens, strict=True)):
        part = slice(*batch.starts[request : request + 2].tolist())
        weights = kernel.over(batch.cache, layout).weigh_tokens(
            batch.query[part], pages=batch.block_table[request], context_len=context, **batch.options
        )
        if not length:
            assert weights.shape == (batch.keys.shape[2], context) and not weights.any()
            continue
        is_seen = torch.arange(context) <= torch.arange(context - length, context).unsqueeze(1)
        keys = batch.keys[request, :context].double().repeat_interleave(group, 1)
        # Of values that are 1 for one token each: its weights. [num_queries, num_heads, context].
        ones = torch.eye(context).unsqueeze(1).expand(-1, keys.shape[1], -1)
        of_queries, _ = dense_attention(batch.query[part], keys, ones, is_seen, **batch.options)
        expected = of_queries.unflatten(1, (-1, group)).sum((0, 2))
        bound = (2e-6 + 4e-7 * batch.options["soft_cap"]) * max(1, length * group)
        torch.testing.assert_close(weights.double(), expected, rtol=0, atol=bound)


@variants_and_layouts
def test_tokens_of_a_long_context_are_weighed_in_parts(variant, layout):
    """128 rows over 20,000 tokens are more logits than a thread keeps."""
    torch.manual_seed(0)
    query_len, group, head_size, page_size, context = 32, 4, 32, 32, 20_000
    dtype = torch.bfloat16 if layout == "amx" else torch.float32
    pages = -(-context // page_size)
    keys = torch.randn(context, 1, head_size).to(dtype)
    cache = torch.zeros(pages, 1, page_size, 2 * head_size, dtype=dtype)
    positions = torch.arange(context)
    write(cache, layout, positions // page_size, positions % page_size, keys, keys)
    query = 3 * torch.randn(query_len, group, head_size).to(dtype)
    weights = (
        kernel_of(variant)
        .over(cache, layout)
        .weigh_tokens(query, pages=torch.arange(pages), context_len=context, scale=head_size**-0.5)
    )
    logits = torch.einsum("qhd,kd->qhk", query.double(), keys[:, 0].double()) * head_size**-0.5
    is_seen = positions <= torch.arange(context - query_len, context).unsqueeze(1)
    expected = logits.masked_fill(~is_seen.unsqueeze(1), -torch.inf).softmax(-1).sum((0, 1))
    bound = (2e-6 + 2e-10 * context) * query_len * group
    torch.testing.assert_close(weights[0].double(), expected, rtol=0, atol=bound)


@variants_and_layouts
@settings(max_examples=160, deadline=None)
@given(st.data(), st.integers(1, 5), st.sampled_from(["in order", "runs", "as it comes"]), st.booleans())
def test_selected_tokens_are_attended_to_as_in_float64(variant, layout, data, threads, order, sees_all):
    batch = data.draw(batches(layout, max_query_len=12, windows=()))
    kernel = kernel_of(variant)
    torch.set_num_threads(threads)
    num_reqs, _, num_kv_heads, _ = batch.keys.shape
    group = batch.query.shape[1] // num_kv_heads
    lens = [int(torch.randint(1, context + 1, ())) if context else 0 for context in batch.context_lens]
    width = max(1, *lens) + 2 if lens else 1
    slots = torch.full((num_reqs, num_kv_heads, width), GARBAGE, dtype=torch.int32)
    is_seen = torch.rand(num_reqs, max(1, *batch.query_lens, 1), width) < 0.7
    is_seen[..., 0] = True
    expected = []
    for request, (context, count) in enumerate(zip(batch.context_lens, lens, strict=True)):
        part = slice(*batch.starts[request : request + 2].tolist())
        for head in range(num_kv_heads):
            chosen = torch.randperm(context)[:count]
            if order != "as it comes":
                chosen = chosen.sort().values
            if order == "runs":  # as sinks and a window are, of which whole blocks are read in place
                first = int(torch.randint(0, context - count + 1, ())) // 32 * 32
                chosen = torch.arange(first, first + count)
            slots[request, head, :count] = batch.slots_of(request, chosen)
            heads = slice(head * group, (head + 1) * group)
            if not batch.query_lens[request]:
                continue
            seen = is_seen[request, : batch.query_lens[request], :count]
            options = dict(batch.options)
            if options["sinks"] is not None:
                options["sinks"] = options["sinks"][heads]
            keys, values = (
                half[request].double()[chosen, head].unsqueeze(1).expand(-1, group, -1)
                for half in (batch.keys, batch.values)
            )
            seen = torch.ones_like(seen) if sees_all else seen
            expected.append(
                (part, heads, *dense_attention(batch.query[part, heads], keys, values, seen, **options))
            )
    output = torch.full(batch.query.shape, torch.nan).to(batch.query.dtype)
    where = dict(query_starts=batch.starts, slots=slots, slot_lens=torch.tensor(lens, dtype=torch.int32))
    seen = None if sees_all else is_seen
    kernel.over(batch.cache, layout).attend_slots(
        batch.query, output, is_seen=seen, **where, **batch.options
    )
    for part, heads, result, size in expected:
        check(output[part, heads], result, size, batch.options["soft_cap"])
