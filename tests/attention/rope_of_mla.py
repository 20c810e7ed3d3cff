# SPDX-License-Identifier: Apache-2.0
"""vLLM's RoPE on CPUs for queries of several heads, as MLA has them; run for every library of kernels."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.platforms import current_platform

HEAD_SIZE = 64
YARN = {"rope_type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def largest_errors(**parameters) -> list[float]:
    """Of queries and keys that the platform turned, against plain torch."""
    if not current_platform.is_cpu():
        pytest.skip("needs vLLM's CPU build")
    current_platform.import_kernels()
    with set_current_vllm_config(VllmConfig()):
        parameters = {"rope_theta": 10000.0, **parameters}
        options = {"max_position": 256, "is_neox_style": False, "dtype": torch.float32}
        rope = get_rope(HEAD_SIZE, rope_parameters=parameters, **options)
        positions = torch.arange(5)
        queries, keys = torch.randn(5, 4, 32 + HEAD_SIZE)[..., 32:], torch.randn(5, 1, HEAD_SIZE)
        right = rope.forward_native(positions, queries.clone(), keys.clone())
        turned = rope.forward_cpu(positions, queries.clone(), keys.clone())
    return [(a - b).abs().max().item() for a, b in zip(right, turned, strict=True)]


def test_queries_are_right_where_rope_is_scaled():
    assert max(largest_errors(**YARN)) < 1e-5


def test_vllm_is_wrong_where_rope_is_not_scaled():
    """If this fails, vLLM has fixed it: `_check_mla` need not refuse such models."""
    queries, keys = largest_errors(rope_type="default")
    assert queries > 0.1
    assert keys < 1e-5
