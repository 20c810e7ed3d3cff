# SPDX-License-Identifier: Apache-2.0
"""Start-up warning for dtypes in which a CPU multiplies slowly."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # benchmarks import this module before they parse their options
    from vllm.config import VllmConfig


def multiplies_many_at_once(dtype: torch.dtype) -> bool:
    """Whether vLLM multiplies dense weights of this dtype by many tokens at once on this CPU.

    Where oneDNN does not support a dtype (bfloat16 without AVX-512, float16 without AVX512_FP16), vLLM uses
    torch's product, which processes tokens one by one: 10 GFLOP/s of a Zen 3 core for 1 token and for 72,
    where oneDNN reaches 16 and 76 in float32.
    """
    if not torch.backends.mkldnn.is_available():
        return True  # unknown
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return True


def why_products_are_slow(vllm_config: "VllmConfig") -> str | None:
    """Return a warning if verifying several tokens costs as much as that many decode steps, else None."""
    model = vllm_config.model_config
    if (
        vllm_config.device_config.device_type != "cpu"
        or model.quantization is not None
        or multiplies_many_at_once(model.dtype)
    ):
        return None
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        f"this CPU has no instructions for {dtype}, so vLLM multiplies dense weights token by token and "
        "verifying several tokens costs as many plain steps; --dtype float32 is several times faster at "
        "that and at prompts, for twice the memory of weights and KV cache"
    )
