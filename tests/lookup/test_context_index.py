# SPDX-License-Identifier: Apache-2.0
"""The index of a context against a naive reference."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import likeliest_continuation

from vllm_magicdec.lookup import context_index
from vllm_magicdec.lookup.context_index import (
    MAX_CANDIDATES,
    MAX_LONGEST,
    MAX_MATCH,
    MIN_MATCH,
    ContextIndex,
)


def index_of(*parts: list[int]) -> ContextIndex:
    index = ContextIndex()
    for part in parts:
        index.extend(np.array(part, dtype=np.int32))
    return index


def found(index: ContextIndex, ahead: list[int], most: int) -> tuple[int, list[int], list[float]]:
    match = index.look_up(np.array(ahead, dtype=np.int32), most)
    return match.length, match.tokens, match.shares


def expected(context: list[int], ahead: list[int], most: int) -> tuple[int, list[int], list[float]]:
    return likeliest_continuation(
        context, ahead, most, min_match=MIN_MATCH, max_match=MAX_MATCH, max_longest=MAX_LONGEST
    )


# Few different tokens, so that there are many matches; vLLM's ids go up to 2^31.
token_lists = st.sampled_from([2, 4, 30]).flatmap(lambda n: st.lists(st.integers(0, n - 1), max_size=300))


@settings(max_examples=400, deadline=None)
@given(
    st.lists(token_lists, min_size=1, max_size=4),
    st.lists(st.integers(0, 3), max_size=6),
    st.integers(1, 12),
    st.sampled_from([1, 2**24 + 1]),
)
def test_continuations_equal_the_references(parts, ahead, most, factor):
    parts = [[token * factor for token in part] for part in parts]
    ahead = [token * factor for token in ahead]
    context = [token for part in parts for token in part]
    index = index_of(*parts)
    assert len(index) == len(context)
    assert found(index, ahead, most) == expected(context, ahead, most)
    more = index.look_up(np.array(ahead, dtype=np.int32), most + 7).first(most)
    assert (more.length, more.tokens, more.shares) == expected(context, ahead, most)


def test_a_single_token_is_matched_where_that_is_enough():
    index = index_of([5, 1, 7, 5, 2, 5, 1, 6, 5])
    assert found(index, [], 2) == (1, [1, 6], [2 / 3, 1 / 2])
    assert index.look_up(np.zeros(0, dtype=np.int32), 2, MIN_MATCH + 1).length == 0
    assert index.look_up(np.array([2], dtype=np.int32), 1, MIN_MATCH + 1).tokens == [5]


@pytest.mark.parametrize("pair", [[7], [3, 7]])
def test_a_token_that_is_followed_by_another_one_every_time(pair):
    """More different next tokens than candidates, with hash collisions; the most frequent one is found."""
    once = [token for n in range(MAX_CANDIDATES + 200) for token in (*pair, 1000 + n)]
    context = [*once, *pair, 1001, *pair, 5000, *pair, 1001, 9, *pair]
    index = index_of(context)
    # The candidates include the context's own end, and positions with equal hashes only.
    shares = pytest.approx([2 / MAX_CANDIDATES, 0.5], rel=0.01)
    assert found(index, [], 2) == (len(pair), [1001, 9], shares)


def test_tokens_with_equal_hashes_only_do_not_match(monkeypatch):
    context = list(range(200))  # no pair twice, in a table of 256 entries
    index = index_of(context)
    keys = {int(context_index._hash(a, b, 256)) for a, b in itertools.pairwise(context)}
    assert len(keys) < len(context) - 1
    for first, second in [(3, 5), (7, 9), (11, 13)]:
        assert found(index, [first, second], 1) == (1, [second + 1], [1.0])


def test_the_search_in_a_constant_context_is_bounded():
    index = index_of([1] * 4 * MAX_CANDIDATES)
    assert found(index, [], 3) == (MAX_MATCH, [1, 1, 1], [1.0] * 3)
    # Only the latest of such long matches count.
    phrase = list(range(10, 10 + MAX_MATCH))
    context = [*[*phrase, 1] * MAX_LONGEST, *[*phrase, 2] * (MAX_LONGEST - 24), *phrase]
    assert found(index_of(context), [], 1) == (MAX_MATCH, [2], [1 - 24 / MAX_LONGEST])
    assert found(index_of(context), [], 3) == expected(context, [], 3)
