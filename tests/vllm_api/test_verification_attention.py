# SPDX-License-Identifier: Apache-2.0
"""The start-up warning about attention backends that verify slowly."""

from types import SimpleNamespace

import pytest

from vllm_magicdec.vllm_api import verification_attention

FA2 = {"vllm_flash_attn_version": 2, "num_heads": 8, "num_kv_heads": 2}


@pytest.mark.parametrize(
    ("device", "impl", "warns"),
    [
        ("cuda", FA2, True),
        ("cuda", {**FA2, "vllm_flash_attn_version": 3}, False),
        ("cuda", {**FA2, "num_kv_heads": 8}, False),
        ("cuda", {"num_heads": 8, "num_kv_heads": 2}, False),  # another backend
        ("cpu", FA2, False),
    ],
)
def test_only_flash_attention_2_with_grouped_queries_is_warned_about(monkeypatch, device, impl, warns):
    layers = {"indexer": object(), "attn": SimpleNamespace(impl=SimpleNamespace(**impl))}
    monkeypatch.setattr(verification_attention, "get_layers_from_vllm_config", lambda *_: layers)
    logged = []
    logger = verification_attention.logger
    monkeypatch.setattr(logger, "warning_once", lambda text, *_, **__: logged.append(text))
    verification_attention.warn_if_slow(SimpleNamespace(device_config=SimpleNamespace(device_type=device)))
    assert bool(logged) == warns
    assert all("--attention-backend FLASHINFER" in text for text in logged)
