# SPDX-License-Identifier: Apache-2.0
"""Checks of the target's attention backend: refuses inexact verification and warns of slow one.

The plugin does not choose a backend: the one that verifies faster than FlashAttention 2 costs full CUDA
graphs, and the trade-off was not measured.
"""

from collections.abc import Sequence
from typing import Any

from vllm import envs
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder, QueryLenSupport
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
from vllm.v1.worker.utils import AttentionGroup

from vllm_magicdec.errors import METHOD, MagicDecConfigError

logger = init_logger(f"vllm.{__name__}")


def warn_if_slow(vllm_config: VllmConfig) -> None:
    """Warn of attention that verifies several tokens of a request without splitting long contexts.

    FlashAttention 2 packs the query heads of a group and splits long contexts for one query token per
    request only (flash-attention issues 176, 190, 193; vLLM 51320, 52879); 3 and 4 do so for several.
    """
    if vllm_config.device_config.device_type != "cuda":
        return
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
    impls: list[Any] = [layer.impl for layer in layers if hasattr(layer, "impl")]
    # vLLM's choice of the version, rather than a guess from the GPU's name.
    if any(
        getattr(impl, "vllm_flash_attn_version", None) == 2 and impl.num_heads > impl.num_kv_heads
        for impl in impls
    ):
        logger.warning_once(
            "%s: vLLM uses FlashAttention 2 here, which verifies several tokens at several times the cost "
            "of one at long contexts. --attention-backend FLASHINFER has a kernel that does not, but on "
            "Ampere and Ada vLLM 0.32 captures no full CUDA graphs with it, and so none of draft steps. "
            "Which is faster was not measured: try both with your load.",
            METHOD,
            scope="global",
        )


def refuse_if_inexact(vllm_config: VllmConfig, target_groups: Sequence[Sequence[AttentionGroup]]) -> None:
    """Raise MagicDecConfigError for attention with which the target's output would be wrong.

    Some MLA backends treat several query tokens per request as a prompt's, whose lengths they read on the
    host. Under asynchronous scheduling those are only upper bounds. For CPUs see `_has_wrong_plan`.
    """
    is_async = vllm_config.scheduler_config.async_scheduling
    for group in (group for of_cache in target_groups for group in of_cache):
        builder = group.get_metadata_builder()
        if isinstance(builder, CPUAttentionMetadataBuilder) and _has_wrong_plan(builder):
            raise MagicDecConfigError(
                f"{METHOD}: on CPUs, vLLM's attention is wrong in layers with learned sinks and a window "
                "that share a KV cache group with others; leave out --disable-hybrid-kv-cache-manager and "
                "KV connectors that disable that manager, or set VLLM_CPU_ATTN_SPLIT_KV=0"
            )
        if (
            is_async
            and isinstance(builder, MLACommonMetadataBuilder)
            and builder.query_len_support == QueryLenSupport.SINGLE_ONLY
        ):
            raise MagicDecConfigError(
                f"{METHOD}: attention backend {group.backend.get_name()} verifies several tokens by "
                "lengths that the host does not know under asynchronous scheduling; use "
                "--attention-backend FLASHINFER_MLA or TRITON_MLA, or --no-async-scheduling"
            )


def _has_wrong_plan(builder: CPUAttentionMetadataBuilder) -> bool:
    """Return whether a layer's window differs from the one for which its attention is planned.

    All layers of a group share one plan, which may split a request's keys between threads. A thread whose
    keys lie outside a layer's window returns leftover values. Their weight is zero, so finite ones do not
    matter, unless the layer has learned sinks. The third patch in `patches/` makes a plan for each window.
    """
    if not envs.VLLM_CPU_ATTN_SPLIT_KV or not hasattr(builder, "_group_sliding_window"):
        return False
    layers = get_layers_from_vllm_config(builder.vllm_config, Attention, builder.layer_names).values()
    impls = [layer.impl for layer in layers if isinstance(layer.impl, CPUAttentionBackendImpl)]
    return any(impl.sinks is not None and impl.sliding_window != builder.window_size for impl in impls)
