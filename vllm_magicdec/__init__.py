# SPDX-License-Identifier: Apache-2.0
"""vllm-magicdec: sparse-KV self-speculative decoding for vLLM, without changing the output distribution."""

__version__ = "0.2.0"
TESTED_VLLM_VERSIONS = ("0.32.0", "0.33.0")
