# SPDX-License-Identifier: Apache-2.0
"""How the V1 adapter runs the target for a draft step; tests/engine/ does it in real engines."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode

from vllm_magicdec.vllm_api import runner_v1
from vllm_magicdec.vllm_api.runner_v1 import MagicDecProposer

GRAPHS = CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize(("due", "expected"), [({}, GRAPHS), ({"request": 1}, CUDAGraphMode.NONE)])
def test_no_graph_runs_while_log_probabilities_of_a_prompt_are_due(monkeypatch, due, expected):
    """They are made of the target's hidden states after the draft, and graphs share their memory."""
    modes: list[CUDAGraphMode] = []

    def note_mode(*args, cudagraph_runtime_mode, **kwargs):
        modes.append(cudagraph_runtime_mode)
        return nullcontext()

    monkeypatch.setattr(runner_v1, "set_forward_context", note_mode)
    proposer = MagicDecProposer.__new__(MagicDecProposer)
    proposer.vllm_config, proposer._takes_embeddings = None, False
    proposer._runner = SimpleNamespace(
        num_prompt_logprobs=due,
        positions=torch.zeros(4, dtype=torch.int64),
        input_ids=SimpleNamespace(gpu=torch.zeros(4, dtype=torch.int32)),
    )
    proposer.uses_mrope, proposer._adapters = False, None
    proposer._pad_slots = lambda *_: {}
    proposer._determine_batch_execution_and_padding = lambda num_tokens, use_cudagraphs=True: (
        GRAPHS if use_cudagraphs else CUDAGraphMode.NONE,
        num_tokens,
        None,
    )
    proposer.model = lambda positions, input_ids, inputs_embeds: torch.zeros(len(positions), 8)
    numbers = torch.arange(2)
    assert proposer._forward(numbers.int(), numbers, numbers, {}).shape == (2, 8)
    assert modes == [expected]
