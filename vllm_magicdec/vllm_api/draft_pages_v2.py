# SPDX-License-Identifier: Apache-2.0
"""Where a draft model's KV cache has a request's tokens, on the V2 runner.

In pages beside the target's, of the same block tables, or in rings of each request's own. What a cache
keeps of a context are its *entries*: all tokens, or those of the sinks and of the window. How long a
context is only the device knows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_magicdec.views.base import ceil_div
from vllm_magicdec.views.rings import RingTable
from vllm_magicdec.vllm_api.ring_cache import RingLayout


class DraftPages(ABC):
    """The KV cache of a draft model."""

    reads_whole_prompts: bool
    """Whether every token of a prompt is read, when the target has."""

    def tables(self, block_tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[num_reqs, max_pages] int32 each by KV-cache group, the draft's pages where it has layers there.

        Args:
            block_tables: vLLM's, [num_reqs, max_blocks] int32 each.
        """
        return list(block_tables)

    @abstractmethod
    def most_entries(self, num_tokens: np.ndarray) -> np.ndarray:
        """What is kept of so many tokens at most; both [num_reqs] int64."""

    @abstractmethod
    def gaps(self, context_lens: torch.Tensor) -> torch.Tensor:
        """How many tokens after the sinks are not kept; both [num_reqs] int64."""

    @abstractmethod
    def positions(self, entries: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
        """Of `entries` of contexts with such `gaps`; all [num_entries] int64."""

    @abstractmethod
    def tables_of_entries(
        self, tables: Sequence[torch.Tensor], places: torch.Tensor, gaps: torch.Tensor
    ) -> list[torch.Tensor]:
        """[num_places, max_pages] int32 by KV-cache group: the pages of all entries of some requests.

        Args:
            tables: of the batch, see `tables`.
            places: [num_places] int64, of the requests in it.
            gaps: [num_places] int64, theirs.
        """


class SharedPages(DraftPages):
    """Pages of the target's own block tables, which outlive requests in the prefix cache."""

    reads_whole_prompts = True

    def most_entries(self, num_tokens: np.ndarray) -> np.ndarray:
        """See `DraftPages`; all of them."""
        return num_tokens

    def gaps(self, context_lens: torch.Tensor) -> torch.Tensor:
        """See `DraftPages`."""
        return torch.zeros_like(context_lens)

    def positions(self, entries: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
        """See `DraftPages`."""
        return entries

    def tables_of_entries(
        self, tables: Sequence[torch.Tensor], places: torch.Tensor, gaps: torch.Tensor
    ) -> list[torch.Tensor]:
        """See `DraftPages`."""
        return [table[places] for table in tables]


class RingPages(DraftPages):
    """A ring of each request's own, which ends with it.

    Of a prompt nothing is read but what the first round shows: its sinks and its latest tokens, in one pass
    when it is whole. So neither its chunks nor what came from the prefix cache have to be followed.

    Args:
        kv_cache_group: of the draft's layers.
        layout: where the rings' pages are.
        max_model_len: tokens.
        device: where the draft runs.
    """

    reads_whole_prompts = False

    def __init__(
        self, kv_cache_group: int, layout: RingLayout, max_model_len: int, device: torch.device
    ) -> None:
        self._number, self._ring = kv_cache_group, layout.spec.ring
        max_pages = ceil_div(max_model_len, self._ring.page_size)
        self._table = RingTable.of(self._ring, max_pages, layout.rows, layout.step, device)
        self._pages_kept = self._ring.sink_pages + self._ring.window_pages

    def tables(self, block_tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `DraftPages`."""
        tables = list(block_tables)
        tables[self._number] = self._table.pages(tables[self._number])
        return tables

    def most_entries(self, num_tokens: np.ndarray) -> np.ndarray:
        """See `DraftPages`."""
        return np.minimum(num_tokens, self._pages_kept * self._ring.page_size)

    def gaps(self, context_lens: torch.Tensor) -> torch.Tensor:
        """See `DraftPages`."""
        size = self._ring.page_size
        first_page = context_lens // size + 1 - self._ring.window_pages
        return (first_page - self._ring.sink_pages).clamp(min=0) * size

    def positions(self, entries: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
        """See `DraftPages`."""
        return entries + gaps.masked_fill(entries < self._ring.sink_pages * self._ring.page_size, 0)

    def tables_of_entries(
        self, tables: Sequence[torch.Tensor], places: torch.Tensor, gaps: torch.Tensor
    ) -> list[torch.Tensor]:
        """See `DraftPages`."""
        pages = torch.arange(self._pages_kept, device=gaps.device).expand(len(places), -1)
        gap_pages = (gaps // self._ring.page_size).unsqueeze(1)
        pages = pages + torch.where(pages < self._ring.sink_pages, 0, gap_pages)
        own = tables[self._number]
        of_entries = [table[places] for table in tables]
        of_entries[self._number] = own[places.unsqueeze(1), pages.clamp(max=own.shape[1] - 1)]
        return of_entries


def find_pages(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_cache_group: int, device: torch.device
) -> DraftPages:
    """The pages of the draft's layers.

    Args:
        vllm_config: the engine's.
        kv_cache_config: of all layers.
        kv_cache_group: of those of the draft's that see the whole context.
        device: where the draft runs.
    """
    layout = RingLayout.bound(vllm_config, kv_cache_config, kv_cache_group)
    if layout is None:
        return SharedPages()
    return RingPages(kv_cache_group, layout, vllm_config.model_config.max_model_len, device)
