# SPDX-License-Identifier: Apache-2.0
"""The layer groups of vLLM's KV cache, and the memory that drafting takes from it."""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.mem_utils import format_gib
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, UniformTypeKVCacheSpecs

from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.drafting.layer_groups import LayerGroup, find_layer_groups, reaches_of
from vllm_magicdec.drafting.sizing import memory_of_drafting

logger = init_logger(f"vllm.{__name__}")

_DRAFT_LAYER_PREFIX = "draft_model."  # vLLM's, in layer names


def layer_groups(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, names: Container[str] | None = None
) -> list[LayerGroup]:
    """Group a worker's drafting layers, all or those of `names`, by the views that they need.

    Raises:
        MagicDecConfigError: a KV cache frees or shares pages in a way that no view supports.
    """
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    specs = {name: layer.get_kv_cache_spec(vllm_config) for name, layer in layers.items()}
    groups: Sequence[KVCacheGroupSpec] = kv_cache_config.kv_cache_groups
    if names is not None:
        groups = _restrict(groups, lambda name: name in names)
    return find_layer_groups(groups, reaches_of(specs))


def _restrict(groups: Sequence[KVCacheGroupSpec], keep: Callable[[str], bool]) -> list[KVCacheGroupSpec]:
    """Return the groups with only the layers whose names pass `keep`."""
    return [replace(group, layer_names=list(filter(keep, group.layer_names))) for group in groups]


def leave_memory_for_drafting(
    vllm_config: VllmConfig, kv_cache_specs: Mapping[str, KVCacheSpec], available: int
) -> int:
    """Return the bytes that a worker's KV cache may take, less what drafting needs.

    A size that the user gave is kept; drafting's memory comes on top.
    """
    cache_config, spec = vllm_config.cache_config, vllm_config.speculative_config
    assert isinstance(spec, MagicDecSpeculativeConfig)
    if spec.has_draft_model and spec.spire is None:
        return available  # its views are block tables, as small as vLLM's own
    if cache_config.kv_cache_memory_bytes or cache_config.num_gpu_blocks_override:
        return available
    groups = _group_layers(vllm_config, kv_cache_specs)
    drafting = groups
    if spec.has_draft_model:
        drafting = _restrict(groups, lambda name: name.startswith(_DRAFT_LAYER_PREFIX))
    fixed, per_block = memory_of_drafting(
        vllm_config, find_layer_groups(drafting, reaches_of(kv_cache_specs))
    )
    # Layers that share another layer's cache need views, too.
    num_layers = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
    factor = max(1.0, num_layers / max(1, len(kv_cache_specs)))
    block_bytes = max(map(_block_bytes, groups), default=0)
    room = max(0, available - math.ceil(fixed * factor))
    left = room * block_bytes // (block_bytes + math.ceil(per_block * factor))
    logger.info_once(
        "%s: of %s GiB, %s GiB are for drafting and %s GiB for the KV cache.",
        spec.name,
        format_gib(available),
        format_gib(available - left),
        format_gib(left),
    )
    return left


def _group_layers(
    vllm_config: VllmConfig, kv_cache_specs: Mapping[str, KVCacheSpec]
) -> Sequence[KVCacheGroupSpec]:
    """Group layers by their KV-cache specs, as vLLM does."""
    if find_spec("vllm.v1.core.kv_cache_config_builder") is None:  # vLLM 0.32
        planner = import_module("vllm.v1.core.kv_cache_utils")
    else:
        builders = import_module("vllm.v1.core.kv_cache_config_builder")
        planner = builders.get_kv_cache_config_builder(vllm_config)
    groups: Sequence[KVCacheGroupSpec] = planner.get_kv_cache_groups(vllm_config, dict(kv_cache_specs))
    return groups


def _block_bytes(group: KVCacheGroupSpec) -> int:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.page_size_bytes  # of all layers
    return len(set(group.layer_names)) * spec.page_size_bytes  # vLLM may list a layer twice
