# SPDX-License-Identifier: Apache-2.0
"""The plan of the KV cache since vLLM 0.33, where the platform has a builder for it."""

from vllm.config import VllmConfig
from vllm.v1.core import kv_cache_planning
from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

# Where vLLM groups layers, for a hook: its own grouping and that of models that declare theirs.
MODULE, OWNER = kv_cache_planning.__name__, "DefaultKVCacheConfigBuilder"
PARAMETERS = ("self", "vllm_config", "kv_cache_spec")


def get_kv_cache_groups(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Group layers by their KV-cache specs."""
    return get_kv_cache_config_builder(vllm_config).get_kv_cache_groups(vllm_config, specs)


def pool_bytes_per_block(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> int:
    """Return the bytes of a block, over all layers of the groups that share it."""
    return kv_cache_planning._pool_bytes_per_block(vllm_config, groups)


def max_memory_usage_bytes(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> int:
    """Return the bytes of a request of the maximum length."""
    builder = get_kv_cache_config_builder(vllm_config)
    return kv_cache_planning._max_memory_usage_bytes_from_groups(builder, vllm_config, groups)
