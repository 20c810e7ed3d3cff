# SPDX-License-Identifier: Apache-2.0
"""The warning where vLLM multiplies half-precision weights token by token on a CPU."""

from types import SimpleNamespace

import pytest
import torch

from vllm_magicdec.vllm_api import cpu_products
from vllm_magicdec.vllm_api.cpu_products import multiplies_many_at_once, why_products_are_slow

HALF = [torch.bfloat16, torch.float16]


def config_of(dtype: torch.dtype, device_type: str = "cpu", quantization: str | None = None):
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device_type),
        model_config=SimpleNamespace(dtype=dtype, quantization=quantization),
    )


@pytest.mark.parametrize("dtype", HALF)
def test_products_token_by_token_are_reported(monkeypatch, dtype):
    monkeypatch.setattr(cpu_products, "multiplies_many_at_once", lambda of: of == torch.float32)
    sentence = why_products_are_slow(config_of(dtype))
    assert str(dtype).removeprefix("torch.") in sentence and "--dtype float32" in sentence
    assert why_products_are_slow(config_of(torch.float32)) is None
    assert why_products_are_slow(config_of(dtype, "cuda")) is None
    assert why_products_are_slow(config_of(dtype, quantization="gptq")) is None
    monkeypatch.setattr(cpu_products, "multiplies_many_at_once", lambda of: True)
    assert why_products_are_slow(config_of(dtype)) is None


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_the_check_agrees_with_onednn(dtype):
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("needs vLLM's CPU build")
    current_platform.import_kernels()
    import vllm._custom_ops as ops

    weight = torch.randn(64, 64).to(dtype)
    if multiplies_many_at_once(dtype):
        ops.create_onednn_mm(weight.t(), 32)
    else:
        with pytest.raises(RuntimeError):
            ops.create_onednn_mm(weight.t(), 32)
