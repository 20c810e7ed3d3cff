# SPDX-License-Identifier: Apache-2.0
"""Draft attention over token-granular views: each request and KV head has its own list of cache slots.

| file | what it does |
| --- | --- |
| `rows.py` | a layer's paged cache, whatever its layout, as numbered rows |
| `softmax.py` | how a layer makes weights of products: scale, soft cap, learned sinks |
| `scales.py` | what quantised queries, keys and values are to be multiplied by |
| `torch_attention.py` | gather and softmax in float32; the truth, and the CPU's implementation |
| `triton_attention.py` | one kernel that reads through the cache's strides |
| `flashinfer_attention.py` | FlashInfer's paged decode over rows, planned once for all layers |
| `triton_indices.py` | the row numbers that it reads, written by one kernel |
| `plans.py` | its plans for views whose length the host knows |
| `metadata.py` | a view as the forward context wants it, layer by layer |
| `native_attention.py` | the kernel of `native/` inside vLLM's layers, on CPUs |
| `observing.py` | who looks at the target's queries |
| `switch.py` | draft attention inside vLLM's layers |
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
        query: [num_reqs, num_heads, head_size]; the heads of one KV head are neighbours.
        rows: the layer's cache.
        slots: [num_reqs, num_kv_heads, budget] int32; the first `lens` columns are read.
        lens: [num_reqs] int32, each from 1 to the budget.
        scale: multiplies the logits; of an fp8 cache, times the scale of its keys.
        soft_cap: above 0, logits become `soft_cap * tanh(logits / soft_cap)`.
        sinks: [num_heads], logits that take part in the softmax's denominator and have no value.
        value_scale: of an fp8 cache, the scale of its values.
        implementation: "flashinfer" plans anew at each call and waits for `lens`; a draft loop keeps a
            `flashinfer_attention.FlashInferDecode` and plans when the lengths change.

    Returns:
        [num_reqs, num_heads, head_size] in the query's dtype, accumulated in float32.

    Raises:
        ValueError: the implementation cannot read this cache's layout, or is not known.
    """
    options: dict[str, Any] = dict(scale=scale, soft_cap=soft_cap, sinks=sinks, value_scale=value_scale)
    # Triton and FlashInfer need not be installed where they are not used.
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
