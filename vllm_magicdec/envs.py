# SPDX-License-Identifier: Apache-2.0
"""Environment variables of the plugin."""

import os


def strict() -> bool:
    """`VLLM_MAGICDEC_STRICT=1`: a failure inside drafting ends the engine instead of being counted."""
    return os.environ.get("VLLM_MAGICDEC_STRICT", "0") == "1"


def native_attention() -> bool:
    """`VLLM_MAGICDEC_NATIVE_ATTENTION=1`: the kernel for CPUs attends in other methods' engines, too."""
    return os.environ.get("VLLM_MAGICDEC_NATIVE_ATTENTION", "0") == "1"
