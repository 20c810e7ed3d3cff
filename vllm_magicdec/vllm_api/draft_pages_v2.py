# SPDX-License-Identifier: Apache-2.0
"""Pages of a draft model's KV cache on the V2 runner.

Either the target's block tables are shared, or each request has a ring of pages. The tokens of a context
that a cache keeps are its *entries*: all tokens, or those of the sinks and the window. Only the device
knows the exact context lengths.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_magicdec.views.rings import RingTable
from vllm_magicdec.views.tensors import ceil_div
from vllm_magicdec.vllm_api.ring_cache import RingLayout


class DraftPages(ABC):
    """The KV cache of a draft model."""

    reads_whole_prompts: bool
    """Whether the draft computes every token of a prompt, following the target's chunks."""

    def tables(self, block_tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Map vLLM's block tables to the draft's, [num_reqs, max_pages] int32 each, by KV-cache group."""
        return list(block_tables)

    @abstractmethod
    def max_entries(self, num_tokens: np.ndarray) -> np.ndarray:
        """Return upper bounds on the numbers of entries of such contexts; both [num_reqs] int64."""

    @abstractmethod
    def gaps(self, context_lens: torch.Tensor) -> torch.Tensor:
        """Return the number of tokens after the sinks that are not kept; both [num_reqs] int64."""

    @abstractmethod
    def positions(self, entries: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
        """Return the positions of `entries` in contexts with these `gaps`; all [num_entries] int64."""

    @abstractmethod
    def tables_of_entries(
        self, tables: Sequence[torch.Tensor], indices: torch.Tensor, gaps: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return tables of all entries of some requests, [num_indices, max_pages] by KV-cache group."""


class SharedPages(DraftPages):
    """Pages of the target's block tables, which outlive requests in the prefix cache."""

    reads_whole_prompts = True

    @override
    def max_entries(self, num_tokens: np.ndarray) -> np.ndarray:
        return num_tokens

    @override
    def gaps(self, context_lens: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(context_lens)

    @override
    def positions(self, entries: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
        return entries

    @override
    def tables_of_entries(
        self, tables: Sequence[torch.Tensor], indices: torch.Tensor, gaps: torch.Tensor
    ) -> list[torch.Tensor]:
        return [table[indices] for table in tables]


class RingPages(DraftPages):
    """One ring of pages per request, freed with it.

    When a prompt is complete, one pass computes its sinks and latest tokens, all that the first round
    shows. So the draft need not follow the prompt's chunks or prefix-cache hits.
    """

    reads_whole_prompts = False

    def __init__(
        self, kv_cache_group: int, layout: RingLayout, max_model_len: int, device: torch.device
    ) -> None:
        self._number, self._ring = kv_cache_group, layout.spec.ring
        max_pages = ceil_div(max_model_len, self._ring.page_size)
        self._table = RingTable.of(self._ring, max_pages, layout.rows, layout.step, device)
        self._pages_kept = self._ring.sink_pages + self._ring.window_pages

    @override
    def tables(self, block_tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        tables = list(block_tables)
        tables[self._number] = self._table.pages(tables[self._number])
        return tables

    @override
    def max_entries(self, num_tokens: np.ndarray) -> np.ndarray:
        return np.minimum(num_tokens, self._pages_kept * self._ring.page_size)

    @override
    def gaps(self, context_lens: torch.Tensor) -> torch.Tensor:
        size = self._ring.page_size
        first_page = context_lens // size + 1 - self._ring.window_pages
        return (first_page - self._ring.sink_pages).clamp(min=0) * size

    @override
    def positions(self, entries: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
        return entries + gaps.masked_fill(entries < self._ring.sink_pages * self._ring.page_size, 0)

    @override
    def tables_of_entries(
        self, tables: Sequence[torch.Tensor], indices: torch.Tensor, gaps: torch.Tensor
    ) -> list[torch.Tensor]:
        pages = torch.arange(self._pages_kept, device=gaps.device).expand(len(indices), -1)
        gap_pages = (gaps // self._ring.page_size).unsqueeze(1)
        pages = pages + torch.where(pages < self._ring.sink_pages, 0, gap_pages)
        own = tables[self._number]
        of_entries = [table[indices] for table in tables]
        of_entries[self._number] = own[indices.unsqueeze(1), pages.clamp(max=own.shape[1] - 1)]
        return of_entries


def find_pages(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_cache_group: int, device: torch.device
) -> DraftPages:
    """Create the pages of the draft's layers; `kv_cache_group` is that of its layers without a window."""
    layout = RingLayout.bound(vllm_config, kv_cache_config, kv_cache_group)
    if layout is None:
        return SharedPages()
    return RingPages(kv_cache_group, layout, vllm_config.model_config.max_model_len, device)
