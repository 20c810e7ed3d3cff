# SPDX-License-Identifier: Apache-2.0
"""A KV cache of a draft model's own in vLLM's pool of blocks: a ring of pages for each request.

vLLM puts a draft model's layers into one group with the target's, so that a request's every block has room
for both. Where the draft reads sinks and a window alone (`views/rings.py`), its layers get a group beside
the target's, which stay as they are without a draft: same blocks, same layers, same prefix cache. A request
claims blocks of that group until its ring is whole, and no more. A block is as large as the target's layers
need, so it holds several of the draft's pages: as many as fit, wherever in the block that is.

The draft's layers say in the worker that they could do with a ring (`offer_rings`), the engine core gives
them one where the target has more room then (`plan_groups`), and the worker reads and writes it as it was
laid out (`RingLayout`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import (
    _max_memory_usage_bytes_from_groups,
    _pool_bytes_per_block,
    get_kv_cache_capacity,
    get_kv_cache_groups,
)
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

logger = init_logger(f"vllm.{__name__}")

GroupLayers = Callable[[VllmConfig, dict[str, KVCacheSpec]], list[KVCacheGroupSpec]]


@dataclass(frozen=True, kw_only=True)
class RingOfferSpec(FullAttentionSpec):
    """What a layer asks of vLLM that could do with a ring; without one it is as any other."""

    ring: Ring | None = None

    def whole(self) -> FullAttentionSpec:
        """The same without a ring."""
        return FullAttentionSpec(**_fields(self, "ring"))


@dataclass(frozen=True, kw_only=True)
class RingSpec(AttentionSpec):
    """A layer in a group of rings.

    `block_size` is a page's, in tokens, and the same as the target's, so that vLLM schedules in units of
    the target's blocks.
    """

    ring: Ring
    layer: FullAttentionSpec  # what a page of it is
    pages_per_block: int  # of the ring, in all layers of the group
    share_bytes: int  # of a block, for vLLM's account: a layer of the target's has as much

    @property
    def page_size_bytes(self) -> int:
        """See vLLM's `KVCacheSpec`."""
        return self.share_bytes

    @property
    def prefix_cacheable(self) -> bool:
        """See vLLM's `KVCacheSpec`; a ring is its request's alone."""
        return False

    @property
    def has_layer_views(self) -> bool:
        """See vLLM's `KVCacheSpec`; pages are not where vLLM would have them (`RingLayout`)."""
        return False

    @property
    def uses_slot_mapping(self) -> bool:
        """See vLLM's `KVCacheSpec`; the target writes nothing there."""
        return False

    def num_blocks(self, num_tokens: int) -> int:
        """That a request of so many tokens has."""
        pages = min(cdiv(num_tokens, self.block_size), self.ring.num_pages)
        return cdiv(pages, self.pages_per_block)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """See vLLM's `KVCacheSpec`."""
        return self.num_blocks(vllm_config.model_config.max_model_len) * self.page_size_bytes


class RingManager(CircularBufferManager):
    """Gives a request the blocks of its ring, which it keeps to its end or its preemption."""

    kv_cache_spec: RingSpec

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
        """See vLLM's `SingleTypeKVCacheManager`."""
        held = len(self.req_to_blocks.get(request_id, ()))
        return max(0, self.kv_cache_spec.num_blocks(num_tokens) - held)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[Any]:
        """See vLLM's `SingleTypeKVCacheManager`."""
        held = self.req_to_blocks[request_id]
        new_blocks = self.block_pool.get_new_blocks(
            max(0, self.kv_cache_spec.num_blocks(num_tokens) - len(held))
        )
        held.extend(new_blocks)
        if self.records_new_block_ids:
            self.new_block_ids.extend(block.block_id for block in new_blocks)
        return new_blocks

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        """Nothing comes from elsewhere: KV connectors are refused with a draft model."""


def _fields(spec: KVCacheSpec, *without: str) -> dict[str, Any]:
    """The spec's, by name."""
    return {field.name: getattr(spec, field.name) for field in fields(spec) if field.name not in without}


def why_no_ring(vllm_config: VllmConfig) -> str | None:
    """Why a draft model's cache has to hold every token, as far as the configuration says."""
    spec = vllm_config.speculative_config
    assert isinstance(spec, MagicDecSpeculativeConfig)
    if spec.draft_kv_cache == "whole":
        return "draft_kv_cache is 'whole'"
    if spec.spire is not None:
        # What the prefix cache hands on makes no memory, as the target does not read it; without prefix
        # caching the chunks are still in the way.
        return (
            "a SPIRe draft's memory is written where the target's step writes, a chunk of a prompt at "
            "once, which no ring has a place for, with or without prefix caching; use "
            "draft_kv_cache='whole'"
        )
    if find_ring(vllm_config, vllm_config.cache_config.block_size) is None:
        return f"draft_kv_policy={spec.draft_kv_policy!r} reads more than sinks and a window"
    return None


def find_ring(vllm_config: VllmConfig, page_size: int) -> Ring | None:
    """What the draft's views read of a request; None: any of its pages."""
    spec = vllm_config.speculative_config
    assert isinstance(spec, MagicDecSpeculativeConfig)
    limits = spec.limits(vllm_config, page_size)
    return spec.policy.ring(parse_budget(spec, limits), limits)


def offer_rings(vllm_config: VllmConfig, layer_names: Iterable[str]) -> None:
    """Have the layers of a draft model say that a ring would do, if it would for all of them.

    Args:
        vllm_config: the engine's, its models loaded.
        layer_names: of the draft's attention layers.
    """
    if why_no_ring(vllm_config) is not None:
        return
    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(layer_names))
    for layer in layers.values():
        spec = layer.get_kv_cache_spec(vllm_config)
        if type(spec) is not FullAttentionSpec:
            return  # a layer with a window keeps what it reaches already
        backend = layer.get_attn_backend()
        if backend.get_name() not in (*KEY_VALUE_BACKENDS, "CPU_ATTN"):
            return  # FlexAttention counts its pages by the numbers of vLLM's
        if select_common_block_size(spec.block_size, [backend], [spec]) != spec.block_size:
            return  # a page of vLLM's would be several of the backend's
    for layer in layers.values():
        layer.get_kv_cache_spec = _offer(layer.get_kv_cache_spec)


def _offer(
    get_kv_cache_spec: Callable[[VllmConfig], FullAttentionSpec],
) -> Callable[[VllmConfig], RingOfferSpec]:
    def with_ring(vllm_config: VllmConfig) -> RingOfferSpec:
        spec = get_kv_cache_spec(vllm_config)
        return RingOfferSpec(**_fields(spec), ring=find_ring(vllm_config, spec.block_size))

    return with_ring


@dataclass(frozen=True)
class Plan:
    """How the layers of both models are in groups."""

    groups: list[KVCacheGroupSpec]
    shared: list[KVCacheGroupSpec]  # as they are without a ring
    reason: str  # why there is none; "": there is


def plan_groups(
    vllm_config: VllmConfig, kv_cache_specs: Mapping[str, KVCacheSpec], group_layers: GroupLayers
) -> Plan:
    """Put the draft's layers into a group of rings where the target has more room then.

    Args:
        vllm_config: the engine's.
        kv_cache_specs: of both models' layers, by name.
        group_layers: vLLM's `get_kv_cache_groups`.
    """
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
    needs, needs_shared = (
        _max_memory_usage_bytes_from_groups(vllm_config, own) for own in (groups, shared)
    )
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
    """The group of the draft's layers, or why there is none."""
    layer, ring = offer.whole(), offer.ring
    if any(specs[name] != layer for name in names):
        return "the draft's layers differ in their KV heads"
    assert ring is not None
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    if not layout.is_block_compact:
        return f"in the layout {layout.name} of the KV cache a layer's page is in several places"
    block_bytes = _pool_bytes_per_block(vllm_config, list(targets))
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
            f"{share_bytes:,} bytes, which are in one piece of a block of the target's layers, are no "
            f"multiple of the {layer.page_size_bytes:,} of a page of the draft's"
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
    """Where the pages of the draft's first layer are in a block: share and place in it.

    Those of its other layers follow, each in the next share; in a block that is in one piece, in the next
    places.

    Args:
        num_shares: pieces of a block that lie apart, one for each layer of the target; None: it is one.
        pages_per_share: of a layer of the draft.
        num_layers: of the draft.
    """
    if num_shares is None:
        return [(0, place) for place in range(0, pages_per_share - num_layers + 1, num_layers)]
    shares = range(0, num_shares - num_layers + 1, num_layers)
    return [(share, place) for share in shares for place in range(pages_per_share)]


def _register() -> None:
    """Have vLLM's scheduler find the manager, beside all of its own."""
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # registers those, which it does not after ours
    KVCacheSpecRegistry.register(RingSpec, RingManager, uniform_type_base_spec=RingSpec)


def say_what_rings_gain(
    vllm_config: VllmConfig,
    kv_cache_specs: Sequence[Mapping[str, KVCacheSpec]],
    kv_cache_config: KVCacheConfig,
) -> None:
    """Say at start-up what a draft model's cache holds, and how many more tokens the target has room for.

    Args:
        vllm_config: the engine's.
        kv_cache_specs: of the layers of every worker.
        kv_cache_config: of a worker.
    """
    speculative = vllm_config.speculative_config
    assert isinstance(speculative, MagicDecSpeculativeConfig)
    if not speculative.has_draft_model:
        return
    merged = {name: spec for of_worker in kv_cache_specs for name, spec in of_worker.items()}
    plan = plan_groups(vllm_config, merged, get_kv_cache_groups)
    spec = kv_cache_config.kv_cache_groups[-1].kv_cache_spec
    if not isinstance(spec, RingSpec):
        logger.info_once(
            "%s: the draft model's KV cache holds every token, as the target's does: %s.",
            MODEL_METHOD,
            why_no_ring(vllm_config) or plan.reason,
        )
        return
    room, _ = get_kv_cache_capacity(vllm_config, kv_cache_config)
    num_bytes = kv_cache_config.kv_cache_tensors[0].size
    num_blocks = vllm_config.cache_config.num_gpu_blocks_override
    num_blocks = num_blocks or num_bytes // _pool_bytes_per_block(vllm_config, plan.shared)
    shared = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=plan.shared)
    room_shared, _ = get_kv_cache_capacity(vllm_config, shared)
    logger.info_once(
        "%s: the draft model's KV cache holds %s tokens of a request, in a ring of %d pages: the target "
        "has room for %s tokens, and for %s if the draft's held every token.",
        MODEL_METHOD,
        f"{spec.ring.num_pages * spec.block_size:,}",
        spec.ring.num_pages,
        f"{room:,}",
        f"{room_shared:,}",
    )


@dataclass(frozen=True)
class RingLayout:
    """Where a worker has the rings' pages: all memory of the KV cache is numbered in the draft's pages."""

    spec: RingSpec
    names: Sequence[str]  # of the draft's layers
    layout: KVCacheLayout
    rows: Sequence[int]  # of the pages of the first layer in block 0
    step: int  # from a block to the next
    layer_step: int  # from a layer to the next
    num_pages: int  # that a layer's view must have

    @classmethod
    def of(cls, kv_cache_config: KVCacheConfig, kv_cache_group: int, layout: KVCacheLayout) -> "RingLayout":
        """The layout of a group.

        Args:
            kv_cache_config: as vLLM laid out the KV cache.
            kv_cache_group: of rings.
            layout: of the KV cache.
        """
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
        rows = [share * share_step + place for share, place in _rows(num_shares, step, len(names))]
        assert len(rows) == spec.pages_per_block
        last = (num_blocks - 1) * step + max(rows)
        return cls(spec, names, layout, rows, step, layer_step, last + 1)

    @classmethod
    def bound(
        cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_cache_group: int
    ) -> "RingLayout | None":
        """The layout of a group of rings, whose layers will take their views; None: it is another's.

        Args:
            vllm_config: the engine's.
            kv_cache_config: as vLLM laid out the KV cache.
            kv_cache_group: of the draft's layers.
        """
        if not isinstance(kv_cache_config.kv_cache_groups[kv_cache_group].kv_cache_spec, RingSpec):
            return None
        layout = cls.of(
            kv_cache_config, kv_cache_group, vllm_config.cache_config.get_resolved_kv_cache_layout()
        )
        layout.bind(get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layout.names))
        return layout

    def bind(self, layers: Mapping[str, Any]) -> None:
        """Have the layers take their views when vLLM gives them the memory.

        Args:
            layers: of attention, by name.
        """
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
