# SPDX-License-Identifier: Apache-2.0
"""What a layer's quantised queries, keys and values are stored as, and are to be multiplied by."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode


@dataclass(frozen=True)
class Scales:
    """Of a layer whose KV cache is fp8; of others all is 1.

    Numbers are for a whole layer, so that kernels can take them along for nothing. Where every KV head has
    a scale of its own they are the greatest, and the factors are what is left, if the backend reads those.
    """

    key: float = 1.0
    value: float = 1.0
    query_factors: torch.Tensor | None = None  # [num_heads, 1] float32, of quantised queries and of keys
    value_factors: torch.Tensor | None = None  # [num_heads, 1] float32

    @classmethod
    def of(cls, layer: Any, num_heads: int) -> "Scales":
        """Those of one of vLLM's `Attention` layers with an fp8 cache, its weights loaded."""
        key, value = layer._k_scale_float, layer._v_scale_float
        # A CPU's backend stores and reads by the number for the whole layer, whatever a checkpoint has.
        by_head = layer.attn_backend.supports_per_head_quant_scales()
        of_query = [layer._k_scale / key] if by_head and layer._k_scale.numel() > 1 else []
        if layer.query_quant is not None:  # the layer quantises queries before its backend gets them
            of_query.append(layer._q_scale)
        of_values = [layer._v_scale / value] if by_head and layer._v_scale.numel() > 1 else []
        return cls(key, value, _by_query_head(of_query, num_heads), _by_query_head(of_values, num_heads))

    def scale_query(self, query: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Queries [..., num_heads, head_size] in the model's dtype, from what a layer hands its backend."""
        return query if self.query_factors is None else (query.float() * self.query_factors).to(dtype)


def stored_dtype(spec: AttentionSpec, kv_cache_dtype: str) -> torch.dtype:
    """What the elements of a layer's KV cache are; vLLM keeps fp8 caches as tensors of bytes.

    Args:
        spec: of the cache.
        kv_cache_dtype: vLLM's name, of the layer or the engine.
    """
    if spec.kv_quant_mode != KVQuantMode.FP8_PER_TENSOR:
        return spec.dtype
    return torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else current_platform.fp8_dtype()


def _by_query_head(factors: Sequence[torch.Tensor], num_heads: int) -> torch.Tensor | None:
    """The product of factors for all heads, [] or [1], or for each KV head, [num_kv_heads]."""
    if not factors:
        return None
    product = math.prod(factor.flatten() for factor in factors)
    return product.repeat_interleave(num_heads // len(product)).unsqueeze(1)
