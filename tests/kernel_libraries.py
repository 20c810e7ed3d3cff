# SPDX-License-Identifier: Apache-2.0
"""vLLM's libraries of kernels for x86 CPUs: which of them a process loads, and how to make it load another.

vLLM takes the library for the best instruction set that torch reports, and its attention chooses its
packing by the same questions. With `FORCED` in its environment a process of the tests (`at_start/`) hears
other answers, so that a machine with AVX-512 guards AVX2 as well.
"""

import os
from pathlib import Path

import torch

FORCED = "MAGICDEC_TEST_KERNELS"

# What each of the libraries needs, the best first, and its file beside vLLM's Python files.
FILES = {"avx512_bf16": "_C.abi3.so", "avx512": "_C_AVX512.abi3.so", "avx2": "_C_AVX2.abi3.so"}
_RANKS = list(FILES)


def executable() -> list[str]:
    """Those that this machine can execute, the best first; none where it is no x86."""
    if not torch.cpu._is_avx2_supported():
        return []
    best = 0 if torch.cpu._is_avx512_bf16_supported() else 1 if torch.cpu._is_avx512_supported() else 2
    return _RANKS[best:]


def best() -> str:
    """The one that vLLM loads, unless another is forced; "" where this is no x86."""
    return forced() or next(iter(executable()), "")


def loaded() -> str:
    """The library that vLLM has loaded into this process; "" where there is none."""
    maps = Path("/proc/self/maps").read_text()
    found = [name for name, file in FILES.items() if f"/vllm/{file}" in maps]
    return " ".join(found)


def force(name: str) -> None:
    """Let torch deny what is better than one of the libraries, and compute as such a machine would.

    Raises:
        ValueError: there is no such library, or this machine cannot execute it.
    """
    if name not in executable():
        raise ValueError(f"{FORCED}={name}: this machine executes {', '.join(executable()) or 'none'}")
    torch.cpu._is_avx512_bf16_supported = lambda: name == "avx512_bf16"
    torch.cpu._is_avx512_supported = lambda: name != "avx2"
    torch.cpu._is_amx_tile_supported = lambda: False


def environment(name: str) -> dict[str, str]:
    """What makes a process, started with `at_start/` on its path, use one of the libraries."""
    env = {FORCED: name}
    if name == "avx2":
        # torch's own kernels and oneDNN's.
        env |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    return env


def forced() -> str:
    """The library that the environment asks for; "": the best one."""
    return os.environ.get(FORCED, "")
