# SPDX-License-Identifier: Apache-2.0
"""Groups of layers with a common view, and vLLM's metadata builders for them."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.utils import AttentionGroup

from vllm_magicdec.drafting.layer_groups import LayerGroup, find_layer_groups, reaches_of
from vllm_magicdec.errors import MagicDecConfigError
from vllm_magicdec.views.windows import LocalChunk, SlidingWindow
from vllm_magicdec.vllm_api import attention_groups
from vllm_magicdec.vllm_api.attention_groups import (
    attention_groups_of,
    find_weakest_graphs,
    refuse_small_buffers,
    refuse_split_pages,
)
from vllm_magicdec.vllm_api.verification_attention import refuse_if_inexact

SHAPE = dict(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=96)
CHUNKS = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)


def test_layers_without_a_window_come_first_and_each_type_is_a_group():
    specs = {"0": WINDOW, "1": FULL, "2": WINDOW, "3": FULL, "4": CHUNKS}
    laid_out = [
        KVCacheGroupSpec(["0", "2"], WINDOW),
        KVCacheGroupSpec(["4"], CHUNKS),
        KVCacheGroupSpec(["1", "3"], FULL),
    ]
    assert find_layer_groups(laid_out, reaches_of(specs)) == [
        LayerGroup(("1", "3"), 2, FULL, None),
        LayerGroup(("0", "2"), 0, WINDOW, SlidingWindow(96)),
        LayerGroup(("4",), 1, CHUNKS, LocalChunk(64)),
    ]


def test_layers_of_different_shapes_are_separate_groups_and_none_counts_twice():
    wide = FullAttentionSpec(**{**SHAPE, "head_size": 128})
    uniform = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"0": FULL, "1": wide, "2": FULL})
    # vLLM's V2 runner lists layers that share another's cache once per speculator.
    groups = find_layer_groups([KVCacheGroupSpec(["0", "1", "2", "2"], uniform)], {})
    assert [(group.layer_names, group.cache) for group in groups] == [(("0", "2"), FULL), (("1",), wide)]


def test_a_latent_cache_is_supported_but_not_that_of_sparse_attention():
    latent = MLAAttentionSpec(**SHAPE)
    assert find_layer_groups([KVCacheGroupSpec(["0"], latent)], {})[0].cache == latent
    for other in ({"tokens_per_state": 4}, {"is_index_group_leader": True}):
        spec = MLAAttentionSpec(**SHAPE, **other)
        with pytest.raises(MagicDecConfigError, match=r"layer 0 \(MLAAttentionSpec\)"):
            find_layer_groups([KVCacheGroupSpec(["0"], spec)], {})


class Builder:
    requires_block_table_width = False

    def __init__(self, spec, layer_names, vllm_config, device):
        self.layer_names = layer_names


class Backend(CPUAttentionBackend):
    @staticmethod
    def get_builder_cls():
        return Builder


def target_group(names, spec, backend=Backend) -> AttentionGroup:
    made = AttentionGroup(backend, list(names), spec, 0)
    made.create_metadata_builders(None, None, spec.block_size)
    return made


def test_the_targets_builders_are_shared_if_they_serve_no_other_layers():
    whole = target_group("01", FULL)
    group = LayerGroup(("0", "1"), 0, FULL, None)
    assert attention_groups_of(group, [[whole]], None, None) == [whole]
    windows = LayerGroup(("1",), 0, FULL, SlidingWindow(96))
    (own,) = attention_groups_of(windows, [[whole]], None, None)
    assert own.layer_names == own.get_metadata_builder().layer_names == ["1"]


def test_a_view_of_one_chunk_is_not_split_into_chunks(monkeypatch):
    monkeypatch.setattr(attention_groups, "AttentionGroup", AttentionGroup)
    chunked = create_chunked_local_attention_backend(CPUAttentionBackend, 64)
    made = AttentionGroup(chunked, ["0"], CHUNKS, 0)
    group = LayerGroup(("0",), 0, CHUNKS, LocalChunk(64))
    backends = []
    monkeypatch.setattr(
        AttentionGroup, "create_metadata_builders", lambda self, *_: backends.append(self.backend)
    )
    monkeypatch.setattr(AttentionGroup, "get_metadata_builder", lambda self: SimpleNamespace())
    attention_groups_of(group, [[made]], None, None)
    assert backends == [CPUAttentionBackend]
    assert chunked.get_builder_cls() is not CPUAttentionBackend.get_builder_cls()


def group_of(name: str, kernel_block_size: int | None = None, **of_builder) -> SimpleNamespace:
    return SimpleNamespace(
        backend=SimpleNamespace(get_name=lambda: name),
        kv_cache_spec=FULL,
        kernel_block_size=kernel_block_size,
        get_metadata_builder=lambda: SimpleNamespace(**of_builder),
    )


@pytest.mark.parametrize(
    ("name", "are_of_layers", "kernel_block_size", "sentence"),
    [
        ("FLASH_ATTN", True, None, None),
        ("FLASH_ATTN", True, 16, "into 16; use --block-size 16, draft_kv_policy='snapkv' with"),
        ("FLASH_ATTN", False, 16, None),
        # FlashInfer's kernels need contiguous rows, and vLLM's buffer would have gaps.
        ("FLASHINFER", False, 16, r"pages of 32 tokens into 16; use --block-size 16$"),
    ],
)
def test_split_pages_are_refused_with_a_block_size(name, are_of_layers, kernel_block_size, sentence):
    with pytest.raises(MagicDecConfigError, match=sentence) if sentence else nullcontext():
        refuse_split_pages([[group_of(name, kernel_block_size)]], are_of_layers=are_of_layers)


def test_flex_attention_has_no_graphs_of_draft_steps():
    group = group_of("FLEX_ATTENTION", get_cudagraph_support=lambda *_: AttentionCGSupport.ALWAYS)
    assert find_weakest_graphs([[group]], None) == (group, AttentionCGSupport.NEVER)


@pytest.mark.parametrize(("room", "is_refused"), [(32, True), (64, False), (48, False), (None, False)])
def test_heads_too_large_for_vllms_triton_attention_are_refused(room, is_refused):
    """Its builder sizes buffers by the target's heads, rounded up to a power of 2."""
    group = group_of("TRITON_ATTN", **({} if room is None else {"headdim": room}))
    sentence = "heads of 32, and the draft model's have 64"
    with pytest.raises(MagicDecConfigError, match=sentence) if is_refused else nullcontext():
        refuse_small_buffers([[group]])


@pytest.mark.parametrize(
    ("layers", "splits_keys", "is_refused"),  # layers: window and whether there are sinks
    [
        ([(96, True), (-1, True)], True, True),
        ([(96, True), (-1, False)], True, True),
        ([(96, True), (64, False)], True, True),
        ([(96, True), (-1, True)], False, False),
        ([(96, False), (-1, True)], True, False),
        ([(96, False), (-1, False)], True, False),
        ([(96, True), (96, True)], True, False),
        ([(-1, True), (-1, True)], True, False),
    ],
)
def test_sinks_under_a_shared_plan_are_refused_on_cpus(monkeypatch, layers, splits_keys, is_refused):
    """`attention/plans_by_window.py` shows which of them vLLM computes wrongly."""
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", str(int(splits_keys)))
    by_name = {}
    for index, (window, has_sinks) in enumerate(layers):
        layer = by_name[str(index)] = Attention.__new__(Attention)
        nn.Module.__init__(layer)
        layer.impl = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)
        layer.impl.sliding_window, layer.impl.sinks = window, torch.zeros(2) if has_sinks else None
    builder = CPUAttentionMetadataBuilder.__new__(CPUAttentionMetadataBuilder)
    builder.layer_names = list(by_name)
    builder.vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=by_name),
        scheduler_config=SimpleNamespace(async_scheduling=False),
    )
    builder.window_size = builder._group_sliding_window()
    group = SimpleNamespace(get_metadata_builder=lambda: builder)
    sentence = "leave out --disable-hybrid-kv-cache-manager"
    with pytest.raises(MagicDecConfigError, match=sentence) if is_refused else nullcontext():
        refuse_if_inexact(builder.vllm_config, [[group]])
