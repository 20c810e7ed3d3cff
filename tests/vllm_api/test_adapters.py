# SPDX-License-Identifier: Apache-2.0
"""The mapping of tokens to LoRA adapters in draft passes; tests/engine/ has real adapters."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_magicdec.vllm_api.adapters import Adapters


class Manager:
    """A stand-in for vLLM's LoRA manager."""

    def __init__(self):
        self.mappings, self.active = [], []

    def activate_adapter(self, lora_id):
        self.active.append(lora_id)

    def set_adapter_mapping(self, mapping):
        self.mappings.append((mapping.index_mapping, mapping.prompt_mapping))


@pytest.fixture
def manager():
    return Manager()


@pytest.fixture
def adapters(manager):
    return Adapters(SimpleNamespace(lora_manager=manager), SimpleNamespace(max_loras=2))


def test_every_request_drafts_with_its_adapter(adapters, manager):
    adapters.take(np.array([0, 7, 7, 3], dtype=np.int32))
    assert adapters.num_active == 3  # "none" counts, too
    adapters.apply(np.arange(4))
    adapters.apply([1, 3], num_tokens=2)
    assert manager.mappings == [((0, 7, 7, 3), (0, 7, 7, 3)), ((7, 7, 3, 3), (7, 3))]
    adapters.take(np.zeros(2, dtype=np.int32))
    assert adapters.num_active == 0
    assert manager.active == []


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
def test_a_graph_is_captured_with_its_number_of_adapters(adapters, manager, num_active, num_reqs, ids):
    adapters.apply_dummies(num_active, num_reqs)
    assert manager.mappings == [(ids, ids)]
    assert manager.active == list(range(1, min(num_active, 2) + 1))
