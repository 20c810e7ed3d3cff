# SPDX-License-Identifier: Apache-2.0
"""Summaries of the keys of pages, from which `verify-topk` bounds their logits."""

import torch
from vllm.platforms import current_platform

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.scales import E4M3_CAPABILITY
from vllm_magicdec.policies.base import Engine


class PageSummaries:
    """Element-wise minimum and maximum of every page's keys, for all layers.

    Entries belong to pages of the cache. A request summarises all of its pages before it reads any, so it
    never reads summaries of a page's former owner.
    """

    def __init__(self, engine: Engine) -> None:
        self._page_size = engine.page_size
        shape = (engine.num_layers, engine.num_blocks, engine.num_kv_heads, engine.head_size)
        # fp8 rounds keys in the hundreds by more than logits differ.
        is_fp8 = (
            engine.limits.device_type == "cuda"
            and not engine.has_key_bias
            and current_platform.has_device_capability(E4M3_CAPABILITY)
        )
        dtype = torch.float8_e4m3fn if is_fp8 else engine.cache_dtype
        self.min_keys = torch.zeros(shape, dtype=dtype, device=engine.device)
        self.max_keys = torch.zeros_like(self.min_keys)

    def update(
        self,
        layer: int,
        rows: KVRows,
        blocks: torch.Tensor,  # [n] int64
        num_verified: torch.Tensor,  # [n] int64, tokens of each page, at least 1
    ) -> None:
        """Update the summaries of pages."""
        keys = rows.keys_by_page(blocks, self._page_size)
        # The page's first token replaces unverified ones.
        is_verified = torch.arange(keys.shape[2], device=blocks.device) < num_verified[:, None]
        keys = torch.where(is_verified[:, None, :, None], keys, keys[:, :, :1])
        self.min_keys[layer, blocks] = keys.amin(2)
        self.max_keys[layer, blocks] = keys.amax(2)

    def bounds(self, layer: int, queries: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Return upper bounds of logits, before scaling.

        Args:
            queries: [num_reqs, num_kv_heads, num_queries, head_size] float32.
            blocks: [num_reqs, num_pages] int64.

        Returns:
            [num_reqs, num_kv_heads, num_queries, num_pages] float32.
        """
        # [num_reqs, num_kv_heads, head_size, num_pages]
        min_keys = self.min_keys[layer][blocks].permute(0, 2, 3, 1).float()
        max_keys = self.max_keys[layer][blocks].permute(0, 2, 3, 1).float()
        return queries.clamp(min=0) @ max_keys + queries.clamp(max=0) @ min_keys
