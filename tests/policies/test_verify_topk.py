# SPDX-License-Identifier: Apache-2.0
"""Verification-guided pages against a naive reference, over a small cache that is really paged."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from batches import make_batch, make_engine, make_selections, steps_of_view
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import page_scores, slot_of, slots_of_pages
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.scales import Scales
from vllm_magicdec.attention.softmax import Softmax
from vllm_magicdec.drafting import sizing
from vllm_magicdec.policies import page_summaries, verification
from vllm_magicdec.policies.page_summaries import PageSummaries
from vllm_magicdec.policies.verification import Verification, VerificationSelector, num_recent_pages
from vllm_magicdec.policies.verify_topk import VerifyTopK
from vllm_magicdec.views.layer_pages import LayerPageViews
from vllm_magicdec.views.pages import PageBudget
from vllm_magicdec.views.selections import Budget, Selections

CPU = torch.device("cpu")
PAGE, NUM_LAYERS, NUM_KV_HEADS, GROUP, SIZE = 4, 2, 2, 2, 8
MODEL_LEN, NUM_BLOCKS, GAMMA = 400, 350, 3
HEADS = {"num_kv_heads": NUM_KV_HEADS, "head_size": SIZE}
SCALE = SIZE**-0.5


class Scene:
    """Two requests in a random cache, and a verification of their last positions."""

    def __init__(self, seed: int, context_lens: list[int], max_pages: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.context_lens = context_lens
        num_reqs, max_blocks = len(context_lens), MODEL_LEN // PAGE
        blocks = torch.randperm(NUM_BLOCKS, generator=self.rng)[: num_reqs * max_blocks]
        self.block_table = blocks.view(num_reqs, max_blocks).to(torch.int32)
        shape = (NUM_LAYERS, NUM_BLOCKS, NUM_KV_HEADS, PAGE, 2 * SIZE)
        self.cache = torch.randn(shape, generator=self.rng)
        sinks = 3 * torch.randn((NUM_LAYERS, NUM_KV_HEADS, GROUP), generator=self.rng)
        self.sinks = sinks if seed % 2 else None
        engine = make_engine(
            PAGE, MODEL_LEN, GAMMA, NUM_BLOCKS, num_reqs, num_layers=NUM_LAYERS, group=GROUP, **HEADS
        )
        self.verification = Verification(engine)
        self.policy = VerifyTopK(SimpleNamespace(draft_kv_refresh=None), engine, self.verification)
        self.num_recent = num_recent_pages(PAGE, GAMMA)
        budget = PageBudget(PAGE, 1, max_pages, max_pages, num_recent=self.num_recent)
        selector = self.selector(budget)
        self.views = LayerPageViews(selector._selections, selector, budget, engine.make_draft_slots())

    def selector(self, budget: Budget) -> VerificationSelector:
        selections = make_selections(NUM_LAYERS, 1, len(self.context_lens), budget.max_selected)
        return VerificationSelector(self.policy, budget, selections)

    def verify(self, num_rejected: list[int]) -> torch.Tensor:
        """The target's pass over GAMMA + 1 positions of each request; returns its queries by layer."""
        num_reqs = len(self.context_lens)
        starts = torch.arange(num_reqs + 1, dtype=torch.int32) * (GAMMA + 1)
        lens = torch.tensor(self.context_lens) + torch.tensor(num_rejected)
        metadata = SimpleNamespace(query_start_loc=starts, seq_lens=lens.int())
        shape = (NUM_LAYERS, num_reqs * (GAMMA + 1), NUM_KV_HEADS * GROUP, SIZE)
        queries = 3 * torch.randn(shape, generator=self.rng)
        for layer in range(NUM_LAYERS):
            rows = KVRows.of(self.cache[layer], "FLASH_ATTN")
            self.verification.record(layer, queries[layer], Scales(), metadata, rows, self.softmax(layer))
        return queries.view(NUM_LAYERS, num_reqs, GAMMA + 1, NUM_KV_HEADS * GROUP, SIZE)

    def softmax(self, layer: int) -> Softmax:
        return Softmax(SCALE, sinks=None if self.sinks is None else self.sinks[layer].flatten())

    def steps(self) -> list:
        req_ids = [str(i) for i in range(len(self.context_lens))]
        batch = make_batch(req_ids, self.block_table, self.context_lens)
        return list(steps_of_view(self.views.prepare(batch, GAMMA), GAMMA))

    def keys(self, layer: int, request: int, page: int) -> torch.Tensor:
        """Verified keys of a page, [num_kv_heads, tokens, size]."""
        block = int(self.block_table[request, page])
        count = min(PAGE, self.context_lens[request] - page * PAGE)
        return self.cache[layer, block, :, :count, :SIZE]

    def assert_summaries_bound_logits(self) -> None:
        """Of random queries with the keys of all whole pages."""
        num_pages = min(self.context_lens) // PAGE
        num_reqs = len(self.context_lens)
        for layer in range(NUM_LAYERS):
            query = torch.randn((num_reqs, NUM_KV_HEADS, 5, SIZE), generator=self.rng)
            bounds = self.policy.summaries.bounds(layer, query, self.block_table[:, :num_pages].long())
            for request in range(num_reqs):
                for page in range(num_pages):
                    logits = query[request] @ self.keys(layer, request, page).transpose(1, 2)
                    assert (logits.amax(-1) <= bounds[request, ..., page] + 1e-4).all()

    def page_scores(self, queries: torch.Tensor, layer: int, request: int) -> torch.Tensor:
        """Of a request's pages, by their keys and accepted queries [n, num_heads, size]."""
        num_pages = math.ceil(self.context_lens[request] / PAGE)
        keys = [self.keys(layer, request, page) for page in range(num_pages)]
        ends = (torch.stack([end(own, 1) for own in keys], 1) for end in (torch.amin, torch.amax))
        return page_scores(self.softmax(layer), queries, *ends)


ROUNDS = (
    st.lists(st.integers(8, 150), min_size=1, max_size=2),
    st.integers(15, 20),
    st.integers(0, 2**31),
    st.data(),
)


@settings(max_examples=40, deadline=None)
@given(*ROUNDS)
def test_the_view_holds_sinks_recent_pages_and_the_best_of_the_others(context_lens, max_pages, seed, data):
    scene = Scene(seed, context_lens, max_pages)
    num_rejected = [data.draw(st.integers(0, GAMMA)) for _ in context_lens]
    queries = scene.verify(num_rejected)
    steps = scene.steps()
    num_recent = scene.num_recent
    for request, context_len in enumerate(context_lens):
        last_page = (context_len + GAMMA - 1) // PAGE
        own = scene.block_table[request].tolist()
        for layer in range(NUM_LAYERS):
            if last_page + 1 <= max_pages:
                expected = set(range(last_page + 1))
            else:
                accepted = GAMMA + 1 - num_rejected[request]
                scores = scene.page_scores(queries[layer, request, :accepted], layer, request)
                first_recent = last_page + 1 - num_recent
                middle = sorted(range(1, first_recent), key=lambda page: -scores[page])
                chosen = middle[: max_pages - 1 - num_recent]
                expected = {0, *chosen, *range(first_recent, last_page + 1)}
            for step_index, step in enumerate(steps):
                table = step.view.block_tables[layer, request].tolist()
                length = int(step.view.lens[request])
                seen = {slot_of(p, table, PAGE) for p in range(length)}
                assert seen == slots_of_pages(expected, context_len + step_index, own, PAGE)


def test_summaries_bound_every_logit_and_follow_a_page_to_its_next_owner():
    scene = Scene(3, [120, 90], 16)
    scene.verify([0, 0])
    scene.steps()
    for _ in range(2):
        scene.assert_summaries_bound_logits()
        # Other requests come to own the pages, with other keys in them.
        scene.views._selector._known.clear()
        scene.cache.normal_(generator=scene.rng)
        scene.verify([0, 0])
        scene.steps()


def test_summaries_are_fp8_on_gpus_that_have_it(monkeypatch):
    def num_bytes(device_type: str, capability: int, has_key_bias: bool = False) -> int:
        monkeypatch.setattr(
            page_summaries.current_platform, "has_device_capability", lambda least: least <= capability
        )
        engine = make_engine(PAGE, MODEL_LEN, GAMMA, NUM_BLOCKS, 1, num_layers=NUM_LAYERS, **HEADS)
        limits = replace(engine.limits, device_type=device_type)
        return PageSummaries(
            replace(engine, limits=limits, cache_dtype=torch.bfloat16, has_key_bias=has_key_bias)
        ).min_keys.nbytes

    in_cache_dtype = num_bytes("cpu", 90)
    assert in_cache_dtype == num_bytes("cuda", 86) == 2 * num_bytes("cuda", 89)
    assert in_cache_dtype == num_bytes("cuda", 89, has_key_bias=True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(), False),
        (LlamaConfig(attention_bias=True), True),
        (Qwen2Config(), True),
        (Qwen3Config(), False),
    ],
    ids=["Llama", "Llama with a bias", "Qwen2", "Qwen3"],
)
def test_models_whose_keys_have_a_bias_are_known(config, expected):
    assert sizing._has_key_bias(config) == expected


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 3),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_queries_are_stored_without_gaps(lens, num_padding, seed, are_quantised):
    """`auto` verifies fewer drafts of more requests; with cudagraph_mode FULL, vLLM pads the requests."""
    rng = torch.Generator().manual_seed(seed)
    num_tokens, num_queries = sum(lens), GAMMA + 1
    heads = {**HEADS, "group": GROUP}
    engine = make_engine(PAGE, MODEL_LEN, GAMMA, NUM_BLOCKS, len(lens) + num_padding, **heads)
    recorder = Verification(replace(engine, max_batched_tokens=num_tokens))
    assert recorder.queries.shape[1] == min(engine.max_num_reqs * num_queries, num_tokens)
    starts = torch.tensor([0, *lens, *[0] * num_padding], dtype=torch.int32).cumsum(0).int()
    seq_lens = torch.tensor([50 + n for n in lens] + [0] * num_padding, dtype=torch.int32)
    metadata = SimpleNamespace(query_start_loc=starts, seq_lens=seq_lens)
    queries, scales = torch.randn((num_tokens, NUM_KV_HEADS * GROUP, SIZE), generator=rng), Scales()
    if are_quantised:
        by_head = torch.linspace(0.1, 0.7, NUM_KV_HEADS * GROUP).unsqueeze(1)
        stored, scales = queries.to(torch.float8_e4m3fn), Scales(query_factors=by_head)
        queries = stored.float() * by_head
    recorder.record(0, stored if are_quantised else queries, scales, metadata, None, Softmax(SCALE))
    never = torch.iinfo(torch.int64).max
    for request, (number, end) in enumerate(zip(lens, starts[1:].tolist(), strict=False)):
        kept = min(number, num_queries)
        assert torch.equal(recorder.queries[0, recorder.rows[request, -kept:]], queries[end - kept : end])
        expected = [never] * (num_queries - kept) + list(range(50 + number - kept, 50 + number))
        assert recorder.positions[request].tolist() == expected
    assert (recorder.positions[len(lens) :] == never).all()


def test_summaries_include_tokens_of_steps_without_drafts():
    scene = Scene(5, [60], 16)
    scene.verify([0])
    scene.steps()
    scene.context_lens = [140]  # 80 tokens later, none of them drafted
    scene.verify([0])
    scene.steps()
    scene.assert_summaries_bound_logits()


def test_requests_are_selected_for_in_parts_that_fit_the_scratch(monkeypatch):
    context_lens = [300, 77, 390]
    scene = Scene(7, context_lens, 16)
    scene.verify([2, 0, 1])
    budget = PageBudget(PAGE, 1, 30, 30, num_recent=scene.num_recent)

    def select(at_once: int) -> tuple[list[int], Selections]:
        selector = scene.selector(budget)
        num_bytes = selector._scratch_bytes(-(-391 // PAGE))
        monkeypatch.setattr(verification, "SCRATCH_BYTES", at_once * num_bytes + 1)
        parts, select_part = [], selector._select
        monkeypatch.setattr(
            selector, "_select", lambda part, n: parts.append(len(part.req_ids)) or select_part(part, n)
        )
        selector._selections.begin_round(list("abc"))
        selector.update(make_batch(list("abc"), scene.block_table, context_lens), GAMMA)
        return parts, selector._selections

    all_parts, together = select(3)
    parts, apart = select(2)
    assert (all_parts, parts) == ([3], [2, 1])
    for name in ("counts", "ends"):
        assert torch.equal(getattr(together, name), getattr(apart, name))
    for row, count in enumerate(together.counts.tolist()):
        chosen = (selections.positions[row, ..., :count] for selections in (together, apart))
        assert torch.equal(*(positions.sort().values for positions in chosen))
