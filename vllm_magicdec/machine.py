# SPDX-License-Identifier: Apache-2.0
"""Speed of the processor's instructions, where their presence does not determine it."""

from pathlib import Path

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
