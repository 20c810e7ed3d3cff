# SPDX-License-Identifier: Apache-2.0
"""Environment variables of the plugin."""

import os


def strict() -> bool:
    """`VLLM_MAGICDEC_STRICT=1`: a failure inside drafting ends the engine instead of being counted."""
    return os.environ.get("VLLM_MAGICDEC_STRICT", "0") == "1"


def fault() -> str:
    """`VLLM_MAGICDEC_FAULT`, for tests: a fault to inject into drafting (see `faults.py`); "": none."""
    return os.environ.get("VLLM_MAGICDEC_FAULT", "")
