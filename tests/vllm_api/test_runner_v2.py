# SPDX-License-Identifier: Apache-2.0
"""What the V2 adapter makes of vLLM's request states and of lists of drafts; tests/engine/ has engines."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_magicdec.adaptive.draft_plan import DraftLists
from vllm_magicdec.views.base import Batch
from vllm_magicdec.vllm_api.runner_v2 import MagicDecSpeculator, show_removed

NUM_STEPS, VOCAB_SIZE = 3, 5


def make_speculator(**attributes) -> MagicDecSpeculator:
    speculator = MagicDecSpeculator.__new__(MagicDecSpeculator)
    vars(speculator).update(attributes)
    return speculator


def test_a_history_is_what_was_verified_and_what_was_sampled_after_it():
    """Rejected drafts and what an earlier request left in the row are no part of it."""
    token_ids = torch.tensor([[7, 8, 9, 0, 0], [5, 6, 20, 21, 99], [1, 2, 3, 4, 40]], dtype=torch.int32)
    speculator = make_speculator(
        req_states=SimpleNamespace(all_token_ids=SimpleNamespace(gpu=token_ids)),
    )
    context_lens = torch.tensor([4, 3])
    batch = Batch(
        req_ids=["a", "b"],
        tokens=torch.tensor([40, 21]),
        block_tables=[],
        context_lens=context_lens,
        observable_lens=context_lens,
        known_lens=[4, 5],
        is_prefilling=[False, False],
        is_first=[True, False],
    )
    found = speculator._histories(batch, np.array([2, 1]))
    assert [history.after(0).tolist() for history in found] == [[1, 2, 3, 4, 40], [5, 6, 20, 21]]


def test_answers_are_shown_before_the_runner_forgets_them():
    shown: list[tuple[str, list[int]]] = []
    rows = {"a": 1, "b": 0}
    states = SimpleNamespace(
        req_id_to_index=rows,
        remove_request=lambda name: rows.pop(name, None),
        prompt_len=SimpleNamespace(np=np.array([2, 3], dtype=np.int32)),
        total_len=SimpleNamespace(gpu=torch.tensor([6, 4], dtype=torch.int32)),
        all_token_ids=SimpleNamespace(gpu=torch.tensor([[1, 2, 3, 4, 0, 5, 90, 91]] * 2)),
    )
    show_removed(states, lambda *ended: shown.append(ended))
    assert states.remove_request("never begun") is None and shown == []
    assert states.remove_request("b") == 0
    assert shown == [("b", [3, 4, 0, 5])] and rows == {"a": 1}


@pytest.mark.parametrize("are_drawn", [False, True])
def test_drafts_that_a_list_lacks_are_token_0_with_certainty(are_drawn):
    rows, lists = torch.tensor([2, 0, 3, -1]), DraftLists([[4, 1], [], [3, 2, 1]])
    logits = torch.zeros(4, NUM_STEPS, VOCAB_SIZE) if are_drawn else None
    drafts = torch.full((4, NUM_STEPS), 9)
    speculator = make_speculator(
        idx_mapping=rows, draft_logits=logits, _drafter=SimpleNamespace(draft_tokens=drafts)
    )
    speculator._fill_up(lists, NUM_STEPS)
    assert drafts.tolist() == [[4, 1, 0], [0, 0, 0], [3, 2, 1], [9, 9, 9]]
    if logits is not None:
        certain = torch.tensor([1.0, 0, 0, 0, 0])
        for row in range(4):
            first = {2: 2, 0: 0, 3: 3}.get(row, NUM_STEPS)  # that the row's request lacks
            assert not logits[row, :first].any()
            assert all(torch.equal(own.softmax(0), certain) for own in logits[row, first:])
