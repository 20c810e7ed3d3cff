# SPDX-License-Identifier: Apache-2.0
"""vLLM's metadata builders for the layers of one view."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
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
) -> list[AttentionGroup]:
    """Restrict the target's attention groups to the layers of a view.

    Builders keep buffers that CUDA graphs over a view read, so the target's are shared if they serve no
    other layers. Without vLLM's hybrid KV cache manager, layers with and without a window share one.

    Args:
        target_groups: the target's attention groups with their builders, by KV-cache group.
    """
    found = []
    for target_group in target_groups[group.kv_cache_group]:
        names = [name for name in target_group.layer_names if name in group.layer_names]
        is_chunked = isinstance(group.reach, LocalChunk)
        if names == target_group.layer_names and not is_chunked:
            found.append(target_group)
        elif names:
            spec, backend = group.cache, target_group.backend
            if is_chunked:
                # vLLM's backend wraps another to split the context into chunks; a view has one chunk only.
                (backend,) = backend.__bases__
            own = AttentionGroup(backend, names, spec, target_group.kv_cache_group_id)
            own.create_metadata_builders(
                vllm_config, device, target_group.kernel_block_size or spec.block_size
            )
            builder: Any = own.get_metadata_builder()
            if hasattr(builder, "set_workspace_buffer"):
                # FlashInfer's takes hundreds of MiB, and passes are serial.
                theirs: Any = target_group.get_metadata_builder()
                builder.set_workspace_buffer(theirs._get_workspace_buffer())
            found.append(own)
    return found


def refuse_split_pages(
    attention_groups: Sequence[Sequence[AttentionGroup]], *, are_of_layers: bool
) -> None:
    """Raise MagicDecConfigError for views of pages that a backend splits into smaller blocks.

    vLLM maps one block table for all layers of a group, into a buffer as wide as its own tables; FlashInfer
    on Hopper and Blackwell requires tables without gaps between rows. Each layer has its own block table
    if `are_of_layers`, else a layer group has one narrow table.
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
    """Raise MagicDecConfigError for a draft model whose heads exceed its attention's buffers.

    vLLM's Triton attention sizes its buffers by the target's heads (the builder's `headdim`), but its
    kernel writes whole heads of the layer.
    """
    for group in (group for of_cache in attention_groups for group in of_cache):
        room = getattr(group.get_metadata_builder(), "headdim", None)
        spec = group.kv_cache_spec
        if room is None or not isinstance(spec, AttentionSpec):
            continue
        if next_power_of_2(spec.head_size) > next_power_of_2(room):
            raise MagicDecConfigError(
                f"{MODEL_METHOD}: attention backend {group.backend.get_name()} has room for the target's "
                f"heads of {room}, and the draft model's have {spec.head_size}; set "
                "attention_backend='FLASH_ATTN' in the speculative config, or draft with the target itself "
                f"({METHOD})"
            )


def find_weakest_graphs(
    attention_groups: Sequence[Sequence[AttentionGroup]], vllm_config: VllmConfig
) -> tuple[AttentionGroup, AttentionCGSupport]:
    """Return the group that supports the fewest CUDA graphs, and its support."""

    def support(group: AttentionGroup) -> AttentionCGSupport:
        if group.backend.get_name() == "FLEX_ATTENTION":
            # Its captures need lengths on the host, which draft steps do not have.
            return AttentionCGSupport.NEVER
        builder: Any = group.get_metadata_builder()
        return builder.get_cudagraph_support(vllm_config, group.kv_cache_spec)

    supports = [(group, support(group)) for of_cache in attention_groups for group in of_cache]
    return min(supports, key=lambda pair: pair[1].value)
