# SPDX-License-Identifier: Apache-2.0
"""Pages of a draft model's KV cache on the V1 runner, and the tokens that they hold.

Either the target's block tables are shared, or each request has a ring of pages.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_magicdec.drafting.held_rings import HeldRings
from vllm_magicdec.drafting.held_tokens import HeldTokens
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.views.rings import RingTable
from vllm_magicdec.views.round import Batch
from vllm_magicdec.views.tensors import ceil_div, on_device
from vllm_magicdec.vllm_api.ring_cache import RingLayout


class DraftPages(ABC):
    """The KV cache of a draft model.

    Args:
        runner: the target's model runner.
        groups: the draft's layers; layers without a window come first.
    """

    reads_whole_prompts: bool
    """Whether the draft computes every token of a prompt, following the target's chunks."""

    def __init__(self, runner: Any, groups: Sequence[LayerGroup]) -> None:
        self._runner = runner
        self._groups = groups
        self.page_size = groups[0].cache.block_size

    def _table(self, group: LayerGroup) -> Any:
        # Looked up each time: vLLM replaces its block tables once the KV cache is allocated.
        return self._runner.input_batch.block_table.block_tables[group.kv_cache_group]

    def begin_step(self, req_ids: Sequence[str]) -> None:  # noqa: B027
        """Follow a step of the target with these requests, in batch order."""

    @abstractmethod
    def forget(self, index: int, first: int, end: int) -> None:
        """Invalidate tokens `first` to `end` of request `index` of the batch: the target writes them."""

    @abstractmethod
    def add(self, index: int, first: int, end: int) -> None:
        """Record that the draft has the K/V of the request's tokens `first` to `end`, and of all before."""

    @abstractmethod
    def add_read(self, index: int, first: int, end: int, num_tokens: int) -> None:
        """Record a catch-up pass over lacking tokens `first` to `end` of the first `num_tokens`."""

    def write_over(self, index: int, end: int) -> None:  # noqa: B027
        """Announce that a round's passes may write the request's tokens up to `end`."""

    @abstractmethod
    def lacking(self, index: int, num_tokens: int) -> np.ndarray:
        """Return the positions of `entries` that the cache lacks, [num_lacking] int64, the last ones."""

    @abstractmethod
    def entries(self, num_tokens: int) -> np.ndarray:
        """Return which of a request's first `num_tokens` positions to cache, [num_entries] int64."""

    @abstractmethod
    def pages(self, indices: int | np.ndarray, pages: np.ndarray, group: LayerGroup) -> np.ndarray:
        """Map page numbers within requests to pages of the KV cache; both [num_pages] int64.

        Args:
            indices: index of the request in the batch, or one per page, [num_pages] int64.
            pages: page numbers within the request.
            group: layer group.
        """

    def page_of(self, index: int, position: int) -> int:
        """Return the KV-cache page of one position of a request."""
        return int(self.pages(index, np.array([position // self.page_size]), self._groups[0])[0])

    def tables(self, block_tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Map vLLM's block tables to the draft's, [num_reqs, max_pages] int32 each, by KV-cache group."""
        return list(block_tables)

    @abstractmethod
    def tables_of(
        self, batch: Batch, indices: Sequence[int], num_tokens: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return page tables of `entries(num_tokens)`, [num_indices, max_pages] int32 by layer group."""


class SharedPages(DraftPages):
    """Pages of the target's block tables, which outlive requests in the prefix cache."""

    reads_whole_prompts = True

    def __init__(self, runner: Any, groups: Sequence[LayerGroup], num_blocks: int) -> None:
        super().__init__(runner, groups)
        self._held = HeldTokens(num_blocks, self.page_size)

    @override
    def forget(self, index: int, first: int, end: int) -> None:
        self._held.forget(self._row(index), first, end)

    @override
    def add(self, index: int, first: int, end: int) -> None:
        self._held.add(self._row(index), first, end)

    @override
    def add_read(self, index: int, first: int, end: int, num_tokens: int) -> None:
        self.add(index, first, end)

    @override
    def lacking(self, index: int, num_tokens: int) -> np.ndarray:
        return np.arange(self._held.first_lacking(self._row(index), num_tokens), num_tokens)

    @override
    def entries(self, num_tokens: int) -> np.ndarray:
        return np.arange(num_tokens)

    @override
    def pages(self, indices: int | np.ndarray, pages: np.ndarray, group: LayerGroup) -> np.ndarray:
        return self._table(group).block_table.np[indices, pages].astype(np.int64)

    @override
    def tables_of(
        self, batch: Batch, indices: Sequence[int], num_tokens: Sequence[int]
    ) -> list[torch.Tensor]:
        rows = on_device(indices, batch.context_lens.device)
        return [batch.block_tables[group.kv_cache_group][rows] for group in self._groups]

    def _row(self, index: int) -> np.ndarray:
        return self._table(self._groups[0]).block_table.np[index]


class RingPages(DraftPages):
    """One ring of pages per request, freed with it.

    When a prompt is complete, one pass computes its sinks and latest tokens, all that the first round
    shows. So the draft need not follow the prompt's chunks or prefix-cache hits. There is one layer group.
    """

    reads_whole_prompts = False

    def __init__(
        self,
        runner: Any,
        groups: Sequence[LayerGroup],
        layout: RingLayout,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        super().__init__(runner, groups)
        (self._group,) = groups
        self._ring, self._rows, self._step = layout.spec.ring, np.array(layout.rows), layout.step
        self._held = HeldRings(self._ring)
        max_pages = ceil_div(max_model_len, self.page_size)
        self._ring_table = RingTable.of(self._ring, max_pages, layout.rows, layout.step, device)

    @override
    def begin_step(self, req_ids: Sequence[str]) -> None:
        table = self._table(self._group)
        numbers = table.num_blocks_per_row[: len(req_ids)].tolist()
        rows = zip(table.block_table.np, numbers, strict=False)
        self._held.begin_step(req_ids, [row[:number] for row, number in rows])

    @override
    def forget(self, index: int, first: int, end: int) -> None:
        self._held.forget(index, first)

    @override
    def add(self, index: int, first: int, end: int) -> None:
        self._held.add(index, first, end)

    @override
    def add_read(self, index: int, first: int, end: int, num_tokens: int) -> None:
        self._held.add_entries(index, num_tokens, end)

    @override
    def write_over(self, index: int, end: int) -> None:
        self._held.write_over(index, end)

    @override
    def lacking(self, index: int, num_tokens: int) -> np.ndarray:
        return self._held.lacking(index, num_tokens)

    @override
    def entries(self, num_tokens: int) -> np.ndarray:
        return self._ring.entries(num_tokens)

    @override
    def pages(self, indices: int | np.ndarray, pages: np.ndarray, group: LayerGroup) -> np.ndarray:
        columns, rows = np.divmod(self._ring.indices(pages), len(self._rows))
        blocks = self._table(group).block_table.np[indices, columns].astype(np.int64)
        return blocks * self._step + self._rows[rows]

    @override
    def tables(self, block_tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        tables = list(block_tables)
        tables[self._group.kv_cache_group] = self._ring_table.pages(tables[self._group.kv_cache_group])
        return tables

    @override
    def tables_of(
        self, batch: Batch, indices: Sequence[int], num_tokens: Sequence[int]
    ) -> list[torch.Tensor]:
        table = np.zeros((len(indices), self._ring.num_pages), dtype=np.int64)
        for row, index, number in zip(table, indices, num_tokens, strict=True):
            pages = np.unique(self._ring.entries(number) // self.page_size)
            row[: len(pages)] = self.pages(index, pages, self._group)
        return [on_device(table, batch.context_lens.device).to(torch.int32)]


def find_pages(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    runner: Any,
    groups: Sequence[LayerGroup],
    device: torch.device,
) -> DraftPages:
    """Create the pages of the draft's layers, rings if the KV cache has them."""
    number = groups[0].kv_cache_group
    layout = RingLayout.bound(vllm_config, kv_cache_config, number)
    if layout is None:
        return SharedPages(runner, groups, kv_cache_config.num_blocks)
    # vLLM's runner would build metadata for that group in every step of the target.
    runner.attn_groups[number] = []
    return RingPages(runner, groups, layout, vllm_config.model_config.max_model_len, device)
