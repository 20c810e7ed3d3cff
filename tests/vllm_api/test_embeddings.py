# SPDX-License-Identifier: Apache-2.0
"""Embeddings as input of the target in draft passes; tests/engine/ has real engines."""

from types import SimpleNamespace

import torch

from vllm_magicdec.vllm_api.embeddings import embed


def test_placeholders_outside_the_vocabulary_have_some_embedding():
    table = torch.nn.Embedding(10, 4)
    model = SimpleNamespace(embed_input_ids=table)
    embedded = embed(model, torch.tensor([3, 10, 70000, -1], dtype=torch.int32), 10)
    assert embedded.shape == (4, 4)
    assert torch.equal(embedded[0], table.weight[3])
