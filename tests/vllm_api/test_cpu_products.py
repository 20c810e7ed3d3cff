# SPDX-License-Identifier: Apache-2.0
"""Where vLLM multiplies half-precision weights token by token on a CPU, the plugin says what to type."""

import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_magicdec.vllm_api.cpu_products import why_products_are_slow


def config_of(dtype: torch.dtype, device_type: str = "cpu", quantization: str | None = None):
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device_type),
        model_config=SimpleNamespace(dtype=dtype, quantization=quantization),
    )


@pytest.fixture
def avx2(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_without_avx512_is_said_to_be_slow(avx2, dtype):
    sentence = why_products_are_slow(config_of(dtype))
    assert str(dtype).removeprefix("torch.") in sentence and "--dtype float32" in sentence


def test_nothing_is_said_elsewhere(avx2, monkeypatch):
    assert why_products_are_slow(config_of(torch.float32)) is None
    assert why_products_are_slow(config_of(torch.bfloat16, "cuda")) is None
    assert why_products_are_slow(config_of(torch.bfloat16, quantization="gptq")) is None
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    assert why_products_are_slow(config_of(torch.bfloat16)) is None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of oneDNN on x86")
def test_vllm_has_no_other_product_without_avx512():
    # What the sentence rests on: true of the machine that runs this.
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("of vLLM's CPU build")
    current_platform.import_kernels()
    import vllm._custom_ops as ops

    weight = torch.randn(64, 64).bfloat16()
    if "avx512f" in Path("/proc/cpuinfo").read_text():  # whatever this process was told of it
        ops.create_onednn_mm(weight.t(), 32)
    else:
        with pytest.raises(RuntimeError):
            ops.create_onednn_mm(weight.t(), 32)
