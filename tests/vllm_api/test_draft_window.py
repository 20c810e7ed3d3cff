# SPDX-License-Identifier: Apache-2.0
"""Windows over the KV cache of vLLM's own drafters."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_magicdec.views.pages import PageBudget
from vllm_magicdec.vllm_api.draft_window import DraftWindow

PAGE, MODEL_LEN = 4, 200
MOST_QUERIES = 6  # of a pass in buffers of the engine
REQUESTS = st.lists(
    st.tuples(st.integers(1, MODEL_LEN), st.integers(1, 40)).map(lambda r: (r[0], min(r))),
    min_size=1,
    max_size=4,
)


def budget(tokens: float, sink: int) -> PageBudget:
    sizes = {"page_size": PAGE, "num_speculative_tokens": 2, "max_model_len": MODEL_LEN}
    return PageBudget.from_tokens(budget=tokens, min_budget=16, sink=sink, **sizes)


def window_of(pages: PageBudget, max_queries: int = 1) -> DraftWindow:
    return DraftWindow(pages, max_num_reqs=4, max_queries=max_queries, device=torch.device("cpu"))


def metadata(requests: list[tuple[int, int]]) -> CommonAttentionMetadata:
    """Return vLLM's metadata of requests of so many tokens, the last of which are so many queries."""
    num_reqs, pages = len(requests), math.ceil(MODEL_LEN / PAGE)
    lens = torch.tensor([length for length, _ in requests], dtype=torch.int32)
    starts = torch.tensor(np.cumsum([0, *(queries for _, queries in requests)]), dtype=torch.int32)
    # Pages in no order; a page's number tells its request and its place.
    table = torch.arange(num_reqs * pages, dtype=torch.int32).reshape(num_reqs, pages) * 7 + 3
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=num_reqs,
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(starts.diff().max()),
        max_seq_len=int(lens.max()),
        block_table_tensor=table,
        slot_mapping=torch.arange(int(starts[-1])),
        seq_lens_cpu_upper_bound=lens.clone(),
    )


def seen_tokens(common: CommonAttentionMetadata, row: int) -> list[tuple[int, int]]:
    """Return (page, offset) of the tokens that the last query of a request attends to, in order."""
    table, length = common.block_table_tensor[row].tolist(), int(common.seq_lens[row])
    return [(table[token // PAGE], token % PAGE) for token in range(length)]


@given(REQUESTS, st.sampled_from([8, 17, 32, 0.25]), st.integers(0, 9), st.integers(0, MOST_QUERIES))
def test_a_pass_reads_sinks_and_window_of_its_first_query_and_all_since(requests, tokens, sink, rejected):
    whole, pages = metadata(requests), budget(tokens, sink)
    # vLLM knows the lengths of prompts; of others the host does not know how many drafts were rejected.
    is_prompt = [queries > MOST_QUERIES for _, queries in requests]
    whole.seq_lens_cpu_upper_bound += rejected * ~torch.tensor(is_prompt)
    view = window_of(pages, MOST_QUERIES).of(whole)
    for row, (length, queries) in enumerate(requests):
        seen_by_first = length - queries + 1
        last = math.ceil(seen_by_first / PAGE)  # pages that the first query can see
        kept = pages.min_entries
        if tokens < 1:
            kept = min(max(math.ceil(seen_by_first * tokens / PAGE), kept), pages.max_entries)
        in_view = {*range(min(last, pages.num_sinks)), *range(max(0, last - kept + pages.num_sinks), 10**3)}
        expected = [one for i, one in enumerate(seen_tokens(whole, row)) if i // PAGE in in_view]
        assert seen_tokens(view, row) == expected
        assert len(expected) <= view.max_seq_len
        upper = int(view.seq_lens_cpu_upper_bound[row])
        assert upper == len(expected) if is_prompt[row] else upper >= len(expected)
    # All else is as it was: the positions, and the slots that new K/V go to.
    changed = {"block_table_tensor", "seq_lens", "max_seq_len", "seq_lens_cpu_upper_bound"}
    for field in dataclasses.fields(whole):
        if field.name not in changed:
            assert getattr(view, field.name) is getattr(whole, field.name), field.name


@pytest.mark.parametrize("length", [5, 150])
def test_a_refreshed_view_follows_the_lengths_in_the_same_memory(length):
    window, whole = window_of(budget(16, 4)), metadata([(length, 1), (40, 1)])
    view = window.of(whole)
    whole.seq_lens += 3
    window.refresh()
    fresh = window_of(budget(16, 4)).of(whole)
    assert torch.equal(view.block_table_tensor, fresh.block_table_tensor)
    assert torch.equal(view.seq_lens, fresh.seq_lens)


def test_padding_requests_stay_empty():
    whole = metadata([(100, 1), (1, 1)])
    whole.query_start_loc[2:] = 1
    whole.seq_lens[1] = 0
    assert window_of(budget(16, 4)).of(whole).seq_lens.tolist() == [16, 0]
