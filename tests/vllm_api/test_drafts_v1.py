# SPDX-License-Identifier: Apache-2.0
"""Catch-up passes of a draft model on the V1 runner."""

from types import SimpleNamespace

import pytest

from vllm_magicdec.vllm_api.drafts_v1 import ModelDraft


def caught_up(monkeypatch, num_steps: int, is_first: list[bool]) -> set[int]:
    """Requests with catch-up tokens, where each lacks ten tokens or more."""
    draft = object.__new__(ModelDraft)
    read: set[int] = set()
    monkeypatch.setattr(ModelDraft, "may_lag", True)
    draft._proposer = SimpleNamespace(
        num_latest=lambda num_steps: 1, max_num_tokens=1000, num_speculative_tokens=4
    )
    monkeypatch.setattr(ModelDraft, "_pages", range(len(is_first)))
    draft._held = SimpleNamespace(first_lacking=lambda index, end: end - 10 - 100 * index)
    draft._ends, draft._catch_up_starts = [500] * len(is_first), {}
    draft._read = lambda batch, pieces: read.update(piece[0] for piece in pieces)
    batch = SimpleNamespace(
        req_ids=[str(index) for index in range(len(is_first))],
        is_prefilling=[False] * len(is_first),
        is_first=is_first,
    )
    draft.catch_up(batch, num_steps)
    return read | set(draft._catch_up_starts)


@pytest.mark.parametrize(
    ("num_steps", "is_first", "expected"),
    [
        (0, [False, False, False], set()),
        (0, [False, True, False], {1}),
        (4, [False, True, False], {0, 1, 2}),
    ],
)
def test_in_plain_steps_only_new_requests_catch_up(monkeypatch, num_steps, is_first, expected):
    assert caught_up(monkeypatch, num_steps, is_first) == expected
