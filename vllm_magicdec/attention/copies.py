# SPDX-License-Identifier: Apache-2.0
"""Pages for copies of chosen tokens, beside vLLM's KV cache and laid out as it is."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_magicdec.attention.native_attention import native_of
from vllm_magicdec.attention.rows import KVRows
from vllm_magicdec.attention.scales import stored_dtype
from vllm_magicdec.native import huge_pages
from vllm_magicdec.views.base import ceil_div

# They take at most a sixteenth of what the KV cache does: a choice is a small part of a long context, and
# of requests that find no room the tokens are read where they are.
CACHE_TO_COPIES = 16


class CopiedPages:
    """See `views.copies.CopyPages`.

    Args:
        layers: vLLM's attention layers, in the order of the view's; () where only memory is asked for.
        num_layers: of the view.
        spec: of their KV cache.
        dtype: of its elements.
        num_blocks: pages of the KV cache.
        each: pages of a request's copy; there are those of whole copies.
        max_num_reqs: copies that can be of use.
        device: where they are.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_layers: int,
        spec: AttentionSpec,
        dtype: torch.dtype,
        *,
        num_blocks: int,
        each: int,
        max_num_reqs: int,
        device: torch.device,
    ) -> None:
        self._layers, self._dtype = layers, dtype
        num_copies = min(max_num_reqs, num_blocks // CACHE_TO_COPIES // each)
        page_shape = (spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
        memory = torch.zeros((num_layers, num_copies * each, *page_shape), dtype=dtype, device=device)
        if device.type == "cpu" and memory.numel() and huge_pages.on_demand():
            huge_pages.move_to_huge_pages(memory)
        self.pages = memory.unbind(0)
        """By layer, [num_copies * each, num_kv_heads, page_size, 2 * head_size]."""
        page_bytes = num_layers * torch.Size(page_shape).numel() * dtype.itemsize
        # Not in whole copies: what a single block of the cache comes with is asked for, too.
        self.num_bytes = min(
            max_num_reqs * each * page_bytes, ceil_div(num_blocks * page_bytes, CACHE_TO_COPIES)
        )

    def write(self, first: int, slots: torch.Tensor) -> None:
        """See `views.copies.CopyPages`."""
        for layer, pages, of_layer in zip(self._layers, self.pages, slots, strict=True):
            own = self._rows(layer, pages[first : first + of_layer.shape[-1] // pages.shape[2]])
            own.fill(*self._rows(layer, layer.kv_cache).gather(of_layer))

    def _rows(self, layer: Any, pages: torch.Tensor) -> KVRows:
        return KVRows.of(pages, layer.attn_backend.get_name(), layer.isa, self._dtype)


def no_copied_pages(each: int) -> None:
    """Instead of `make_copied_pages` where there is nothing to gain."""


def make_copied_pages(
    vllm_config: VllmConfig,
    layer_names: Sequence[str],
    spec: AttentionSpec,
    each: int,
    *,
    num_blocks: int,
    device: torch.device,
) -> CopiedPages | None:
    """Pages for copies; None: there is no room for one, or a layer's attention is not the plugin's own.

    Args:
        vllm_config: the engine's.
        layer_names: of the view's layers.
        spec: see `CopiedPages`.
        each: see there.
        num_blocks: see there.
        device: see there.
    """
    found = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    layers = [found[name] for name in layer_names]
    if any(native_of(layer.impl) is None for layer in layers) or num_blocks // CACHE_TO_COPIES < each:
        return None
    return CopiedPages(
        layers,
        len(layers),
        spec,
        stored_dtype(spec, vllm_config.cache_config.cache_dtype),
        num_blocks=num_blocks,
        each=each,
        max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
        device=device,
    )
