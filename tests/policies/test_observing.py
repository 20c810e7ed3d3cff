# SPDX-License-Identifier: Apache-2.0
"""Choosing pages by a prompt's last tokens: which budgets it can have, and whom it looks at."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from batches import make_batch, make_engine, steps_of_view
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.scales import Scales
from vllm_magicdec.attention.softmax import Softmax
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.policies.base import Limits
from vllm_magicdec.policies.observing import WindowRecorder
from vllm_magicdec.policies.snapkv import SnapKV


def fields_of(**fields: object) -> MagicDecSpeculativeConfig:
    return MagicDecSpeculativeConfig(method="magicdec-self", draft_kv_policy="snapkv", **fields)


budgets = given(
    page=st.sampled_from([16, 32, 64, 128]),
    gamma=st.integers(1, 16),
    budget=st.integers(1, 3000),
    recent=st.sampled_from([0, 0.375, 0.8, 100]),
)


@settings(max_examples=300, deadline=None)
@budgets
def test_the_error_for_a_small_budget_names_the_minimum(page, gamma, budget, recent):
    limits = Limits(page, 8192, gamma, "cpu")
    fields = fields_of(snapkv_recent=recent)
    try:
        parsed = SnapKV.parse_budget(fields, limits, budget)
    except ValueError as error:
        least = int(str(error).split("use at least ")[1].split(",")[0])
        if "is below one KV page" in str(error):
            return
        parsed = SnapKV.parse_budget(fields, limits, least)
        assert least > budget
        with pytest.raises(ValueError, match="use at least"):
            SnapKV.parse_budget(fields, limits, least - page)
    assert parsed.max_selected >= 1
    # Wherever in a page it starts, the window stays in view beside the drafted tokens.
    assert parsed.num_recent * page >= max(fields.snapkv_window, gamma) + page - 1 or page == 1


def test_the_error_for_a_fraction_names_the_minimum_budget():
    with pytest.raises(ValueError, match=r"draft_kv_min_budget=64 leaves no page.*use at least 128,"):
        SnapKV.parse_budget(fields_of(draft_kv_min_budget=64), Limits(32, 8192, 4, "cpu"), 0.1)


@pytest.mark.parametrize("granularity", ["token", "page"])
def test_a_backend_that_splits_pages_changes_no_selection(granularity):
    """FLASHINFER has blocks of 16, 32 or 64 tokens where `--block-size 128` counts in pages of 128."""
    page, parts, num_kv_heads, head_size, context_len = 64, 4, 2, 8, 500
    rng = torch.Generator().manual_seed(0)
    block_table = torch.randperm(20, generator=rng)[:8].to(torch.int32).unsqueeze(0)
    whole = torch.randn((20, num_kv_heads, page, 2 * head_size), generator=rng)
    # A page's blocks lie one after the other, each with all of its heads.
    split = whole.unflatten(2, (parts, -1)).transpose(1, 2).flatten(0, 1).contiguous()
    queries = torch.randn((32, 2 * num_kv_heads, head_size), generator=rng)

    def choose(cache: torch.Tensor) -> torch.Tensor:
        rows = KVRows.of(cache, "FLASHINFER")

        def observe(indices, window, observer):
            observer(0, queries, rows, Softmax(1.0))

        shape = {"num_kv_heads": num_kv_heads, "head_size": head_size}
        engine = make_engine(page, 1024, 4, 20, 1, observe=observe, **shape)
        fields = fields_of(draft_kv_granularity=granularity)
        views = SnapKV.make_views(fields, engine, SnapKV.parse_budget(fields, engine.limits, 320))
        batch = replace(make_batch(["a"], block_table, [context_len]), is_first=[True])
        list(steps_of_view(views.prepare(batch, 4), 4))
        count = int(views._selections.counts[0])
        assert count
        return views._selections.positions[0, ..., :count]

    assert torch.equal(choose(split), choose(whole))


def test_queries_are_recorded_of_whole_windows_and_of_the_latest_pass():
    recorder = WindowRecorder(4, torch.float32)
    cache = KVRows.of(torch.zeros((1, 1, 32, 16)), "FLASHINFER")

    def record(num_queries: int) -> None:
        starts, lens = torch.tensor([0, num_queries]), torch.tensor([20])
        step = SimpleNamespace(max_query_len=num_queries, query_start_loc=starts, seq_lens=lens)
        recorder.record(0, torch.zeros((num_queries, 1, 8)), Scales(), step, cache, Softmax(1.0))

    for num_queries, is_recorded in ((8, True), (1, False), (4, True), (3, False)):
        record(num_queries)
        assert recorder.holds(0, 20) == is_recorded
        assert not recorder.holds(0, 21), "it has got longer"
