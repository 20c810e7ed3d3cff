# SPDX-License-Identifier: Apache-2.0
"""vLLM's metadata builders for the layers of one view."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.math_utils import next_power_of_2
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.views.windows import LocalChunk


def attention_groups_of(
    group: LayerGroup,
    target_groups: Sequence[Sequence[AttentionGroup]],
    vllm_config: VllmConfig,
    device: torch.device,
    *,
    share_builders: bool,
) -> list[AttentionGroup]:
    """The target's attention groups, with the layers of a view alone, for metadata of that view.

    Args:
        group: the layers.
        target_groups: by KV-cache group, with their builders.
        vllm_config: the engine's, its model loaded.
        device: where the target runs.
        share_builders: use the target's builders where they are for no other layers. Without vLLM's hybrid
            KV cache manager, layers with and without a window share one, and it keeps what a CUDA graph
            over a view reads.
    """
    found = []
    for target_group in target_groups[group.kv_cache_group]:
        names = [name for name in target_group.layer_names if name in group.layer_names]
        is_chunked = isinstance(group.reach, LocalChunk)
        if share_builders and names == target_group.layer_names and not is_chunked:
            found.append(target_group)
        elif names:
            found.append(_with_own_builder(group, target_group, names, vllm_config, device))
    return found


def make_attention_groups(
    group: LayerGroup,
    target_groups: Sequence[Sequence[AttentionGroup]],
    vllm_config: VllmConfig,
    device: torch.device,
) -> list[AttentionGroup]:
    """The attention groups of layers for which vLLM has made none.

    Args:
        group: the layers.
        target_groups: by KV-cache group, with their builders.
        vllm_config: the engine's, its models loaded.
        device: where they run.
    """
    layers: dict[str, Any] = get_layers_from_vllm_config(
        vllm_config, AttentionLayerBase, list(group.layer_names)
    )
    found: dict[tuple[str, int], AttentionGroup] = {}
    for name, layer in layers.items():
        backend = layer.get_attn_backend()
        own = AttentionGroup(backend, [], group.cache, group.kv_cache_group)
        # A builder is for one number of query heads.
        found.setdefault((backend.full_cls_name(), layer.num_heads), own).layer_names.append(name)
    others = {other.backend: other for of_cache in target_groups for other in of_cache}
    for own in found.values():
        own.create_metadata_builders(vllm_config, device, group.cache.block_size)
        if own.backend in others:
            _share_workspace(own, others[own.backend])
    return list(found.values())


def refuse_split_pages(
    attention_groups: Sequence[Sequence[AttentionGroup]], *, are_of_layers: bool
) -> None:
    """Refuse block tables that vLLM cannot map where a backend counts in smaller blocks than vLLM.

    It maps a group's block table in one place for all of its layers, into a buffer as wide as its own block
    tables, and FlashInfer's kernels for Hopper and Blackwell want tables without gaps between rows.

    Args:
        attention_groups: by group of layers.
        are_of_layers: each layer has a block table of its own; else views have one, which is narrow.

    Raises:
        MagicDecConfigError: with the way out.
    """
    for group in (group for of_layers in attention_groups for group in of_layers):
        name = group.backend.get_name()
        if group.kernel_block_size is None or not (are_of_layers or name == "FLASHINFER"):
            continue
        own = "whole pages per layer" if are_of_layers else "few of a request's pages"
        by_token = "draft_kv_policy='snapkv' with draft_kv_granularity='token'"
        others = f", {by_token}, or draft_kv_policy='streamingllm'"
        raise MagicDecConfigError(
            f"{METHOD}: this draft_kv_policy chooses {own}, and attention backend {name} splits pages of "
            f"{group.kv_cache_spec.block_size} tokens into {group.kernel_block_size}; use --block-size "
            f"{group.kernel_block_size}{others if are_of_layers else ''}"
        )


def refuse_small_buffers(attention_groups: Sequence[Sequence[AttentionGroup]]) -> None:
    """Refuse a draft model whose heads are larger than its attention has room for.

    vLLM's Triton attention makes room for partial results by the target's head size (its builder's
    `headdim`), and its kernel writes as much as a head of the layer has.

    Args:
        attention_groups: of the draft's layers, by KV-cache group.

    Raises:
        MagicDecConfigError: with the way out.
    """
    for group in (group for of_cache in attention_groups for group in of_cache):
        room = getattr(group.get_metadata_builder(), "headdim", None)
        spec = group.kv_cache_spec
        if room is None or not isinstance(spec, AttentionSpec):
            continue
        if next_power_of_2(spec.head_size) > next_power_of_2(room):
            raise MagicDecConfigError(
                f"{MODEL_METHOD}: attention backend {group.backend.get_name()} has room for the target's "
                f"heads of {room}, and the draft model's have {spec.head_size}; give the draft another "
                "one, attention_backend='FLASH_ATTN' in the speculative config, or draft with the target "
                f"itself ({METHOD})"
            )


def find_weakest_graphs(
    attention_groups: Sequence[Sequence[AttentionGroup]], vllm_config: VllmConfig
) -> tuple[AttentionGroup, AttentionCGSupport]:
    """The one that has the fewest CUDA graphs, and which; all groups have those."""

    def support(group: AttentionGroup) -> AttentionCGSupport:
        if group.backend.get_name() == "FLEX_ATTENTION":
            # Its captures want lengths on the host, which no draft step has.
            return AttentionCGSupport.NEVER
        builder: Any = group.get_metadata_builder()
        return builder.get_cudagraph_support(vllm_config, group.kv_cache_spec)

    every = [(group, support(group)) for of_cache in attention_groups for group in of_cache]
    return min(every, key=lambda pair: pair[1].value)


def _with_own_builder(
    group: LayerGroup,
    target_group: AttentionGroup,
    names: list[str],
    vllm_config: VllmConfig,
    device: torch.device,
) -> AttentionGroup:
    """Some of the attention group's layers."""
    spec, backend = group.cache, target_group.backend
    if isinstance(group.reach, LocalChunk):
        # vLLM's backend cuts the context into chunks, around another; a view is of one chunk already.
        (backend,) = backend.__bases__
    own = AttentionGroup(backend, names, spec, target_group.kv_cache_group_id)
    own.create_metadata_builders(vllm_config, device, target_group.kernel_block_size or spec.block_size)
    _share_workspace(own, target_group)
    return own


def _share_workspace(own: AttentionGroup, other: AttentionGroup) -> None:
    """Have builders of a backend use one: FlashInfer's has hundreds of MiB, and passes come in turn."""
    theirs: Any = other.get_metadata_builder()
    builder = own.get_metadata_builder()
    if hasattr(builder, "set_workspace_buffer"):
        builder.set_workspace_buffer(theirs._get_workspace_buffer())
