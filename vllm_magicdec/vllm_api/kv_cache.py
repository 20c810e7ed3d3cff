# SPDX-License-Identifier: Apache-2.0
"""What the KV cache must look like for a view to be valid."""

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from vllm_magicdec.errors import METHOD, MagicDecConfigError


def require_one_full_attention_group(kv_cache_config: KVCacheConfig) -> None:
    """Refuse caches that free or share pages in a way that a view does not know.

    Raises:
        MagicDecConfigError: with the reason and the way out.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise MagicDecConfigError(
            f"{METHOD} needs every layer's KV cache in one group of full-attention pages, but this model "
            f"has {len(groups)} group(s) ({kinds}); try --disable-hybrid-kv-cache-manager"
        )
