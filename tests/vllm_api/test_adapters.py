# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in graphs of draft passes; tests/engine/test_lora.py has real adapters in passes."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_magicdec.vllm_api.adapters import Adapters


@pytest.mark.parametrize(
    ("num_active", "num_reqs", "ids"),
    [
        (0, 3, (0, 0, 0)),
        (1, 3, (1, 1, 1)),
        (2, 3, (1, 2, 1)),
        (3, 4, (1, 2, 1, 0)),  # two adapters, and tokens without one
        (3, 1, (1,)),  # without any adapter, vLLM's kernels would be missing from the graph
    ],
)
def test_a_graph_is_captured_with_its_number_of_adapters(num_active, num_reqs, ids):
    mappings, active = [], []
    manager = SimpleNamespace(activate_adapter=active.append, set_adapter_mapping=mappings.append)
    adapters = Adapters(SimpleNamespace(lora_manager=manager), SimpleNamespace(max_loras=2))
    adapters.apply_dummies(num_active, num_reqs)
    assert [(one.index_mapping, one.prompt_mapping) for one in mappings] == [(ids, ids)]
    assert active == list(range(1, min(num_active, 2) + 1))
    adapters.take(np.array([0, 7, 7, 3]))
    assert adapters.num_active == 3  # "none" counts, too
