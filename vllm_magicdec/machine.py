# SPDX-License-Identifier: Apache-2.0
"""What the processor's instructions are worth, where having them does not tell."""

from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


def has_slow_avx512_bf16() -> bool:
    """Whether AVX512_BF16 multiplies at half the rate of float32, for all that it reads half as much.

    Intel's cores since Sapphire Rapids, those with AVX512_FP16, begin one `vdpbf16ps` every other cycle and
    two float32 products in each: 85 and 166 GFLOP/s of one core of an Emerald Rapids. AMD's begin as many
    of either. (AMX is fast, where a machine has it.) The vendor is read where vLLM reads it.
    """
    if not CPU_INFO.exists():
        return False
    described = CPU_INFO.read_text()
    return "GenuineIntel" in described and "avx512_fp16" in described
