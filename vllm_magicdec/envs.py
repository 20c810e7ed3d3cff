# SPDX-License-Identifier: Apache-2.0
"""Environment variables of the plugin."""

import os


def strict() -> bool:
    """Return whether a failure while drafting ends the engine (`VLLM_MAGICDEC_STRICT=1`)."""
    return os.environ.get("VLLM_MAGICDEC_STRICT", "0") == "1"


def native_attention() -> bool:
    """Return whether engines of other methods use our CPU kernel (`VLLM_MAGICDEC_NATIVE_ATTENTION=1`)."""
    return os.environ.get("VLLM_MAGICDEC_NATIVE_ATTENTION", "0") == "1"
