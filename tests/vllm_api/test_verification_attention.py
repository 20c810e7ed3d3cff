# SPDX-License-Identifier: Apache-2.0
"""The start-up warnings about attention backends that verify slowly."""

from types import SimpleNamespace

import pytest

from vllm_magicdec.vllm_api import verification_attention

FA2 = {"vllm_flash_attn_version": 2, "num_heads": 8, "num_kv_heads": 2}


def warnings_of(monkeypatch, device: str, impl: object) -> list[str]:
    layers = {"indexer": object(), "attn": SimpleNamespace(impl=impl)}
    monkeypatch.setattr(verification_attention, "get_layers_from_vllm_config", lambda *_: layers)
    logged: list[str] = []
    logger = verification_attention.logger
    monkeypatch.setattr(logger, "warning_once", lambda text, *args, **_: logged.append(text % args))
    device_config = SimpleNamespace(device_type=device)
    verification_attention.warn_if_slow(SimpleNamespace(device_config=device_config))
    return logged


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
    logged = warnings_of(monkeypatch, device, SimpleNamespace(**impl))
    assert bool(logged) == warns
    assert all("--attention-backend FLASHINFER" in text for text in logged)
