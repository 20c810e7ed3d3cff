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

from vllm_magicdec.attention.rows import KVRows

__all__ = ["KVRows"]
