# SPDX-License-Identifier: Apache-2.0
"""The kernel of `vllm_magicdec.native` inside vLLM's layers on CPUs: decoding, verification, drafting.

It takes every step in which no request has more than `MAX_QUERY_LEN` tokens, but for what `is_faster`
leaves to vLLM's; prefills, and steps that are mixed with them, stay vLLM's own.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType

from vllm_magicdec.attention.metadata import TokenMetadata, TokenPassMetadata
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
    best_variant,
    load,
)

logger = init_logger(f"vllm.{__name__}")

# Over fp8 caches in the layout `amx` vLLM's own kernel is faster below both of these. Numbers are widened
# exactly here, at a price. From one core of one processor:
# benchmarks/results/genuineintel-*/native-attention-fp8.json.
_AMX_FP8_ROWS, _AMX_FP8_TOKENS = 16, 32_768


def use_native_attention(vllm_config: VllmConfig, layer_names: Sequence[str]) -> None:
    """Let the kernel stand before each layer's own attention, on a CPU, and say once whether it does.

    Args:
        vllm_config: the engine's; the KV cache is laid out.
        layer_names: layers with a KV cache of the target, and of a draft model.
    """
    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    try:
        kernel = find_kernel()
    except UnreadableError as error:
        _log_own(error)
        return
    taken = []
    for name in layer_names:
        layer = layers[name]
        if not hasattr(layer, "impl"):  # recurrent state, in engines of other methods
            continue
        if native_of(layer.impl) is not None:  # vLLM lays the KV cache out twice when it measures memory
            continue
        try:
            NativeAttention(layer, layer.get_kv_cache_spec(vllm_config), kernel)
        except UnreadableError as error:
            _log_own(error)
        else:
            taken.append(layer)
            logger.info_once(
                "%s: the plugin's own kernel (%s, layout %s) attends in steps of up to %d tokens of a "
                "request, where it is faster.",
                METHOD,
                kernel.variant.description,
                layer.isa,
                MAX_QUERY_LEN,
            )
    if taken and huge_pages.on_demand():
        taken[0].bind_kv_cache = _BindInHugePages(taken[0].bind_kv_cache)


@dataclass(frozen=True)
class _BindInHugePages:
    """A layer's `bind_kv_cache`, which moves the KV cache there before anybody writes to it.

    One layer's is enough: vLLM 0.32 has one piece of memory for all.
    """

    bind: Callable[[torch.Tensor], None]

    def __call__(self, kv_cache: torch.Tensor) -> None:
        if huge_pages.move_to_huge_pages(kv_cache):
            logger.info_once("%s: the KV cache lies in huge pages, as far as the system has them.", METHOD)
        self.bind(kv_cache)


def _log_own(reason: UnreadableError) -> None:
    logger.info_once("%s: attention is vLLM's own: %s.", METHOD, reason)


def find_kernel() -> Kernel:
    """The best that was built and that this machine runs.

    Raises:
        UnreadableError: there is none.
    """
    variant = best_variant()
    if variant is None:
        raise UnreadableError(
            "the plugin's own kernel was not built, as there was no C++ compiler (GCC 12 or newer) when "
            "it was installed"
        )
    try:
        return load(variant)
    except OSError as error:
        raise UnreadableError(f"the plugin's own kernel cannot be loaded ({error})") from None


def native_of(impl: Any) -> "NativeAttention | None":
    """What stands before a layer's own attention, under whatever stands before that."""
    holder = getattr(getattr(impl, "forward", None), "__self__", None)  # MLA has several of other names
    while holder is not None and not isinstance(holder, NativeAttention):
        holder = getattr(getattr(holder, "_target_forward", None), "__self__", None)
    return holder


class NativeAttention:
    """Takes the place of one layer's `impl.forward`.

    Raises:
        UnreadableError: the layer is not one that the kernel was written for.
    """

    def __init__(self, layer: Any, spec: Any, kernel: Kernel) -> None:
        impl = layer.impl
        backend, isa = layer.attn_backend.get_name(), getattr(layer, "isa", "")
        if backend != "CPU_ATTN" or impl.attn_type != AttentionType.DECODER:
            raise UnreadableError(f"the plugin's own kernel does not know the layers of {backend}")
        if impl.alibi_slopes is not None:
            raise UnreadableError("the plugin's own kernel has no ALiBi")
        self._cache_dtype = stored_dtype(spec, layer.kv_cache_dtype)
        kernel.check_cache(spec.block_size, spec.head_size, self._cache_dtype, isa)
        self._impl = impl
        self._layout = isa
        self._group = impl.num_heads // spec.num_kv_heads
        self._kernel = kernel
        # A KV cache and what reads it.
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
        """vLLM's signature; `query` [num_tokens, num_heads, head_size]."""
        if not _takes(attn_metadata) or any(scale is not None for scale in scales.values()):
            return self._own_forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        is_fp8 = self._cache_dtype in FP8_DTYPES
        num_rows, lens = attn_metadata.max_query_len * self._group, attn_metadata.seq_lens
        if not is_faster(self._layout, num_rows, lens, is_fp8=is_fp8):
            return self._own_forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        impl = self._impl
        self._attention_over(kv_cache).attend_pages(
            query,
            output,
            query_starts=attn_metadata.query_start_loc,
            block_table=attn_metadata.block_table,
            context_lens=lens,
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
        metadata: TokenMetadata | TokenPassMetadata,
        softmax: Softmax,
        value_scale: float,
        output: torch.Tensor,
    ) -> None:
        """Attend to a token view of which `takes_view` is true.

        Args:
            query: [num_queries or more, num_heads, head_size].
            kv_cache: [num_blocks, num_kv_heads, page_size, 2 * head_size].
            metadata: the view.
            softmax: the layer's.
            value_scale: of an fp8 cache; of others 1.
            output: as `query`, or [num_queries or more, num_heads * head_size]; written.
        """
        num_reqs, _, width = metadata.slots.shape
        if isinstance(metadata, TokenMetadata):
            starts, lens, is_seen = self._starts_of_single_tokens(num_reqs), metadata.lens, None
        else:  # the last column is each request's last token
            starts = torch.cat([metadata.table[:, 0], metadata.table[-1, -1:] + 1])
            lens = torch.full((num_reqs,), width, dtype=torch.int32)
            is_seen = metadata.is_seen
        self._attention_over(kv_cache).attend_slots(
            query,
            output,
            query_starts=starts,
            slots=metadata.slots,
            slot_lens=lens,
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
        """See `attention.rows.WeighTokens`; `kv_cache` as in `attend_view`."""
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
            self._known = weakref.ref(kv_cache), attention  # vLLM frees the memory, whoever lives on
        return self._known[1]

    def _starts_of_single_tokens(self, num_reqs: int) -> torch.Tensor:
        """[num_reqs + 1] int32."""
        if len(self._starts) <= num_reqs:
            self._starts = torch.arange(2 * num_reqs + 1, dtype=torch.int32)
        return self._starts[: num_reqs + 1]


def is_faster(layout: str, num_rows: int, lens: torch.Tensor, *, is_fp8: bool) -> bool:
    """Whether the kernel takes less time over pages than vLLM's own.

    It does but for little work over fp8 caches with AMX.

    Args:
        layout: of the KV cache, as vLLM's `layer.isa` names it.
        num_rows: query tokens of a request times query heads of a KV head.
        lens: [num_reqs] int32, tokens of each request's context, on the host.
        is_fp8: what the cache holds.
    """
    if layout != "amx" or not is_fp8 or num_rows >= _AMX_FP8_ROWS:
        return True
    return int(lens.sum()) >= _AMX_FP8_TOKENS


def takes_view(metadata: TokenMetadata | TokenPassMetadata) -> bool:
    """Whether the kernel has room for the query tokens of each request."""
    return isinstance(metadata, TokenMetadata) or metadata.table.shape[1] <= MAX_QUERY_LEN


def _takes(metadata: Any) -> bool:
    """Whether vLLM's metadata is of causal attention of few tokens per request."""
    return (
        getattr(metadata, "causal", False) is True
        and getattr(metadata, "dynamic_causal", None) is None
        and metadata.max_query_len <= MAX_QUERY_LEN
    )
