# SPDX-License-Identifier: Apache-2.0
"""Mends vLLM 0.32.0's attention on CPUs where layers with and without a window share a KV cache group.

So it is in gpt-oss with `--disable-hybrid-kv-cache-manager`. Before a step vLLM's kernel plans which thread
computes what; of a request with one token, threads may share the keys. All layers of a group use one plan,
made for no window. In a layer that has one, the keys of some thread may all lie before it. That thread
computes nothing, yet it hands on what its memory held from other work, as the values of its keys. They
count as much as its part of the softmax's denominator does: nothing, unless the layer has learned sinks,
which are in the first thread's part. Then the output is wrong by any amount. (Where vLLM drafts, the plan
may also be for the window of one layer, and those that see further miss keys.)

Here each layer has a plan for its own window. The same mend for vLLM itself is the third patch in
`patches/vllm-0.32.0/`.
"""

import functools
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

logger = init_logger(f"vllm.{__name__}")

_MARK = "_vllm_magicdec_original"
_WINDOWS = "_vllm_magicdec_windows"


@dataclass(kw_only=True)
class MetadataByWindow(CPUAttentionMetadata):
    """Metadata for layers that differ in their window; `scheduler_metadata` is for one of them."""

    plans: dict[int, torch.Tensor]  # by window in tokens, -1: none


def mend() -> None:
    """Let each layer attend by a plan for its own window; call it in the worker, before a model runs."""
    builder, impl = CPUAttentionMetadataBuilder, CPUAttentionBackendImpl
    if hasattr(builder.build, _MARK) or not hasattr(builder, "_group_sliding_window"):
        return  # already, here or in vLLM
    for owner, name, wrap in ((builder, "build", _plan_by_window), (impl, "forward", _choose_plan)):
        original = getattr(owner, name)
        wrapper = functools.wraps(original)(wrap(original))
        setattr(wrapper, _MARK, original)
        setattr(owner, name, wrapper)


def _plan_by_window(original: Callable[..., CPUAttentionMetadata]) -> Callable[..., CPUAttentionMetadata]:
    def build(self: CPUAttentionMetadataBuilder, *args: Any, **kwargs: Any) -> CPUAttentionMetadata:
        windows, shared = _windows_of(self), self.window_size
        if windows == {shared}:
            return original(self, *args, **kwargs)
        logger.info_once(
            "Layers with windows of %s tokens (-1: none) share a KV cache group: each has its own plan, "
            "because vLLM's CPU attention errs with a shared one where there are learned sinks.",
            ", ".join(map(str, sorted(windows))),
        )
        plans = {}
        try:
            for window in windows:
                self.window_size = window
                built = original(self, *args, **kwargs)
                plans[window] = built.scheduler_metadata
        finally:
            self.window_size = shared
        return MetadataByWindow(**vars(built), plans=plans)

    return build


def _choose_plan(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward(
        self: CPUAttentionBackendImpl,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if isinstance(attn_metadata, MetadataByWindow):
            plan = attn_metadata.plans[self.sliding_window]
            attn_metadata = copy(attn_metadata)
            attn_metadata.scheduler_metadata = plan
        return original(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)

    return forward


def _windows_of(builder: Any) -> set[int]:
    """Of the builder's layers, in tokens; -1: none. vLLM may name layers after it has made the builder."""
    if _WINDOWS not in vars(builder):
        layers = get_layers_from_vllm_config(builder.vllm_config, Attention, builder.layer_names)
        impls = (layer.impl for layer in layers.values())
        windows = {impl.sliding_window for impl in impls if isinstance(impl, CPUAttentionBackendImpl)}
        setattr(builder, _WINDOWS, windows or {builder.window_size})
    return getattr(builder, _WINDOWS)
