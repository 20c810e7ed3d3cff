# SPDX-License-Identifier: Apache-2.0
"""Dtypes and scales of a layer's quantised queries, keys and values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode

E4M3_CAPABILITY = 89  # minimum for float8_e4m3fn in Triton


@dataclass(frozen=True)
class Scales:
    """Scales of a layer with an fp8 KV cache; 1 for other layers.

    `key` and `value` hold for the whole layer, so kernels can apply them for free. With scales per KV head
    they are the maximum, and the factors are the remainder, if the backend supports it.
    """

    key: float = 1.0
    value: float = 1.0
    query_factors: torch.Tensor | None = None  # [num_heads, 1] float32, for quantised queries and for keys
    value_factors: torch.Tensor | None = None  # [num_heads, 1] float32

    @classmethod
    def of(cls, layer: Any, num_heads: int) -> "Scales":
        """Read the scales of vLLM's `Attention` layer with an fp8 cache after its weights are loaded."""
        key, value = layer._k_scale_float, layer._v_scale_float
        # A CPU's backend ignores scales per head.
        by_head = layer.attn_backend.supports_per_head_quant_scales()
        of_query = [layer._k_scale / key] if by_head and layer._k_scale.numel() > 1 else []
        if layer.query_quant is not None:  # the layer quantises queries before its backend gets them
            of_query.append(layer._q_scale)
        of_values = [layer._v_scale / value] if by_head and layer._v_scale.numel() > 1 else []
        return cls(key, value, _by_query_head(of_query, num_heads), _by_query_head(of_values, num_heads))

    def scale_query(self, query: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Convert a backend's queries [..., num_heads, head_size] to the model's dtype."""
        return query if self.query_factors is None else (query.float() * self.query_factors).to(dtype)


def stored_dtype(spec: AttentionSpec, kv_cache_dtype: str) -> torch.dtype:
    """Return the dtype of a KV cache's elements; vLLM keeps fp8 caches as tensors of bytes."""
    if spec.kv_quant_mode != KVQuantMode.FP8_PER_TENSOR:
        return spec.dtype
    return torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else current_platform.fp8_dtype()


def _by_query_head(factors: Sequence[torch.Tensor], num_heads: int) -> torch.Tensor | None:
    """Multiply factors of shape [], [1] or [num_kv_heads] and expand them to query heads."""
    if not factors:
        return None
    product = math.prod(factor.flatten() for factor in factors)
    return product.repeat_interleave(num_heads // len(product)).unsqueeze(1)
