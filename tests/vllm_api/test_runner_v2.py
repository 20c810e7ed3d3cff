# SPDX-License-Identifier: Apache-2.0
"""How the V2 adapter handles vLLM's request states and lists of drafts; tests/engine/ has engines."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.forward_context import get_forward_context

from vllm_magicdec.adaptive.draft_plan import DraftLists
from vllm_magicdec.errors import METHOD
from vllm_magicdec.plugin import register
from vllm_magicdec.views.round import PageView, Part, Pass, Queries
from vllm_magicdec.vllm_api import runner_v2
from vllm_magicdec.vllm_api.runner_v2 import MagicDecSpeculator
from vllm_magicdec.vllm_api.runner_wrappers import report_removed

register()

NUM_STEPS, VOCAB_SIZE = 3, 5


def make_speculator(**attributes) -> MagicDecSpeculator:
    speculator = MagicDecSpeculator.__new__(MagicDecSpeculator)
    vars(speculator).update(attributes)
    return speculator


def test_answers_are_reported_before_the_runner_drops_them():
    reported: list[tuple[str, list[int]]] = []
    rows = {"a": 1, "b": 0}
    states = SimpleNamespace(
        req_id_to_index=rows,
        remove_request=lambda name: rows.pop(name, None),
        prompt_len=SimpleNamespace(np=np.array([2, 3], dtype=np.int32)),
        total_len=SimpleNamespace(gpu=torch.tensor([6, 4], dtype=torch.int32)),
        all_token_ids=SimpleNamespace(gpu=torch.tensor([[1, 2, 3, 4, 0, 5, 90, 91]] * 2)),
    )
    report_removed(states, lambda *removed: reported.append(removed))
    assert states.remove_request("never begun") is None and reported == []
    assert states.remove_request("b") == 0
    assert reported == [("b", [3, 4, 0, 5])] and rows == {"a": 1}


@pytest.mark.parametrize("are_sampled", [False, True])
def test_lists_are_padded_with_token_0_with_certainty(are_sampled):
    rows, lists = torch.tensor([2, 0, 3, -1]), DraftLists([[4, 1], [], [3, 2, 1]])
    logits = torch.zeros(4, NUM_STEPS, VOCAB_SIZE) if are_sampled else None
    drafts = torch.full((4, NUM_STEPS), 9)
    speculator = make_speculator(
        idx_mapping=rows, draft_logits=logits, _drafter=SimpleNamespace(draft_tokens=drafts)
    )
    speculator._fill_up(lists, NUM_STEPS)
    assert drafts.tolist() == [[4, 1, 0], [0, 0, 0], [3, 2, 1], [9, 9, 9]]
    if logits is not None:
        certain = torch.tensor([1.0, 0, 0, 0, 0])
        for row in range(4):
            first = {2: 2, 0: 0, 3: 3}.get(row, NUM_STEPS)  # of the padding in the row
            assert not logits[row, :first].any()
            assert all(torch.equal(own.softmax(0), certain) for own in logits[row, first:])


class Stop(Exception):
    pass


def lay_out_again(speculator, monkeypatch) -> None:
    """Begin `set_attn` as vLLM does after it has measured the memory of graphs."""

    def stop(config, groups):
        raise Stop

    monkeypatch.setattr(runner_v2, "refuse_if_inexact", stop)
    speculator.vllm_config = None
    with pytest.raises(Stop):
        speculator.set_attn(None, None, None, None, None)


class Kept:
    """Stands for what only the speculator refers to."""


def test_graphs_and_views_of_the_first_layout_are_freed_before_the_second(monkeypatch):
    """vLLM captures graphs to measure their memory, and then lays out the whole KV cache."""
    graphs, passes, drafter, metadata = kept = [Kept() for _ in range(4)]
    speculator = make_speculator(
        _graphs={(1, 1): graphs, (4, 4): passes}, _drafter=drafter, page_metadata=metadata
    )
    references = [weakref.ref(own) for own in kept]
    del graphs, passes, drafter, metadata, kept
    assert all(own() is not None for own in references)
    lay_out_again(speculator, monkeypatch)
    assert all(own() is None for own in references)


def timed(monkeypatch, draft_dummies) -> MagicDecSpeculator:
    """A speculator with adaptive verification whose graphs have been captured."""
    monkeypatch.setenv("VLLM_MAGICDEC_STRICT", "0")
    failures = []
    speculator = make_speculator(
        enable_adaptive_verification=True,
        draft_tokens=torch.full((4, NUM_STEPS), 9),
        _graphs={},
        _drafter=SimpleNamespace(record_failure=failures.append),
        failures=failures,
        _copy_request_inputs=lambda *args, **kwargs: None,
        _draft_dummies=draft_dummies,
    )
    speculator.capture()
    return speculator


def propose_dummies(speculator, num_reqs: int) -> torch.Tensor:
    batch = SimpleNamespace(num_reqs=num_reqs, idx_mapping=None)
    return speculator.propose(batch, {}, {}, *[None] * 9, dummy_run=True)


def test_only_the_dummy_rounds_after_a_capture_are_timed(monkeypatch):
    """Those after the next layout of the KV cache warm up other things."""
    timed_reqs: list[int] = []
    speculator = timed(monkeypatch, timed_reqs.append)
    propose_dummies(speculator, 2)
    lay_out_again(speculator, monkeypatch)
    propose_dummies(speculator, 3)
    assert timed_reqs == [2]
    speculator.capture()
    propose_dummies(speculator, 4)
    assert timed_reqs == [2, 4]


def test_dummy_rounds_that_fail_end_the_timing_and_not_the_engine(monkeypatch):
    def draft_dummies(num_reqs):
        tried.append(num_reqs)
        raise torch.OutOfMemoryError("no room")

    tried: list[int] = []
    speculator = timed(monkeypatch, draft_dummies)
    for num_reqs in (2, 4):
        assert propose_dummies(speculator, num_reqs).tolist() == [[9] * NUM_STEPS] * num_reqs
    assert tried == [2] and speculator.failures == ["timing"]


def test_routers_see_the_padding_of_draft_steps_and_of_nothing_else(configure):
    """A mixture of experts would read the weights of experts for tokens that pad a CUDA graph."""

    def model(**inputs):
        seen.append(get_forward_context().is_padding)
        if is_broken:
            raise RuntimeError("broken on purpose")
        return inputs["positions"]

    seen: list[torch.Tensor | None] = []
    is_broken = False
    numbers = torch.arange(4)
    speculator = make_speculator(
        vllm_config=configure({"method": METHOD}),
        model=model,
        arange_gpu=numbers.int(),
        idx_mapping=numbers.int(),
        _steps=numbers,
        _rope=None,
        _takes_embeddings=False,
        _drafter=SimpleNamespace(groups=[SimpleNamespace(layer_names=["attn"])]),
        _sample_each=lambda _, hidden_states: (hidden_states, None, None),
        sample_draft=lambda hidden_states, *_: hidden_states,
        **dict.fromkeys(("temperature", "seeds", "current_draft_step", "draft_logits")),
    )
    padding = torch.tensor([False, False, False, True])
    view = PageView(torch.ones(2, dtype=torch.int32), torch.zeros((2, 1), dtype=torch.int32), 1)
    parts = [Part(numbers, numbers, view)]
    for first, expected in {-1: [1, 3], 0: [0, 1, 2, 3]}.items():
        draft_pass = Pass(numbers, Queries.uniform(2, first, 2), parts, is_padding=padding)
        assert speculator.forward_and_sample(draft_pass, {}).tolist() == expected
    is_broken = True
    with pytest.raises(RuntimeError, match="on purpose"):
        speculator.forward_and_sample(draft_pass, {})
    is_broken = False
    speculator.forward(numbers, numbers, [numbers], {})
    assert all(own is padding for own in seen[:3]) and seen[3:] == [None]
