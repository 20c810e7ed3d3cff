# SPDX-License-Identifier: Apache-2.0
"""Models that a CPU multiplies slowly: said once at start-up."""

import platform

import torch
from vllm.config import VllmConfig


def multiplies_half_precision() -> bool:
    """Whether vLLM multiplies many tokens at once by weights in bfloat16 or float16 on this CPU.

    Without AVX-512 oneDNN has no such product, and vLLM uses torch's, which takes one token after another:
    10 GFLOP/s of a Zen 3 core for 1 token and for 72, where oneDNN's product in float32 reaches 16 and 76.
    """
    return platform.machine() != "x86_64" or torch.cpu._is_avx512_supported()


def why_products_are_slow(vllm_config: VllmConfig) -> str | None:
    """What to type where verifying several tokens costs as many decode steps, whatever attention does.

    Args:
        vllm_config: the engine's.

    Returns:
        A sentence; None where there is nothing to say.
    """
    model = vllm_config.model_config
    if (
        vllm_config.device_config.device_type != "cpu"
        or multiplies_half_precision()
        or model.dtype not in (torch.bfloat16, torch.float16)
        or model.quantization is not None
    ):
        return None
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        f"this CPU has no AVX-512, without which vLLM multiplies by weights in {dtype} token by token, so "
        "that verifying several costs as many plain steps; --dtype float32 takes twice the memory and is "
        "several times as fast"
    )
