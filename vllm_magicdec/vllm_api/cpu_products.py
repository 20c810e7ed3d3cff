# SPDX-License-Identifier: Apache-2.0
"""Models that a CPU multiplies slowly: said once at start-up."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # benchmarks ask for the first function before they parse their options
    from vllm.config import VllmConfig


def multiplies_many_at_once(dtype: torch.dtype) -> bool:
    """Whether vLLM multiplies many tokens at once by dense weights of this dtype on this CPU.

    Where oneDNN has no product of a dtype (bfloat16 without AVX-512, float16 without AVX512_FP16), vLLM
    takes torch's, which takes one token after another: 10 GFLOP/s of a Zen 3 core for 1 token and for 72,
    where oneDNN's product in float32 reaches 16 and 76.
    """
    if not torch.backends.mkldnn.is_available():
        return True  # nothing is known
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return True


def why_products_are_slow(vllm_config: "VllmConfig") -> str | None:
    """What to type where verifying several tokens costs as many decode steps, whatever attention does.

    Args:
        vllm_config: the engine's.

    Returns:
        A sentence; None where there is nothing to say.
    """
    model = vllm_config.model_config
    if (
        vllm_config.device_config.device_type != "cpu"
        or model.quantization is not None
        or multiplies_many_at_once(model.dtype)
    ):
        return None
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        f"this CPU has no instructions for {dtype}, and vLLM multiplies by dense weights in it token by "
        "token, so that verifying several costs as many plain steps; --dtype float32 is faster at that and "
        "at prompts by several times, for twice the memory of weights and KV cache"
    )
