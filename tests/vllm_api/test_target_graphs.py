# SPDX-License-Identifier: Apache-2.0
"""Full CUDA graphs of verifications, by vLLM's own capture sizes and dispatch with CUDA's defaults."""

import pickle

import pytest
from vllm.config import CUDAGraphMode
from vllm.config.utils import replace

from vllm_magicdec.errors import METHOD
from vllm_magicdec.plugin import register

register()

AUTO = {"method": METHOD, "num_speculative_tokens": "auto"}
NESTED = (0, 1, 3, 7)


def has_full_graph(manager, num_reqs, length):
    num_tokens = num_reqs * (length + 1)
    desc = manager.dispatch(num_reqs, num_tokens, length + 1, num_active_loras=0)
    return desc.cg_mode == CUDAGraphMode.FULL


def without_graph(manager, lengths, max_num_seqs):
    """Batches up to vLLM's largest size whose verification has no full graph."""
    return [
        (num_reqs, length)
        for length in lengths
        for num_reqs in range(1, max_num_seqs + 1)
        if num_reqs * (length + 1) <= manager.compilation_config.max_cudagraph_capture_size
        and not has_full_graph(manager, num_reqs, length)
    ]


@pytest.mark.parametrize(
    ("max_num_seqs", "lengths"),
    [
        (1, (0, 7)),
        (2, (0, 7)),
        (3, (0, 3, 7)),
        *((n, NESTED) for n in (4, 7, 8, 11, 12, 99, 100, 135, 256, 270, 511, 1024)),
    ],
)
def test_every_verification_that_auto_chooses_has_a_full_graph(configure, capture, max_num_seqs, lengths):
    config = configure(AUTO, max_num_seqs=max_num_seqs)
    assert config.use_v2_model_runner
    spec = config.speculative_config
    for copied in (spec, replace(spec), pickle.loads(pickle.dumps(spec))):
        assert copied.lengths == lengths
    captured = lengths[-max_num_seqs:]  # vLLM captures no more lengths than requests
    assert without_graph(capture(config), captured, max_num_seqs) == []


@pytest.mark.parametrize(
    "engine", [{"enforce_eager": True}, {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}]
)
def test_all_lengths_are_kept_if_they_cost_no_graphs(configure, engine):
    assert configure(AUTO, **engine).speculative_config.lengths == tuple(range(9))


def test_sizes_of_the_user_have_graphs_of_every_number_of_drafts(configure, capture):
    compilation = {"cudagraph_capture_sizes": [1, 2, 10, 36]}
    config = configure(AUTO, max_num_seqs=10, compilation_config=compilation)
    assert config.compilation_config.max_cudagraph_capture_size == 36
    assert without_graph(capture(config), NESTED, 10) == []
