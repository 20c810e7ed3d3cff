# SPDX-License-Identifier: Apache-2.0
"""A draft's rings in vLLM's block pool: KV-cache groups, cache manager and memory."""

from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_magicdec.views.rings import Ring
from vllm_magicdec.vllm_api import ring_cache
from vllm_magicdec.vllm_api.ring_cache import RingLayout, RingOfferSpec, RingSpec, plan_groups
from vllm_magicdec.vllm_api.versions import kv_planning

PAGE = 16
MODEL_LEN = 1024
SHAPE = dict(block_size=PAGE, num_kv_heads=2, head_size=64, dtype=torch.float32)
SMALL = {**SHAPE, "head_size": 32}
RING = Ring(PAGE, sink_pages=1, window_pages=7, spare_pages=1)
get_kv_cache_config_from_groups = import_module(kv_planning.MODULE).get_kv_cache_config_from_groups
GROUP_LAYERS = kv_planning.get_kv_cache_groups  # the hook leaves engines of other methods alone


def config(layout: str = "LBHNC") -> VllmConfig:
    config = VllmConfig()
    config.model_config = SimpleNamespace(
        max_model_len=MODEL_LEN, original_max_model_len=MODEL_LEN, supports_kv_cache_grouping=False
    )
    config.cache_config.kv_cache_layout = layout
    config.cache_config.block_size = PAGE
    return config


def layers(num_targets: int, num_drafts: int, shape: dict = SHAPE, **target) -> dict:
    own = {f"model.layers.{i}.attn": FullAttentionSpec(**{**SHAPE, **target}) for i in range(num_targets)}
    drafts = {f"draft_model.layers.{i}.attn": RingOfferSpec(**shape, ring=RING) for i in range(num_drafts)}
    return {**own, **drafts}


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize(
    ("targets", "drafts", "shape", "pages_per_block"),
    [(6, 2, SHAPE, 3), (6, 2, SMALL, 6), (5, 2, SHAPE, 2), (6, 6, SHAPE, 1), (1, 1, SMALL, 2)],
)
def test_the_target_keeps_its_group_and_a_block_holds_as_many_pages_as_fit(
    layout, targets, drafts, shape, pages_per_block
):
    specs = layers(targets, drafts, shape)
    plan = plan_groups(config(layout), specs, GROUP_LAYERS)
    alone = {name: spec for name, spec in specs.items() if not name.startswith("draft")}
    assert plan.reason == "" and plan.groups[:-1] == GROUP_LAYERS(config(layout), alone)
    spec = plan.groups[-1].kv_cache_spec
    assert isinstance(spec, RingSpec) and spec.layer == FullAttentionSpec(**shape)
    assert spec.pages_per_block == pages_per_block and spec.block_size == PAGE
    (both,) = plan.shared
    assert sorted(both.layer_names) == sorted(specs)


def fill(memory: dict[str, torch.Tensor], names: list[str], pages: list[int], value: float) -> None:
    for name in names:
        for page in pages:
            assert not memory[name][page].any(), "written before"
            memory[name][page] = value
            value += 1


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize(
    ("targets", "drafts", "shape"),
    [(6, 2, SHAPE), (6, 2, SMALL), (5, 2, SHAPE), (3, 3, SMALL), (1, 1, SMALL)],
)
def test_pages_of_rings_and_blocks_of_the_target_do_not_overlap(layout, targets, drafts, shape):
    """In memory that vLLM allocates, with its views for the target."""
    specs, num_blocks = layers(targets, drafts, shape), 7
    vllm_config = config(layout)
    plan = plan_groups(vllm_config, specs, GROUP_LAYERS)
    block_bytes = kv_planning.pool_bytes_per_block(vllm_config, plan.groups)
    kv_cache_config = get_kv_cache_config_from_groups(
        vllm_config, plan.groups, num_blocks * block_bytes + 100
    )
    assert kv_cache_config.num_blocks == num_blocks
    order = KVCacheLayout[layout]
    caches = allocate_kv_cache(kv_cache_config, torch.device("cpu"), order, [PAGE, PAGE])
    where = RingLayout.of(kv_cache_config, 1, order)

    class Layer:
        def __init__(self, name: str) -> None:
            self.layer_name = name

        def bind_kv_cache(self, cache: torch.Tensor) -> None:
            self.kv_cache = cache

    own = {name: Layer(name) for name in where.names}
    where.bind(own)
    for name, layer in own.items():
        layer.bind_kv_cache(caches[name])
    rings = {name: layer.kv_cache for name, layer in own.items()}
    assert {cache.shape[1:] for cache in rings.values()} == {(2, PAGE, 2 * shape["head_size"])}
    theirs = {name: caches[name] for name in specs if name not in rings}
    fill(theirs, list(theirs), [0, 2, 6], 1000)
    before = {name: cache.clone() for name, cache in theirs.items()}
    fill(rings, list(rings), [block * where.step + row for block in (1, 3, 5) for row in where.rows], 1)
    for name, cache in theirs.items():
        assert torch.equal(cache[[0, 2, 6]], before[name][[0, 2, 6]])
    values = [
        float(rings[name][block * where.step + row].unique())
        for name in rings
        for block in (1, 3, 5)
        for row in where.rows
    ]
    assert values == list(np.arange(1, 1 + len(values)))


@pytest.mark.parametrize(
    ("specs", "layout", "reason"),
    [
        (layers(2, 4), "LBHNC", "no room for a page"),
        (layers(6, 2, {**SHAPE, "head_size": 48}), "LBHNC", "no multiple of the"),
        (layers(6, 2), "LHBNC", "scatters the pages"),
        (layers(6, 2) | layers(0, 1, SMALL), "LBHNC", "differ in their KV heads"),
        (
            layers(6, 2) | {"model.layers.9.attn": FullAttentionSpec(**SMALL)},
            "LBHNC",
            "pages of several sizes",
        ),
        (layers(6, 0), "LBHNC", "has a window"),
    ],
)
def test_without_a_ring_the_groups_are_vllms(specs, layout, reason):
    plan = plan_groups(config(layout), specs, GROUP_LAYERS)
    assert reason in plan.reason and plan.groups is plan.shared
    whole = {
        name: spec.whole() if isinstance(spec, RingOfferSpec) else spec for name, spec in specs.items()
    }
    assert plan.groups == GROUP_LAYERS(config(layout), whole)


@pytest.mark.parametrize("override", [None, 300])
def test_the_log_compares_rooms_in_the_same_memory(monkeypatch, override):
    """Blocks are smaller with rings, so a number that the user set holds fewer tokens than without."""
    speculative = SimpleNamespace(has_draft_model=True)
    monkeypatch.setattr(ring_cache, "MagicDecSpeculativeConfig", SimpleNamespace)
    vllm_config, specs, lines = config(), layers(6, 2), []
    vllm_config.speculative_config = speculative
    vllm_config.cache_config.num_gpu_blocks_override = override
    plan = plan_groups(vllm_config, specs, GROUP_LAYERS)
    small, large = (
        ring_cache.kv_planning.pool_bytes_per_block(vllm_config, own) for own in (plan.groups, plan.shared)
    )
    kv_cache_config = get_kv_cache_config_from_groups(vllm_config, plan.groups, 300 * small)
    monkeypatch.setattr(ring_cache.logger, "info_once", lambda line, *values: lines.append(line % values))
    ring_cache.log_ring_capacity(vllm_config, [specs], kv_cache_config)
    # Rings take 3 blocks of a request's 67. Blocks with the draft's 2 layers are 8/6 as large.
    room, in_same_memory = 300 * MODEL_LEN // 67, 300 * 6 // 8 * PAGE
    (line,) = lines
    end = line.partition("the target has room for ")[2]
    assert end.startswith(f"{room:,} tokens, and for {in_same_memory:,} in the same memory if the draft's")
    because = f"because the 300 blocks of --num-gpu-blocks-override would take {300 * large:,} bytes"
    assert (because in end) == (override is not None)


def test_a_ring_of_the_whole_context_is_not_used():
    everything = Ring(PAGE, sink_pages=1, window_pages=MODEL_LEN // PAGE - 1, spare_pages=1)
    specs = layers(6, 0) | {
        f"draft_model.layers.{i}.attn": RingOfferSpec(**SHAPE, ring=everything) for i in range(2)
    }
    plan = plan_groups(config(), specs, GROUP_LAYERS)
    assert "bytes with a ring and takes" in plan.reason and plan.groups is plan.shared


def test_targets_with_windows_keep_their_groups_too():
    windows = {
        f"model.layers.{i}.attn": SlidingWindowSpec(**SHAPE, sliding_window=64) for i in range(10, 16)
    }
    specs = layers(2, 2) | windows
    plan = plan_groups(config(), specs, GROUP_LAYERS)
    alone = {name: spec for name, spec in specs.items() if not name.startswith("draft")}
    assert plan.reason == "" and plan.groups[:-1] == GROUP_LAYERS(config(), alone)
    assert plan.groups[-1].kv_cache_spec.pages_per_block == 1


def request(name: str, tokens: list[int]) -> Request:
    sampling = SamplingParams(max_tokens=8)
    sampling.update_from_generation_config({}, eos_token_id=2)
    return Request(name, tokens, sampling, None, block_hasher=get_request_block_hasher(PAGE, sha256))


def manager(groups: list[KVCacheGroupSpec], num_blocks: int) -> KVCacheManager:
    init_none_hash(sha256)
    return KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=MODEL_LEN,
        max_in_flight_tokens=MODEL_LEN,
        scheduler_block_size=PAGE,
        hash_block_size=PAGE,
        enable_caching=True,
    )


def test_a_request_allocates_its_ring_once_and_frees_it():
    plan = plan_groups(config(), layers(6, 2), GROUP_LAYERS)  # rings of 9 pages, 3 in a block
    cache = manager(plan.groups, 100)
    free = cache.block_pool.get_num_free_blocks()
    asked = request("a", list(range(1000)))
    claimed = []
    for start in range(0, 320, 32):
        assert cache.allocate_slots(asked, 32, num_lookahead_tokens=4) is not None
        asked.num_computed_tokens = start + 32
        target, ring = cache.get_block_ids("a")
        assert len(target) == -(-(start + 36) // PAGE)
        claimed.append(len(ring))
    assert claimed == [1, 2, 3, 3, 3, 3, 3, 3, 3, 3]
    assert cache.block_pool.get_num_free_blocks() == free - len(target) - 3
    cache.free(asked)
    assert cache.block_pool.get_num_free_blocks() == free


def test_prefix_cache_hits_are_those_without_a_draft():
    plan = plan_groups(config(), layers(6, 2), GROUP_LAYERS)
    tokens = list(range(500))
    hits = []
    for groups in (plan.groups, plan.groups[:-1]):
        cache = manager(groups, 200)
        first = request("first", tokens)
        cache.allocate_slots(first, 500)
        first.num_computed_tokens = 500
        cache.free(first)
        again = request("again", [*tokens[:300], *range(900, 1000)])
        blocks, number = cache.get_computed_blocks(again)[:2]
        assert cache.allocate_slots(again, 100, number, blocks) is not None
        hits.append(number)
        if len(groups) == 2:
            assert len(cache.get_block_ids("again")[1]) == 3
    assert hits == [288, 288]


def test_too_few_blocks_for_a_ring_admit_no_request():
    plan = plan_groups(config(), layers(6, 2), GROUP_LAYERS)
    cache = manager(plan.groups, 1 + 12)
    assert cache.allocate_slots(request("a", list(range(160))), 160) is None  # 10 and 3
    cache = manager(plan.groups, 1 + 13)
    assert cache.allocate_slots(request("a", list(range(160))), 160) is not None


@pytest.mark.parametrize(("backend", "is_offered"), [("FLASH_ATTN", True), ("FLEX_ATTENTION", False)])
def test_rings_are_not_offered_with_flex_attention(monkeypatch, backend, is_offered):
    """FlexAttention sizes a table by vLLM's block count, and rings have larger page numbers."""
    spec = FullAttentionSpec(**SHAPE)
    layer = SimpleNamespace(
        get_kv_cache_spec=lambda _: spec, get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend)
    )
    asked = layer.get_kv_cache_spec
    monkeypatch.setattr(ring_cache, "why_no_ring", lambda _: None)
    monkeypatch.setattr(ring_cache, "get_layers_from_vllm_config", lambda *_: {"0": layer})
    monkeypatch.setattr(ring_cache, "select_common_block_size", lambda size, *_: size)
    ring_cache.offer_rings(None, ["0"])
    assert (layer.get_kv_cache_spec is not asked) == is_offered
