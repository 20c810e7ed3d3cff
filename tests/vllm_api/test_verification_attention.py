# SPDX-License-Identifier: Apache-2.0
"""The start-up warnings about attention backends that verify slowly."""

from types import SimpleNamespace

import pytest
from vllm.v1.attention.backends import triton_attn

from vllm_magicdec.vllm_api import verification_attention

FA2 = {"vllm_flash_attn_version": 2, "num_heads": 8, "num_kv_heads": 2}


def warnings_of(monkeypatch, device: str, impl: object, num_drafts: int = 4) -> list[str]:
    layers = {"indexer": object(), "attn": SimpleNamespace(impl=impl)}
    monkeypatch.setattr(verification_attention, "get_layers_from_vllm_config", lambda *_: layers)
    logged: list[str] = []
    logger = verification_attention.logger
    monkeypatch.setattr(logger, "warning_once", lambda text, *args, **_: logged.append(text % args))
    device_config = SimpleNamespace(device_type=device)
    verification_attention.warn_if_slow(
        SimpleNamespace(device_config=device_config, num_speculative_tokens=num_drafts)
    )
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


@pytest.mark.parametrize(
    ("device", "most_tokens", "num_drafts", "advice"),
    [
        ("cuda", None, 1, "use vLLM 0.33 with at most 7 drafts, or on Hopper"),
        ("cuda", 8, 7, None),
        ("cuda", 8, 8, "use at most 7 drafts, or on Hopper"),
        ("cpu", None, 4, None),
    ],
)
def test_triton_attention_is_warned_about_where_it_does_not_split_contexts(
    monkeypatch, device, most_tokens, num_drafts, advice
):
    """vLLM 0.32 names no number of tokens; 0.33 does."""
    monkeypatch.delattr(triton_attn, "MAX_3D_QUERY_LEN", raising=False)
    if most_tokens is not None:
        monkeypatch.setattr(triton_attn, "MAX_3D_QUERY_LEN", most_tokens, raising=False)
    impl = triton_attn.TritonAttentionImpl.__new__(triton_attn.TritonAttentionImpl)
    logged = warnings_of(monkeypatch, device, impl, num_drafts)
    assert len(logged) == (advice is not None)
    assert all(f"verifies {num_drafts} drafts" in text and advice in text for text in logged)
