# SPDX-License-Identifier: Apache-2.0
"""Speed of products on the processor."""

from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def has_slow_avx512_bf16() -> bool:
    """Return whether AVX512_BF16 multiplies at half the rate of float32.

    Intel's cores with AVX512_FP16 (since Sapphire Rapids) start one `vdpbf16ps` every other cycle and two
    float32 products per cycle: 85 and 166 GFLOP/s on one core of an Emerald Rapids. AMD's start as many of
    either. AMX is fast.
    """
    if not CPU_INFO.exists():
        return False
    cpu_info = CPU_INFO.read_text()
    return "GenuineIntel" in cpu_info and "avx512_fp16" in cpu_info


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
