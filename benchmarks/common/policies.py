# SPDX-License-Identifier: Apache-2.0
"""The measured policies, as fields of a speculative configuration."""

POLICIES: dict[str, dict[str, str]] = {
    "streamingllm": {"draft_kv_policy": "streamingllm"},
    "snapkv": {"draft_kv_policy": "snapkv", "draft_kv_granularity": "page"},
    "snapkv-token": {"draft_kv_policy": "snapkv", "draft_kv_granularity": "token"},
    "verify-topk": {"draft_kv_policy": "verify-topk"},
}
