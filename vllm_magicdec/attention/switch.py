# SPDX-License-Identifier: Apache-2.0
"""Draft attention inside vLLM's layers, selected by the type of the metadata.

vLLM calls `layer.impl.forward(..., attn_metadata, output)` outside of compiled graphs. Metadata of vLLM's
own types goes to vLLM's implementation, so the target's path is untouched.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.utils.flashinfer import has_flashinfer
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode

from vllm_magicdec.attention import KVRows, torch_attention
from vllm_magicdec.attention.flashinfer_attention import Geometry, UnreadableCacheError
from vllm_magicdec.attention.metadata import DraftMetadata, ObservedMetadata, TokenMetadata
from vllm_magicdec.attention.native_attention import native_of, takes_view
from vllm_magicdec.attention.observing import QueryRecorder
from vllm_magicdec.attention.plans import CommonLengthPlans
from vllm_magicdec.attention.rows import FP8_DTYPES, NO_READER, READERS
from vllm_magicdec.attention.scales import E4M3_CAPABILITY, Scales, stored_dtype
from vllm_magicdec.attention.softmax import Softmax
from vllm_magicdec.errors import METHOD, MagicDecConfigError

# Backends whose metadata holds `block_table`, `query_start_loc` and `seq_lens`.
BACKENDS_WITH_BLOCK_TABLES = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")

logger = init_logger(f"vllm.{__name__}")


def install_switches(
    vllm_config: VllmConfig,
    layer_names: Sequence[str],
    device: torch.device,
    recorder: QueryRecorder | None = None,
    *,
    layer_pages: bool = False,
    max_graph_reqs: int = 0,
) -> Sequence[CommonLengthPlans]:
    """Install a `Switch` in every layer; its index is that in `layer_names`.

    Args:
        layer_names: attention layers of the target.
        recorder: receives the target's queries.
        layer_pages: draft steps read pages by layer through vLLM's attention.
        max_graph_reqs: maximum requests of a draft step in a CUDA graph; 0: no graphs.

    Returns:
        FlashInfer's plans; empty if it is not used.

    Raises:
        MagicDecConfigError: a layer's attention or KV cache is not supported.
    """
    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    # vLLM allocates the KV cache twice when it measures memory first: replace the first switches.
    for name in layer_names:
        layers[name].impl.forward = _own_forward(layers[name].impl)
    plans: dict[Geometry, CommonLengthPlans | None] = {}
    for index, name in enumerate(layer_names):
        switch = Switch(index, layers[name], vllm_config, device, recorder)
        if layer_pages or recorder is not None:
            switch.require_block_tables()
        if device.type == "cuda" and not layer_pages:
            if switch.geometry not in plans:
                plans[switch.geometry] = plan_with_flashinfer(
                    switch.geometry,
                    max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
                    max_graph_reqs=max_graph_reqs,
                    device=device,
                )
            switch.plans = plans[switch.geometry]
    return [found for found in plans.values() if found is not None]


def better_options(spec: AttentionSpec) -> str:
    """Return options for attention over `spec` on a GPU with block tables and full CUDA graphs."""
    if spec.kv_quant_mode != KVQuantMode.FP8_PER_TENSOR:
        return "--attention-backend FLASH_ATTN"
    if not current_platform.has_device_capability(E4M3_CAPABILITY):
        return "--kv-cache-dtype bfloat16 or float16, as the model's"
    from vllm.v1.attention.backends.fa_utils import flash_attn_supports_kv_cache_dtype  # loads libraries

    # FlashAttention 2 reads no fp8 cache, and neither backend an fp8_e5m2 one.
    backend = "FLASH_ATTN" if flash_attn_supports_kv_cache_dtype() else "TRITON_ATTN"
    return f"--attention-backend {backend} --kv-cache-dtype fp8"


def flashinfer_refusal(geometry: Geometry) -> str | None:
    """Return the reason why FlashInfer cannot read token views of this geometry, or None."""
    return geometry.refusal if has_flashinfer() else "it is not installed, or its kernels are not"


def plan_with_flashinfer(
    geometry: Geometry, *, max_num_reqs: int, max_graph_reqs: int, device: torch.device
) -> CommonLengthPlans | None:
    """Make FlashInfer's plans for layers of this geometry, or return None; log the choice once."""
    reason = flashinfer_refusal(geometry)
    if reason is None:
        try:
            plans = CommonLengthPlans(
                geometry, max_num_reqs=max_num_reqs, max_graph_reqs=max_graph_reqs, device=device
            )
            plans.load_kernels()
        except Exception as error:  # compilers and loaders raise many types
            reason = f"its kernels do not work: {error}"
        else:
            logger.info_once(
                "%s: using FlashInfer for token views that fill the budget, and Triton for others.", METHOD
            )
            return plans
    _log_fallback(reason)
    return None


def _log_fallback(reason: str) -> None:
    logger.warning_once("%s: FlashInfer unavailable (%s); using Triton for token views.", METHOD, reason)


def _own_forward(impl: Any) -> Any:
    holder = getattr(impl.forward, "__self__", None)
    return holder._target_forward if isinstance(holder, Switch) else impl.forward


class Switch:
    """Replaces one layer's `impl.forward`."""

    def __init__(
        self,
        index: int,
        layer: Any,
        vllm_config: VllmConfig,
        device: torch.device,
        recorder: QueryRecorder | None,
    ) -> None:
        impl = layer.impl
        if getattr(impl, "alibi_slopes", None) is not None:
            # ALiBi needs the distance of every token that is read or scored.
            raise MagicDecConfigError(
                f"{METHOD}: models with ALiBi can draft with draft_kv_policy='streamingllm' only"
            )
        self._index = index
        self._recorder = recorder
        self._impl = impl
        self._target_forward = impl.forward
        self._native = native_of(impl)
        self._backend = layer.attn_backend.get_name()
        self._isa = getattr(layer, "isa", None)
        self._spec = spec = layer.get_kv_cache_spec(vllm_config)
        self._cache_dtype = stored_dtype(spec, layer.kv_cache_dtype)
        self._known: tuple[torch.Tensor, KVRows] | None = None  # a KV cache and its rows
        self.plans: CommonLengthPlans | None = None  # None: FlashInfer is not used
        self._implementation: ModuleType = torch_attention
        if device.type == "cuda":
            from vllm_magicdec.attention import triton_attention  # Triton may not be installed

            self._implementation = triton_attention
        self.geometry = Geometry(
            num_heads=impl.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            query_dtype=vllm_config.model_config.dtype,
            cache_dtype=self._cache_dtype,
            scale=float(impl.scale),
            soft_cap=float(getattr(impl, "logits_soft_cap", None) or 0.0),
        )
        # Refuse unreadable caches before they are filled.
        shape = (1, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
        try:
            self._rows_of(torch.empty(shape, dtype=spec.dtype))
        except ValueError as error:
            raise MagicDecConfigError(f"{METHOD}: {error}") from None
        is_e4m3 = self._cache_dtype == torch.float8_e4m3fn and device.type == "cuda"
        if is_e4m3 and not current_platform.has_device_capability(E4M3_CAPABILITY):
            raise MagicDecConfigError(
                f"{METHOD}: {READERS} read fp8_e4m3 KV caches on GPUs of compute capability 8.9 and newer; "
                f"use --kv-cache-dtype bfloat16 or float16, as the model's, or {NO_READER}"
            )
        # Refused layers may lack scales.
        self._scales = Scales.of(layer, impl.num_heads) if self._cache_dtype in FP8_DTYPES else Scales()
        impl.forward = self.forward

    def require_block_tables(self) -> None:
        """Raise MagicDecConfigError for backends whose metadata has no block table."""
        if self._backend not in BACKENDS_WITH_BLOCK_TABLES:
            raise MagicDecConfigError(
                f"{METHOD}: this draft_kv_policy does not support attention backend {self._backend}; use "
                f"{better_options(self._spec)}, or draft_kv_policy='snapkv' with "
                "draft_kv_granularity='token'"
            )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **scales: Any,
    ) -> torch.Tensor:
        """Run vLLM's `AttentionImpl.forward`, or draft attention for the plugin's metadata."""
        if isinstance(attn_metadata, TokenMetadata):
            if self._native is not None and takes_view(attn_metadata):
                self._native.attend_view(
                    self._query(query), kv_cache, attn_metadata, self._softmax, self._scales.value, output
                )
                return output
            num_queries = attn_metadata.num_queries
            query = self._query(query[:num_queries])
            own_output = output[:num_queries].view(query.shape)
            self._attend(query, self._rows(kv_cache), attn_metadata, own_output)
            return output
        if isinstance(attn_metadata, ObservedMetadata):
            self._target_forward(layer, query, key, value, kv_cache, attn_metadata.own, output, **scales)
            attn_metadata.observer(self._index, self._query(query), self._rows(kv_cache), self._softmax)
            return output
        if isinstance(attn_metadata, DraftMetadata):
            attn_metadata = attn_metadata.own
        elif self._recorder is not None and attn_metadata is not None:
            self._recorder.record(
                self._index, query, self._scales, attn_metadata, self._rows(kv_cache), self._softmax
            )
        return self._target_forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)

    @property
    def _softmax(self) -> Softmax:
        sinks = getattr(self._impl, "sinks", None)  # not cached: implementations cast theirs when they run
        return Softmax(self.geometry.scale * self._scales.key, self.geometry.soft_cap, sinks)

    def _query(self, query: torch.Tensor) -> torch.Tensor:
        return self._scales.scale_query(query, self.geometry.query_dtype)

    def _attend(
        self, query: torch.Tensor, rows: KVRows, metadata: TokenMetadata, output: torch.Tensor
    ) -> None:
        """Write to `output`, shaped as `query` [num_queries, num_heads, head_size]."""
        slots, mask = metadata.slots, metadata.mask
        softmax, value_scale = self._softmax, self._scales.value
        if mask is not None:  # on CPUs only
            padded = query[mask.table]
            attended = torch_attention.attend_where(padded, rows, slots, mask.is_seen, softmax, value_scale)
            output.copy_(attended.flatten(0, 1)[mask.cells])
        elif not self._attend_as_planned(query, rows, metadata, output):
            attend = self._implementation.attend
            output.copy_(attend(query, rows, slots, metadata.lens, softmax, value_scale))
        if self._scales.value_factors is not None:
            output.mul_(self._scales.value_factors)

    def _attend_as_planned(
        self, query: torch.Tensor, rows: KVRows, metadata: TokenMetadata, output: torch.Tensor
    ) -> bool:
        """Attend with FlashInfer if possible; return whether it was."""
        if self.plans is None or metadata.common_len is None:
            return False
        decode = self.plans.decode(len(query), metadata.common_len)
        if decode is None:
            return False
        try:
            decode.run(
                query,
                rows,
                metadata.slots,
                output,
                sinks=self._softmax.sinks,
                key_scale=self._scales.key,
                value_scale=self._scales.value,
            )
        except UnreadableCacheError as error:  # the cache's strides are not known earlier
            _log_fallback(str(error))
            self.plans = None
            return False
        return True

    def _rows(self, kv_cache: torch.Tensor) -> KVRows:
        if self._known is None or self._known[0] is not kv_cache:
            rows = self._rows_of(kv_cache)
            if self._native is not None:
                rows = replace(rows, weigh=partial(self._native.weigh_tokens, kv_cache))
            self._known = kv_cache, rows
        return self._known[1]

    def _rows_of(self, kv_cache: torch.Tensor) -> KVRows:
        return KVRows.of(kv_cache, self._backend, self._isa, self._cache_dtype)
