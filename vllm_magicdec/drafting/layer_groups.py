# SPDX-License-Identifier: Apache-2.0
"""Groups of attention layers that draft over one view."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_magicdec.errors import METHOD, MagicDecConfigError
from vllm_magicdec.views.windows import LocalChunk, Reach, SlidingWindow


@dataclass(frozen=True)
class LayerGroup:
    """Layers with the same block tables, KV cache shape and attention reach."""

    layer_names: tuple[str, ...]
    kv_cache_group: int  # index
    cache: AttentionSpec  # of each layer
    reach: Reach | None  # None for the whole context


def is_readable(spec: KVCacheSpec) -> bool:
    """Return whether each token has its own K/V, which are kept as long as a query can attend to them."""
    if type(spec) is MLAAttentionSpec:  # sparse attention uses subclasses, or these fields
        return spec.tokens_per_state == 1 and not spec.is_index_group_leader
    return type(spec) in (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


def reaches_of(kv_cache_specs: Mapping[str, KVCacheSpec | None]) -> dict[str, Reach]:
    """Return the reach of layers that do not attend to the whole context, by name.

    Args:
        kv_cache_specs: by layer name, as requested by the layers; vLLM's groups may keep more pages.
    """
    reaches: dict[str, Reach] = {}
    for name, spec in kv_cache_specs.items():
        if isinstance(spec, SlidingWindowSpec):
            reaches[name] = SlidingWindow(spec.sliding_window)
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            reaches[name] = LocalChunk(spec.attention_chunk_size)
    return reaches


def find_layer_groups(
    kv_cache_groups: Sequence[KVCacheGroupSpec], reaches: Mapping[str, Reach]
) -> list[LayerGroup]:
    """Group layers that can share a view; layers that attend to the whole context come first.

    Raises:
        MagicDecConfigError: no view supports a layer's KV cache.
    """
    layers: dict[tuple[int, AttentionSpec, Reach | None], list[str]] = {}
    for index, group in enumerate(kv_cache_groups):
        for name in dict.fromkeys(group.layer_names):  # vLLM may list layers with a shared cache twice
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            if not is_readable(spec):
                raise MagicDecConfigError(
                    f"{METHOD} cannot draft over the KV cache of layer {name} ({type(spec).__name__}); "
                    "serve the model without speculation"
                )
            assert isinstance(spec, AttentionSpec)
            layers.setdefault((index, spec, reaches.get(name)), []).append(name)
    groups = [LayerGroup(tuple(names), *alike) for alike, names in layers.items()]
    return sorted(groups, key=lambda group: group.reach is not None)
