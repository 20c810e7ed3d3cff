# SPDX-License-Identifier: Apache-2.0
"""vLLM's kernel libraries for x86 CPUs: find the one a process loads, or force another.

vLLM and its attention choose by the instruction sets that torch reports. If `FORCED` is in a process's
environment, `at_start/` patches that report, so that a machine with AVX-512 also tests AVX2.
"""

import os
from pathlib import Path

import torch

FORCED = "MAGICDEC_TEST_KERNELS"

# Files of the libraries by the required instruction set, the best first.
FILES = {"avx512_bf16": "_C.abi3.so", "avx512": "_C_AVX512.abi3.so", "avx2": "_C_AVX2.abi3.so"}
_RANKS = list(FILES)


def executable() -> list[str]:
    """Return the libraries that this machine can execute, the best first; none if it is not x86."""
    if not torch.cpu._is_avx2_supported():
        return []
    best = 0 if torch.cpu._is_avx512_bf16_supported() else 1 if torch.cpu._is_avx512_supported() else 2
    return _RANKS[best:]


def best() -> str:
    """Return the library that vLLM loads here, or the forced one; "" if the machine is not x86."""
    return forced() or next(iter(executable()), "")


def loaded() -> str:
    """Return the library that vLLM has loaded into this process; "" if none."""
    maps = Path("/proc/self/maps").read_text()
    found = [name for name, file in FILES.items() if f"/vllm/{file}" in maps]
    return " ".join(found)


def force(name: str) -> None:
    """Patch torch to report no better instruction set; ValueError: this machine cannot execute it."""
    if name not in executable():
        raise ValueError(f"{FORCED}={name}: this machine executes {', '.join(executable()) or 'none'}")
    torch.cpu._is_avx512_bf16_supported = lambda: name == "avx512_bf16"
    torch.cpu._is_avx512_supported = lambda: name != "avx2"
    torch.cpu._is_amx_tile_supported = lambda: False


def environment(name: str) -> dict[str, str]:
    """Return the variables that force a library in a process with `at_start/` on its path."""
    env = {FORCED: name}
    if name == "avx2":
        # torch's own kernels and oneDNN's.
        env |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    return env


def forced() -> str:
    """Return the library that the environment forces; "": the best one."""
    return os.environ.get(FORCED, "")
