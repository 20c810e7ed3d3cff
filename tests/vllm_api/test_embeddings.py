# SPDX-License-Identifier: Apache-2.0
"""Embeddings as input of the target in draft passes; tests/engine/ has real engines."""

from types import SimpleNamespace

import pytest
import torch

from vllm_magicdec.vllm_api.embeddings import embed, takes_embeddings


@pytest.mark.parametrize(
    ("is_multimodal", "has_prompt_embeds", "expected"),
    [(False, False, False), (True, False, True), (False, True, True)],
)
def test_which_targets_take_embeddings(is_multimodal, has_prompt_embeds, expected):
    config = SimpleNamespace(
        supports_multimodal_inputs=is_multimodal, enable_prompt_embeds=has_prompt_embeds
    )
    assert takes_embeddings(config) is expected


def test_placeholders_outside_the_vocabulary_have_some_embedding():
    table = torch.nn.Embedding(10, 4)
    model = SimpleNamespace(embed_input_ids=table)
    embedded = embed(model, torch.tensor([3, 10, 70000, -1], dtype=torch.int32), 10)
    assert embedded.shape == (4, 4)
    assert torch.equal(embedded[0], table.weight[3])
