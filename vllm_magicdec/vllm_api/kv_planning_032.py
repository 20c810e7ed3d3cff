# SPDX-License-Identifier: Apache-2.0
"""The plan of the KV cache in vLLM 0.32; `kv_planning_033.py` has the same names."""

from vllm.config import VllmConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

MODULE, OWNER = kv_cache_utils.__name__, ""  # where vLLM groups layers, for a hook
PARAMETERS = ("vllm_config", "kv_cache_spec")


def get_kv_cache_groups(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Group layers by their KV-cache specs."""
    return kv_cache_utils.get_kv_cache_groups(vllm_config, specs)


def pool_bytes_per_block(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> int:
    """Return the bytes of a block, over all layers of the groups that share it."""
    return kv_cache_utils._pool_bytes_per_block(vllm_config, groups)


def max_memory_usage_bytes(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> int:
    """Return the bytes of a request of the maximum length."""
    return kv_cache_utils._max_memory_usage_bytes_from_groups(vllm_config, groups)
