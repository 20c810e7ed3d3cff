# SPDX-License-Identifier: Apache-2.0
"""Draft attention over token views, where each request and KV head has its own list of cache slots.

| file | content |
| --- | --- |
| `rows.py` | a layer's paged cache, in any layout, as numbered rows |
| `softmax.py`, `scales.py` | scale, soft cap and learned sinks of a layer; scales of quantised tensors |
| `torch_attention.py` | the float32 reference, and the CPU's implementation |
| `triton_attention.py` | a kernel that reads through the cache's strides |
| `flashinfer_attention.py`, `triton_indices.py` | FlashInfer's paged decode over rows |
| `plans.py` | FlashInfer's plans for views of a length known to the host |
| `metadata.py` | attention metadata of a view by layer |
| `native_attention.py` | the kernel of `native/` in vLLM's layers, on CPUs |
| `observing.py` | interfaces for observers of the target's queries |
| `switch.py` | draft attention in vLLM's layers |
"""

from typing import Any, Literal

import torch

from vllm_magicdec.attention.rows import KVRows

__all__ = ["Implementation", "KVRows", "attend"]

Implementation = Literal["torch", "triton", "flashinfer"]


def attend(
    query: torch.Tensor,
    rows: KVRows,
    slots: torch.Tensor,
    lens: torch.Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    value_scale: float = 1.0,
    implementation: Implementation = "torch",
) -> torch.Tensor:
    """Attend from one query token per request to the tokens in its view.

    Args:
        query: [num_reqs, num_heads, head_size]; the heads of a KV head are adjacent.
        rows: the layer's cache.
        slots: [num_reqs, num_kv_heads, budget] int32; the first `lens` columns are read.
        lens: [num_reqs] int32, each from 1 to the budget.
        scale: scale of the logits, times that of an fp8 cache's keys.
        soft_cap: above 0, logits become `soft_cap * tanh(logits / soft_cap)`.
        sinks: [num_heads], logits that only add to the softmax's denominator.
        value_scale: scale of an fp8 cache's values.
        implementation: "flashinfer" plans and waits for `lens` at each call; a draft loop keeps a
            `flashinfer_attention.FlashInferDecode` instead.

    Returns:
        [num_reqs, num_heads, head_size] in the query's dtype, accumulated in float32.

    Raises:
        ValueError: the implementation is unknown or cannot read this cache's layout.
    """
    options: dict[str, Any] = dict(scale=scale, soft_cap=soft_cap, sinks=sinks, value_scale=value_scale)
    # Triton and FlashInfer may not be installed.
    if implementation == "torch":
        from vllm_magicdec.attention import torch_attention

        return torch_attention.attend(query, rows, slots, lens, **options)
    if implementation == "triton":
        from vllm_magicdec.attention import triton_attention

        return triton_attention.attend(query, rows, slots, lens, **options)
    if implementation == "flashinfer":
        from vllm_magicdec.attention import flashinfer_attention

        return flashinfer_attention.attend(query, rows, slots, lens, **options)
    raise ValueError(f"unknown draft attention {implementation!r}; use torch, triton or flashinfer")
