# SPDX-License-Identifier: Apache-2.0
"""Waiting for drafts beside a KV connector on a GPU; tests/engine/ has a real connector."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import KVTransferConfig

from vllm_magicdec.drafting.loops import Drafts
from vllm_magicdec.drafting.ports import Cache
from vllm_magicdec.vllm_api import runner_v2
from vllm_magicdec.vllm_api.runner_v2 import MagicDecSpeculator


def make_speculator(monkeypatch, device: str, role: str | None, happened: list[str]) -> MagicDecSpeculator:
    """Returns a speculator that records when it drafts and when it waits for the device."""
    stream = SimpleNamespace(synchronize=lambda: happened.append("waited"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    without_lookups = SimpleNamespace(draft_lookup="off", has_draft_model=False, spire=None)
    monkeypatch.setattr(
        runner_v2.StandaloneARSpeculator,
        "__init__",
        lambda self, *_: setattr(self, "speculative_config", without_lookups),
    )
    monkeypatch.setattr(runner_v2, "takes_embeddings", lambda config: False)
    transfer = role and KVTransferConfig(kv_connector="NixlConnector", kv_role=role)
    config = SimpleNamespace(model_config=None, kv_transfer_config=transfer)
    speculator = MagicDecSpeculator(config, torch.device(device), None)
    speculator._copy_request_inputs = lambda *_: None
    drafts = Drafts(torch.zeros(1, 4), np.full(1, 4), num_passes=4)
    speculator._drafter = SimpleNamespace(
        draft=lambda *_: happened.append("drafted") or drafts, draft_tokens=drafts.tokens
    )
    speculator._cache = Cache()
    return speculator


@pytest.mark.parametrize(
    ("device", "role", "expected"),
    [
        ("cuda", "kv_consumer", ["drafted", "waited"]),
        ("cuda", "kv_both", ["drafted", "waited"]),
        ("cuda", "kv_producer", ["drafted"]),
        ("cuda", None, ["drafted"]),
        ("cpu", "kv_both", ["drafted"]),
    ],
)
def test_a_step_ends_after_its_drafts_where_a_connector_fills_freed_blocks(
    monkeypatch, device, role, expected
):
    happened: list[str] = []
    speculator = make_speculator(monkeypatch, device, role, happened)
    batch = SimpleNamespace(num_reqs=1, idx_mapping=np.zeros(1))
    speculator.propose(batch, {}, {}, *[None] * 8, num_speculative_tokens=4)
    assert happened == expected
