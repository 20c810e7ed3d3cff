# SPDX-License-Identifier: Apache-2.0
"""Policies read fp8 KV caches: they choose what they would of a cache of what the bytes stand for."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from batches import make_batch, make_engine, steps_of_view

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.rows import FP8_DTYPES
from vllm_magicdec.attention.scales import Scales
from vllm_magicdec.attention.softmax import Softmax
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.policies import find_policy

NUM_STEPS, NUM_LAYERS, NUM_KV_HEADS, GROUP, HEAD_SIZE = 4, 2, 2, 2, 16
PAGE, MODEL_LEN, NUM_BLOCKS, WINDOW = 16, 1024, 140, 32
CONTEXT_LENS = [900, 600]
SCALE, KEY_SCALE = 0.25, 0.5  # powers of two: products are the same wherever a scale goes


def positions_chosen(
    policy: str, granularity: str, caches: list[KVRows], queries: torch.Tensor, softmax: Softmax
) -> torch.Tensor:
    """By request, layer and KV head, ascending; of a round in which both requests begin to decode."""
    recorders = []

    def observe(indices, window, observer):
        for layer, rows in enumerate(caches):
            observer(layer, queries[layer].flatten(0, 1), rows, softmax)

    engine = make_engine(
        PAGE,
        MODEL_LEN,
        NUM_STEPS,
        NUM_BLOCKS,
        len(CONTEXT_LENS),
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        group=GROUP,
        head_size=HEAD_SIZE,
        observe=observe,
        switch_attention=lambda recorder=None, *, layer_pages=False: recorders.append(recorder) or (),
    )
    limits = replace(engine.limits, device_type="cuda")  # prompts' last tokens are observed
    engine = replace(engine, limits=limits, query_dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    fields = MagicDecSpeculativeConfig(
        method="magicdec-self",
        draft_kv_policy=policy,
        draft_kv_granularity=granularity,
        snapkv_window=WINDOW,
        snapkv_kernel=1,  # a larger one makes ties
    )
    policy_class = find_policy(policy)
    views = policy_class.make_views(fields, engine, policy_class.parse_budget(fields, limits, 192))
    if recorders[0] is not None:
        num_queries = NUM_STEPS + 1
        starts = torch.arange(len(CONTEXT_LENS) + 1, dtype=torch.int32) * num_queries
        metadata = SimpleNamespace(query_start_loc=starts, seq_lens=torch.tensor(CONTEXT_LENS))
        for layer, rows in enumerate(caches):
            latest = queries[layer, :, -num_queries:].flatten(0, 1)
            recorders[0].record(layer, latest, Scales(), metadata, rows, softmax)
    pages = MODEL_LEN // PAGE
    block_table = torch.arange(len(CONTEXT_LENS) * pages, dtype=torch.int32).view(-1, pages)
    batch = replace(make_batch(["a", "b"], block_table, CONTEXT_LENS), is_first=[True, True])
    list(steps_of_view(views.prepare(batch, NUM_STEPS), NUM_STEPS))
    selections = views._selections
    rows = selections.rows(["a", "b"])
    (count,) = set(selections.counts[rows].tolist())
    assert count
    return selections.positions[rows, ..., :count].sort(-1).values


@pytest.mark.parametrize("dtype", FP8_DTYPES)
@pytest.mark.parametrize(
    ("policy", "granularity"), [("snapkv", "page"), ("snapkv", "token"), ("verify-topk", "page")]
)
def test_policies_select_the_same_from_an_fp8_cache_and_its_values(policy, granularity, dtype):
    rng = torch.Generator().manual_seed(0)
    shape = (NUM_LAYERS, NUM_BLOCKS, NUM_KV_HEADS, PAGE, 2 * HEAD_SIZE)
    stored = torch.randn(shape, generator=rng).to(dtype)
    shape = (NUM_LAYERS, len(CONTEXT_LENS), WINDOW, NUM_KV_HEADS * GROUP, HEAD_SIZE)
    queries = 3 * torch.randn(shape, generator=rng).bfloat16()
    as_bytes = [KVRows.of(layer.view(torch.uint8), "FLASH_ATTN", dtype=dtype) for layer in stored]
    meant = [KVRows.of((layer.float() * KEY_SCALE).bfloat16(), "FLASH_ATTN") for layer in stored]
    chosen = positions_chosen(policy, granularity, as_bytes, queries, Softmax(SCALE * KEY_SCALE))
    assert torch.equal(chosen, positions_chosen(policy, granularity, meant, queries, Softmax(SCALE)))
    other = positions_chosen(policy, granularity, as_bytes, queries.flip(2), Softmax(SCALE))
    assert not torch.equal(chosen, other), "the choice depends on the queries"
