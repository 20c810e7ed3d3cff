# SPDX-License-Identifier: Apache-2.0
"""Which of the target's attention layers draft over one view."""

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
    """Layers that share block tables, the shape of their KV cache, and how far back they look."""

    layer_names: tuple[str, ...]
    kv_cache_group: int  # whose block tables they read
    cache: AttentionSpec  # of each layer
    reach: Reach | None  # None: the whole context


def _is_readable(spec: KVCacheSpec) -> bool:
    """Whether its pages hold a state of every token and stay as long as a query reaches them."""
    if isinstance(spec, MLAAttentionSpec):
        return _is_dense(spec)
    return type(spec) in (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


def _is_dense(spec: MLAAttentionSpec) -> bool:
    """What sparse attention keeps are kinds of it."""
    return type(spec) is MLAAttentionSpec and spec.tokens_per_state == 1 and not spec.is_index_group_leader


def reaches_of(kv_cache_specs: Mapping[str, KVCacheSpec | None]) -> dict[str, Reach]:
    """How far back those layers look that do not see the whole context.

    Args:
        kv_cache_specs: what each layer wants of its KV cache, by its name. vLLM may keep more: without its
            hybrid KV cache manager all pages of all layers stay.
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
    """The layers by what a view has to be made of, those that see the whole context first.

    Args:
        kv_cache_groups: as vLLM laid out the KV cache.
        reaches: of the layers that do not (`reaches_of`).

    Raises:
        MagicDecConfigError: a KV cache frees or shares pages in a way that no view knows.
    """
    layers: dict[tuple[int, AttentionSpec, Reach | None], list[str]] = {}
    for index, group in enumerate(kv_cache_groups):
        for name in dict.fromkeys(group.layer_names):  # vLLM may have added layers that share a cache twice
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            if not _is_readable(spec):
                raise MagicDecConfigError(
                    f"{METHOD} cannot draft over the KV cache of layer {name} ({type(spec).__name__}); "
                    "serve the model without speculation"
                )
            assert isinstance(spec, AttentionSpec)
            layers.setdefault((index, spec, reaches.get(name)), []).append(name)
    groups = [LayerGroup(tuple(names), *alike) for alike, names in layers.items()]
    return sorted(groups, key=lambda group: group.reach is not None)
