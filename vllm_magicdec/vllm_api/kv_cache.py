# SPDX-License-Identifier: Apache-2.0
"""What the KV cache must look like for a view to be valid, and how large it may be beside the views."""

from collections.abc import Mapping

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.mem_utils import format_gib
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheSpec

from vllm_magicdec.drafting.sizing import memory_of_drafting
from vllm_magicdec.errors import METHOD, MagicDecConfigError

logger = init_logger(f"vllm.{__name__}")


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


def leave_memory_for_drafting(
    vllm_config: VllmConfig, kv_cache_specs: Mapping[str, KVCacheSpec], available: int
) -> int:
    """What a worker's KV cache may have of the memory that vLLM found available, in bytes.

    A size that the user gave is left as it is: what drafting takes comes on top.

    Args:
        vllm_config: the engine's.
        kv_cache_specs: of the worker's layers, by name.
        available: bytes.
    """
    cache_config = vllm_config.cache_config
    is_given = cache_config.kv_cache_memory_bytes or cache_config.num_gpu_blocks_override
    specs = list(kv_cache_specs.values())
    # Other caches are refused when they are laid out, with a sentence.
    if is_given or not all(isinstance(spec, AttentionSpec) for spec in specs):
        return available
    memory = memory_of_drafting(vllm_config, specs[0], len(specs))
    left = memory.leave(available, sum(spec.page_size_bytes for spec in specs))
    logger.info_once(
        "%s: of %s GiB, %s GiB are for what drafting keeps and %s GiB for the KV cache.",
        METHOD,
        format_gib(available),
        format_gib(available - left),
        format_gib(left),
    )
    return left
