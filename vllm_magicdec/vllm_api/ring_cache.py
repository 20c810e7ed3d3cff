# SPDX-License-Identifier: Apache-2.0
"""A draft model's own KV cache in vLLM's block pool: one ring of pages per request.

vLLM groups a draft model's layers with the target's, so every block of a request holds K/V of both. If the
draft only reads sinks and a window (`views/rings.py`), its layers get a separate KV-cache group, and the
target's groups and prefix cache stay as without a draft. A request allocates blocks of that group until its
ring is complete. A block is sized for the target's layers, so it holds several of the draft's pages.

In the worker, the draft's layers declare that a ring suffices (`offer_rings`); the engine core plans one if
that leaves the target more room (`plan_groups`); the worker maps the pages (`RingLayout`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from typing_extensions import override
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    create_kv_cache_views,
    iter_layer_specs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.worker.utils import select_common_block_size

from vllm_magicdec.attention.rows import KEY_VALUE_BACKENDS
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.drafting.sizing import parse_budget
from vllm_magicdec.errors import MODEL_METHOD
from vllm_magicdec.views.rings import Ring
from vllm_magicdec.vllm_api.versions import kv_planning

logger = init_logger(f"vllm.{__name__}")

GroupLayers = Callable[[VllmConfig, dict[str, KVCacheSpec]], list[KVCacheGroupSpec]]


@dataclass(frozen=True, kw_only=True)
class RingOfferSpec(FullAttentionSpec):
    """KV-cache spec of a layer for which a ring suffices; without `ring`, a full-attention layer."""

    ring: Ring | None = None

    def whole(self) -> FullAttentionSpec:
        """Return the same spec without a ring."""
        return FullAttentionSpec(**_fields(self, "ring"))


@dataclass(frozen=True, kw_only=True)
class RingSpec(AttentionSpec):
    """KV-cache spec of a layer in a group of rings.

    `block_size` is the page size in tokens, equal to the target's, so that vLLM schedules in units of the
    target's blocks.
    """

    ring: Ring
    layer: FullAttentionSpec  # describes a page of the layer
    pages_per_block: int  # ring pages in a block, for all layers of the group
    share_bytes: int  # a layer's share of a block, as large as that of a target layer

    @property
    @override
    def page_size_bytes(self) -> int:
        return self.share_bytes

    @property
    @override
    def prefix_cacheable(self) -> bool:
        return False

    @property
    @override
    def has_layer_views(self) -> bool:
        return False  # `RingLayout` places the pages

    @property
    @override
    def uses_slot_mapping(self) -> bool:
        return False

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks of a request of `num_tokens`."""
        pages = min(cdiv(num_tokens, self.block_size), self.ring.num_pages)
        return cdiv(pages, self.pages_per_block)

    @override
    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return self.num_blocks(vllm_config.model_config.max_model_len) * self.page_size_bytes


class RingManager(CircularBufferManager):
    """Allocates the blocks of a request's ring, held until it finishes or is preempted."""

    kv_cache_spec: RingSpec

    @override
    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        held = len(self.req_to_blocks.get(request_id, ()))
        return max(0, self.kv_cache_spec.num_blocks(num_tokens) - held)

    @override
    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[Any]:
        held = self.req_to_blocks[request_id]
        new_blocks = self.block_pool.get_new_blocks(
            max(0, self.kv_cache_spec.num_blocks(num_tokens) - len(held))
        )
        held.extend(new_blocks)
        if self.records_new_block_ids:
            self.new_block_ids.extend(block.block_id for block in new_blocks)
        return new_blocks

    @override
    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        pass  # KV connectors are refused with a draft model


def _fields(spec: KVCacheSpec, *without: str) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in fields(spec) if field.name not in without}


def why_no_ring(vllm_config: VllmConfig) -> str | None:
    """Return why the configuration requires every token in the draft's cache; None: it does not."""
    spec = vllm_config.speculative_config
    assert isinstance(spec, MagicDecSpeculativeConfig)
    if spec.draft_kv_cache == "whole":
        return "draft_kv_cache is 'whole'"
    if spec.spire is not None:
        return (
            "a SPIRe draft writes K/V for every token of the target's step, a chunk of a prompt at once, "
            "which does not fit into a ring; use draft_kv_cache='whole'"
        )
    if find_ring(vllm_config, vllm_config.cache_config.block_size) is None:
        return f"draft_kv_policy={spec.draft_kv_policy!r} reads more than sinks and a window"
    return None


def find_ring(vllm_config: VllmConfig, page_size: int) -> Ring | None:
    """Return the ring that covers the draft's views; None: they may read any page."""
    spec = vllm_config.speculative_config
    assert isinstance(spec, MagicDecSpeculativeConfig)
    limits = spec.limits(vllm_config, page_size)
    return spec.policy.ring(parse_budget(spec, limits), limits)


def offer_rings(vllm_config: VllmConfig, layer_names: Iterable[str]) -> None:
    """Let the attention layers of a draft model declare that a ring suffices, if it does for all."""
    if why_no_ring(vllm_config) is not None:
        return
    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(layer_names))
    for layer in layers.values():
        spec = layer.get_kv_cache_spec(vllm_config)
        if type(spec) is not FullAttentionSpec:
            return  # vLLM frees the pages that layers with a window no longer reach
        backend = layer.get_attn_backend()
        if backend.get_name() not in (*KEY_VALUE_BACKENDS, "CPU_ATTN"):
            return  # FlexAttention sizes its tables by vLLM's block count
        if select_common_block_size(spec.block_size, [backend], [spec]) != spec.block_size:
            return  # the backend splits vLLM's pages
    for layer in layers.values():
        layer.get_kv_cache_spec = partial(_offer, layer.get_kv_cache_spec)


def _offer(
    get_kv_cache_spec: Callable[[VllmConfig], FullAttentionSpec], vllm_config: VllmConfig
) -> RingOfferSpec:
    spec = get_kv_cache_spec(vllm_config)
    return RingOfferSpec(**_fields(spec), ring=find_ring(vllm_config, spec.block_size))


@dataclass(frozen=True)
class Plan:
    """KV-cache groups of both models' layers."""

    groups: list[KVCacheGroupSpec]
    shared: list[KVCacheGroupSpec]  # vLLM's groups, without a ring
    reason: str  # why there is no ring; "": there is one


def plan_groups(
    vllm_config: VllmConfig,
    kv_cache_specs: Mapping[str, KVCacheSpec],  # of both models' layers, by name
    group_layers: GroupLayers,  # vLLM's `get_kv_cache_groups`
) -> Plan:
    """Put the draft's layers into a group of rings if that leaves the target more room."""
    offers = {name: spec for name, spec in kv_cache_specs.items() if isinstance(spec, RingOfferSpec)}
    whole = {
        name: spec.whole() if isinstance(spec, RingOfferSpec) else spec
        for name, spec in kv_cache_specs.items()
    }
    shared = group_layers(vllm_config, dict(whole))
    if not offers:
        return Plan(shared, shared, "a layer of the draft has a window, or its attention splits pages")
    targets = group_layers(vllm_config, {name: whole[name] for name in whole if name not in offers})
    rings = _ring_group(vllm_config, targets, list(offers), next(iter(offers.values())), whole)
    if isinstance(rings, str):
        return Plan(shared, shared, rings)
    groups = [*targets, rings]
    needs, needs_shared = (kv_planning.max_memory_usage_bytes(vllm_config, own) for own in (groups, shared))
    if needs >= needs_shared:
        reason = (
            f"a request of {vllm_config.model_config.max_model_len:,} tokens would take {needs:,} bytes "
            f"with a ring and takes {needs_shared:,}"
        )
        return Plan(shared, shared, reason)
    _register()
    return Plan(groups, shared, "")


def _ring_group(
    vllm_config: VllmConfig,
    targets: Sequence[KVCacheGroupSpec],
    names: list[str],
    offer: RingOfferSpec,
    specs: Mapping[str, KVCacheSpec],
) -> KVCacheGroupSpec | str:
    """Return the group of the draft's layers, or why a ring is not possible."""
    layer, ring = offer.whole(), offer.ring
    if any(specs[name] != layer for name in names):
        return "the draft's layers differ in their KV heads"
    assert ring is not None
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    if not layout.is_block_compact:
        return f"KV-cache layout {layout.name} scatters the pages of a layer"
    block_bytes = kv_planning.pool_bytes_per_block(vllm_config, list(targets))
    if layout.is_layer_compact:
        of_groups = (iter_layer_specs(group.kv_cache_spec) for group in targets)
        target_pages = {spec.page_size_bytes for specs_of in of_groups for spec in specs_of}
        share_bytes = max(target_pages)
        most_layers = max(len(group.layer_names) for group in targets)
        if len(target_pages) > 1 or block_bytes != most_layers * share_bytes:
            return "the target's layers have pages of several sizes"
    else:
        share_bytes = block_bytes
    if share_bytes % layer.page_size_bytes:
        return (
            f"{share_bytes:,} contiguous bytes of a block of the target's layers are no multiple of the "
            f"draft's page size, {layer.page_size_bytes:,} bytes"
        )
    num_shares = block_bytes // share_bytes if layout.is_layer_compact else None
    pages_per_block = len(_rows(num_shares, share_bytes // layer.page_size_bytes, len(names)))
    if not pages_per_block:
        return "a block of the target's layers has no room for a page of the draft's"
    spec = RingSpec(
        **_fields(layer, "sliding_window", "attention_chunk_size", "non_causal", "block_stride_alignment"),
        ring=ring,
        layer=layer,
        pages_per_block=pages_per_block,
        share_bytes=share_bytes if layout.is_layer_compact else block_bytes // len(names),
    )
    return KVCacheGroupSpec(names, spec)


def _rows(num_shares: int | None, pages_per_share: int, num_layers: int) -> list[tuple[int, int]]:
    """Return (share, index in the share) of each page of the draft's first layer in a block.

    Pages of its other layers follow in the next shares, or, in a contiguous block, at the next indices.

    Args:
        num_shares: separate pieces of a block, one per target layer; None: the block is contiguous.
        pages_per_share: pages of a draft layer per piece.
        num_layers: number of draft layers.
    """
    if num_shares is None:
        return [(0, index) for index in range(0, pages_per_share - num_layers + 1, num_layers)]
    shares = range(0, num_shares - num_layers + 1, num_layers)
    return [(share, index) for share in shares for index in range(pages_per_share)]


def _register() -> None:
    """Register the manager of rings with vLLM's scheduler."""
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # registers vLLM's own, which must come first
    KVCacheSpecRegistry.register(RingSpec, RingManager, uniform_type_base_spec=RingSpec)


def log_ring_capacity(
    vllm_config: VllmConfig,
    kv_cache_specs: Sequence[Mapping[str, KVCacheSpec]],  # of the layers of every worker
    kv_cache_config: KVCacheConfig,  # of a worker
) -> None:
    """Log the size of a draft model's cache, and the target's capacity with and without rings."""
    speculative = vllm_config.speculative_config
    assert isinstance(speculative, MagicDecSpeculativeConfig)
    if not speculative.has_draft_model:
        return
    merged = {name: spec for of_worker in kv_cache_specs for name, spec in of_worker.items()}
    plan = plan_groups(vllm_config, merged, kv_planning.get_kv_cache_groups)
    spec = kv_cache_config.kv_cache_groups[-1].kv_cache_spec
    if not isinstance(spec, RingSpec):
        logger.info_once(
            "%s: the draft model's KV cache holds every token, as the target's does: %s.",
            MODEL_METHOD,
            why_no_ring(vllm_config) or plan.reason,
        )
        return
    room, _ = get_kv_cache_capacity(vllm_config, kv_cache_config)
    # In the same memory: blocks with the draft's layers are larger, also where the user set their number.
    num_bytes = kv_cache_config.kv_cache_tensors[0].size
    block_bytes = kv_planning.pool_bytes_per_block(vllm_config, plan.shared)
    num_blocks = num_bytes // block_bytes
    shared = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=plan.shared)
    room_shared, _ = get_kv_cache_capacity(vllm_config, shared)
    number = vllm_config.cache_config.num_gpu_blocks_override
    logger.info_once(
        "%s: the draft model's KV cache holds %s tokens of a request, in a ring of %d pages: the target "
        "has room for %s tokens, and for %s in the same memory if the draft's held every token%s.",
        MODEL_METHOD,
        f"{spec.ring.num_pages * spec.block_size:,}",
        spec.ring.num_pages,
        f"{room:,}",
        f"{room_shared:,}",
        ""
        if number is None
        else f", because the {number:,} blocks of --num-gpu-blocks-override would take "
        f"{number * block_bytes:,} bytes instead of {num_bytes:,}",
    )


@dataclass(frozen=True)
class RingLayout:
    """Placement of the rings' pages in a worker's KV-cache memory, in units of the draft's pages."""

    spec: RingSpec
    names: Sequence[str]  # the draft's layers
    layout: KVCacheLayout
    rows: Sequence[int]  # page numbers of the first layer in block 0
    step: int  # distance between blocks
    layer_step: int  # distance between layers
    num_pages: int  # size of a layer's view

    @classmethod
    def of(cls, kv_cache_config: KVCacheConfig, kv_cache_group: int, layout: KVCacheLayout) -> "RingLayout":
        """Compute the placement for the group of rings at index `kv_cache_group`."""
        group = kv_cache_config.kv_cache_groups[kv_cache_group]
        spec, names = group.kv_cache_spec, group.layer_names
        assert isinstance(spec, RingSpec)
        num_blocks, page_bytes = kv_cache_config.num_blocks, spec.layer.page_size_bytes
        block_bytes = kv_cache_config.kv_cache_tensors[0].size // num_blocks
        num_shares: int | None
        if layout.is_layer_compact:
            num_shares, step = block_bytes // spec.share_bytes, spec.share_bytes // page_bytes
            layer_step = share_step = num_blocks * step
        else:
            num_shares, step = None, block_bytes // page_bytes
            layer_step, share_step = 1, 0
        rows = [share * share_step + index for share, index in _rows(num_shares, step, len(names))]
        assert len(rows) == spec.pages_per_block
        last = (num_blocks - 1) * step + max(rows)
        return cls(spec, names, layout, rows, step, layer_step, last + 1)

    @classmethod
    def bound(
        cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_cache_group: int
    ) -> "RingLayout | None":
        """Compute the placement and bind it to the draft's layers; None if the group has no rings."""
        if not isinstance(kv_cache_config.kv_cache_groups[kv_cache_group].kv_cache_spec, RingSpec):
            return None
        layout = cls.of(
            kv_cache_config, kv_cache_group, vllm_config.cache_config.get_resolved_kv_cache_layout()
        )
        layout.bind(get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layout.names))
        return layout

    def bind(self, layers: Mapping[str, Any]) -> None:
        """Let attention layers, by name, create their views when vLLM binds the KV cache."""
        for index, name in enumerate(self.names):
            layers[name].bind_kv_cache = self._binder(layers[name], index * self.layer_step)

    def _binder(self, layer: Any, first_page: int) -> Callable[[torch.Tensor], None]:
        page_bytes = self.spec.layer.page_size_bytes

        def bind_kv_cache(memory: torch.Tensor) -> None:
            where = KVCacheTensor(
                size=memory.numel(),
                layers=[layer.layer_name],
                layer_stride=self.num_pages * page_bytes,
                block_stride=page_bytes,
                offset=first_page * page_bytes,
            )
            (view,) = create_kv_cache_views(memory, self.spec.layer, self.num_pages, self.layout, where)
            type(layer).bind_kv_cache(layer, view)

        return bind_kv_cache
