# SPDX-License-Identifier: Apache-2.0
"""Fixes vLLM's CPU attention where layers with and without a window share a KV cache group.

This is so for gpt-oss with `--disable-hybrid-kv-cache-manager`. Before a step, vLLM's kernel plans which
thread computes what; for requests with one token, threads may split the keys. All layers of a group share
one plan, made for no window. In a layer with a window, all keys of a thread may lie outside it; that thread
then returns uninitialised values, weighted by its part of the softmax's denominator. This is zero, unless
the layer has learned sinks: then the output is arbitrarily wrong. (When vLLM drafts, the plan may also be
for one layer's window, and layers that see further miss keys.)

With this fix, each layer has a plan for its own window. The third patch in `patches/` is the same fix for
vLLM itself.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_magicdec.hooking import instead

logger = init_logger(f"vllm.{__name__}")

_MARK = "_vllm_magicdec_original"
_WINDOWS = "_vllm_magicdec_windows"


@dataclass(kw_only=True)
class MetadataByWindow(CPUAttentionMetadata):
    """Metadata for layers with different windows; `scheduler_metadata` is for one of them."""

    plans: dict[int, torch.Tensor]  # by window in tokens, -1: none


def patch() -> None:
    """Give each layer a plan for its own window; call it in the worker, before a model runs."""
    builder, impl = CPUAttentionMetadataBuilder, CPUAttentionBackendImpl
    if hasattr(builder.build, _MARK) or not hasattr(builder, "_group_sliding_window"):
        return  # fixed already, here or in vLLM
    original = builder.build
    builder.build = instead(_plan_by_window)(builder, original)
    setattr(builder.build, _MARK, original)
    impl.forward = instead(_choose_plan)(impl, impl.forward)


def _plan_by_window(
    build: Callable[..., CPUAttentionMetadata],
    builder: CPUAttentionMetadataBuilder,
    *args: Any,
    **kwargs: Any,
) -> CPUAttentionMetadata:
    windows, shared = _windows_of(builder), builder.window_size
    if windows == {shared}:
        return build(builder, *args, **kwargs)
    logger.info_once(
        "Layers with windows of %s tokens (-1: none) share a KV cache group: each gets its own plan, "
        "because vLLM's CPU attention is wrong with a shared one if there are learned sinks.",
        ", ".join(map(str, sorted(windows))),
    )
    plans = {}
    try:
        for window in windows:
            builder.window_size = window
            built = build(builder, *args, **kwargs)
            plans[window] = built.scheduler_metadata
    finally:
        builder.window_size = shared
    return MetadataByWindow(**vars(built), plans=plans)


def _choose_plan(
    forward: Callable[..., torch.Tensor],
    impl: CPUAttentionBackendImpl,
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    attn_metadata: CPUAttentionMetadata | None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    if isinstance(attn_metadata, MetadataByWindow):
        plan = attn_metadata.plans[impl.sliding_window]
        attn_metadata = copy(attn_metadata)
        attn_metadata.scheduler_metadata = plan
    return forward(impl, layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)


def _windows_of(builder: Any) -> set[int]:
    """Return the windows of the builder's layers in tokens, -1: none; vLLM may add layers late."""
    if _WINDOWS not in vars(builder):
        layers = get_layers_from_vllm_config(builder.vllm_config, Attention, builder.layer_names)
        impls = (layer.impl for layer in layers.values())
        windows = {impl.sliding_window for impl in impls if isinstance(impl, CPUAttentionBackendImpl)}
        setattr(builder, _WINDOWS, windows or {builder.window_size})
    return getattr(builder, _WINDOWS)
