# SPDX-License-Identifier: Apache-2.0
"""The kernel of `vllm_magicdec.native` inside vLLM's layers on CPUs: decoding, verification, drafting.

It runs in steps in which no request has more than `MAX_QUERY_LEN` tokens, except where `is_faster` prefers
vLLM's kernel.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_magicdec.attention.metadata import TokenMetadata
from vllm_magicdec.attention.rows import FP8_DTYPES
from vllm_magicdec.attention.scales import stored_dtype
from vllm_magicdec.attention.softmax import Softmax
from vllm_magicdec.errors import METHOD
from vllm_magicdec.native import huge_pages
from vllm_magicdec.native.library import (
    MAX_QUERY_LEN,
    CacheAttention,
    Kernel,
    UnreadableError,
    find_kernel,
)

logger = init_logger(f"vllm.{__name__}")

# vLLM's kernel is faster below both of these over fp8 caches in the layout `amx`, as measured on one core:
# benchmarks/results/genuineintel-*/native-attention-fp8.json.
_AMX_FP8_ROWS, _AMX_FP8_TOKENS = 16, 32_768


def use_native_attention(vllm_config: VllmConfig, layer_names: Sequence[str]) -> None:
    """Install the kernel in each layer's attention on a CPU, and log once whether it is used.

    Args:
        vllm_config: the engine's configuration; the KV cache is allocated.
        layer_names: layers of the target and of a draft model that have a KV cache.
    """
    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    try:
        kernel = find_kernel()
    except UnreadableError as error:
        _log_fallback(error)
        return
    installed = []
    for name in layer_names:
        layer = layers[name]
        if not hasattr(layer, "impl"):  # recurrent state, in engines of other methods
            continue
        if native_of(layer.impl) is not None:  # vLLM allocates the KV cache twice when it measures memory
            continue
        try:
            NativeAttention(layer, layer.get_kv_cache_spec(vllm_config), kernel)
        except UnreadableError as error:
            _log_fallback(error)
        else:
            installed.append(layer)
            logger.info_once(
                "%s: using the plugin's attention kernel (%s, layout %s) in steps of up to %d tokens of a "
                "request.",
                METHOD,
                kernel.variant.description,
                layer.isa,
                MAX_QUERY_LEN,
            )
    if installed and huge_pages.on_demand():
        # One layer is enough: vLLM 0.32 allocates one piece of memory for all.
        installed[0].bind_kv_cache = partial(_bind_in_huge_pages, installed[0].bind_kv_cache)


def _bind_in_huge_pages(bind: Callable[[torch.Tensor], None], kv_cache: torch.Tensor) -> None:
    if huge_pages.move_to_huge_pages(kv_cache):
        logger.info_once("%s: KV cache uses transparent huge pages where available.", METHOD)
    bind(kv_cache)


def _log_fallback(reason: UnreadableError) -> None:
    logger.info_once("%s: using vLLM's attention: %s.", METHOD, reason)


def native_of(impl: Any) -> "NativeAttention | None":
    """Return the kernel installed in a layer's attention, also under a `Switch`."""
    holder = getattr(getattr(impl, "forward", None), "__self__", None)  # MLA has no `forward`
    while holder is not None and not isinstance(holder, NativeAttention):
        holder = getattr(getattr(holder, "_target_forward", None), "__self__", None)
    return holder


class NativeAttention:
    """Replaces one layer's `impl.forward`; raises UnreadableError if the kernel does not support it."""

    def __init__(self, layer: Any, spec: Any, kernel: Kernel) -> None:
        impl = layer.impl
        backend, isa = layer.attn_backend.get_name(), getattr(layer, "isa", "")
        if backend != "CPU_ATTN" or impl.attn_type != AttentionType.DECODER:
            raise UnreadableError(f"the plugin's own kernel does not support the layers of {backend}")
        if type(impl).forward is not CPUAttentionBackendImpl.forward:
            made = f"{type(impl).__module__}.{type(impl).__qualname__}"
            raise UnreadableError(f"another plugin brings its own for CPUs, {made}")
        if impl.alibi_slopes is not None:
            raise UnreadableError("the plugin's own kernel does not support ALiBi")
        self._cache_dtype = stored_dtype(spec, layer.kv_cache_dtype)
        kernel.check_cache(spec.block_size, spec.head_size, self._cache_dtype, isa)
        self._impl = impl
        self._layout = isa
        self._group = impl.num_heads // spec.num_kv_heads
        self._kernel = kernel
        self._known: tuple[weakref.ref[torch.Tensor], CacheAttention] | None = None
        self._own_forward = impl.forward
        self._starts = torch.empty(0, dtype=torch.int32)
        impl.forward = self.forward

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
        """Run vLLM's `AttentionImpl.forward`, by the kernel where it supports the step and is faster."""
        metadata, is_fp8, impl = attn_metadata, self._cache_dtype in FP8_DTYPES, self._impl
        if (
            any(scale is not None for scale in scales.values())
            or not _supports(metadata)
            or not is_faster(
                self._layout, metadata.max_query_len * self._group, metadata.seq_lens, is_fp8=is_fp8
            )
        ):
            return self._own_forward(layer, query, key, value, kv_cache, metadata, output, **scales)
        self._attention_over(kv_cache).attend_pages(
            query,
            output,
            query_starts=metadata.query_start_loc,
            block_table=metadata.block_table,
            context_lens=metadata.seq_lens,
            scale=impl.scale * layer._k_scale_float if is_fp8 else impl.scale,
            value_scale=layer._v_scale_float if is_fp8 else 1.0,
            soft_cap=impl.logits_soft_cap,
            window=impl.sliding_window,
            sinks=impl.sinks,
        )
        return output

    def attend_view(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TokenMetadata,
        softmax: Softmax,
        value_scale: float,
        output: torch.Tensor,
    ) -> None:
        """Attend to a token view for which `takes_view` is true.

        Args:
            query: [num_queries or more, num_heads, head_size].
            kv_cache: [num_blocks, num_kv_heads, page_size, 2 * head_size].
            value_scale: scale of an fp8 cache's values; else 1.
            output: as `query`, or [num_queries or more, num_heads * head_size]; written.
        """
        num_reqs, mask = len(metadata.lens), metadata.mask
        if mask is None:
            if len(self._starts) <= num_reqs:
                self._starts = torch.arange(2 * num_reqs + 1, dtype=torch.int32)
            starts, is_seen = self._starts[: num_reqs + 1], None
        else:  # the last column is each request's last token
            starts, is_seen = torch.cat([mask.table[:, 0], mask.table[-1, -1:] + 1]), mask.is_seen
        self._attention_over(kv_cache).attend_slots(
            query,
            output,
            query_starts=starts,
            slots=metadata.slots,
            slot_lens=metadata.lens,
            is_seen=is_seen,
            scale=softmax.scale,
            value_scale=value_scale,
            soft_cap=softmax.soft_cap,
            sinks=softmax.sinks,
        )

    def weigh_tokens(
        self,
        kv_cache: torch.Tensor,
        queries: torch.Tensor,
        pages: torch.Tensor,
        length: int,
        softmax: Softmax,
    ) -> torch.Tensor | None:
        """Implement `attention.rows.WeighTokens`; `kv_cache` as in `attend_view`."""
        if len(queries) > MAX_QUERY_LEN:
            return None
        return self._attention_over(kv_cache).weigh_tokens(
            queries,
            pages=pages,
            context_len=length,
            scale=softmax.scale,
            soft_cap=softmax.soft_cap,
            sinks=softmax.sinks,
        )

    def _attention_over(self, kv_cache: torch.Tensor) -> CacheAttention:
        if self._known is None or self._known[0]() is not kv_cache:
            attention = self._kernel.over(kv_cache.view(self._cache_dtype), self._layout)
            self._known = weakref.ref(kv_cache), attention  # so that vLLM can free it
        return self._known[1]


def is_faster(layout: str, num_rows: int, lens: torch.Tensor, *, is_fp8: bool) -> bool:
    """Whether the kernel is faster over pages than vLLM's; not for little work over fp8 caches with AMX.

    Args:
        layout: layout of the KV cache, as in vLLM's `layer.isa`.
        num_rows: query tokens of a request times query heads per KV head.
        lens: [num_reqs] int32, tokens of each request's context, on the host.
    """
    if layout != "amx" or not is_fp8 or num_rows >= _AMX_FP8_ROWS:
        return True
    return int(lens.sum()) >= _AMX_FP8_TOKENS


def takes_view(metadata: TokenMetadata) -> bool:
    """Whether the kernel supports the number of query tokens of each request."""
    return metadata.mask is None or metadata.mask.table.shape[1] <= MAX_QUERY_LEN


def _supports(metadata: Any) -> bool:
    """Whether vLLM's metadata is for causal attention of few tokens per request."""
    return (
        getattr(metadata, "causal", False) is True
        and getattr(metadata, "dynamic_causal", None) is None
        and metadata.max_query_len <= MAX_QUERY_LEN
    )
