# SPDX-License-Identifier: Apache-2.0
"""Where a draft model's KV cache has a request's tokens, and which of them it holds, on the V1 runner.

In pages beside the target's, of the same block tables, or in rings of each request's own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_magicdec.drafting.held_rings import HeldRings
from vllm_magicdec.drafting.held_tokens import HeldTokens
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.views.base import Batch, ceil_div, on_device
from vllm_magicdec.views.rings import RingTable
from vllm_magicdec.vllm_api.ring_cache import RingLayout


class DraftPages(ABC):
    """The KV cache of a draft model.

    Args:
        runner: vLLM's, of the target.
        groups: the draft's layers, those first that see the whole context.
    """

    reads_whole_prompts: bool
    """Whether every token of a prompt is read, when the target has."""

    def __init__(self, runner: Any, groups: Sequence[LayerGroup]) -> None:
        self._runner = runner
        self._groups = groups
        self.page_size = groups[0].cache.block_size

    def _table(self, group: LayerGroup) -> Any:
        """vLLM's block table of a group; it makes others when the KV cache has been laid out."""
        return self._runner.input_batch.block_table.block_tables[group.kv_cache_group]

    def begin_step(self, req_ids: Sequence[str]) -> None:  # noqa: B027
        """The target has taken a step with these requests, in the batch's order."""

    @abstractmethod
    def forget(self, index: int, first: int, end: int) -> None:
        """The target writes the tokens from `first` up to `end` of the request at `index` of the batch."""

    @abstractmethod
    def add(self, index: int, first: int, end: int) -> None:
        """The draft has K/V of the request's tokens from `first` up to `end`, and of those before."""

    @abstractmethod
    def add_read(self, index: int, first: int, end: int, num_tokens: int) -> None:
        """It has read these of the tokens that it lacked of the first `num_tokens`, and those before."""

    def write_over(self, index: int, end: int) -> None:  # noqa: B027
        """A round's passes may write the request's tokens up to `end`."""

    @abstractmethod
    def lacking(self, index: int, num_tokens: int) -> np.ndarray:
        """[num_lacking] int64, positions of the first `num_tokens` that the draft should have and has not.

        They are the last ones of `entries`.
        """

    @abstractmethod
    def entries(self, num_tokens: int) -> np.ndarray:
        """[num_entries] int64, positions of a request's first `num_tokens` that the draft should have."""

    @abstractmethod
    def pages(self, indices: int | np.ndarray, pages: np.ndarray, group: LayerGroup) -> np.ndarray:
        """The cache's pages of `pages` of requests; both [num_pages] int64.

        Args:
            indices: of the request in the batch, or [num_pages] int64 of each page's.
            pages: numbers within the request.
            group: of layers.
        """

    def page_of(self, index: int, position: int) -> int:
        """The page of one position of a request."""
        return int(self.pages(index, np.array([position // self.page_size]), self._groups[0])[0])

    def tables(self, block_tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[num_reqs, max_pages] int32 each by KV-cache group, the draft's pages where it has layers there.

        Args:
            block_tables: vLLM's, [num_reqs, max_blocks] int32 each.
        """
        return list(block_tables)

    @abstractmethod
    def tables_of(
        self, batch: Batch, indices: Sequence[int], num_tokens: Sequence[int]
    ) -> list[torch.Tensor]:
        """[num_indices, max_pages] int32 by group of layers: the pages of `entries` of some requests.

        Args:
            batch: the round's requests.
            indices: places in it.
            num_tokens: that `entries` are of, of each.
        """


class SharedPages(DraftPages):
    """Pages of the target's own block tables, which outlive requests in the prefix cache.

    Args:
        runner: see `DraftPages`.
        groups: see `DraftPages`.
        num_blocks: of the KV cache.
    """

    reads_whole_prompts = True

    def __init__(self, runner: Any, groups: Sequence[LayerGroup], num_blocks: int) -> None:
        super().__init__(runner, groups)
        self._held = HeldTokens(num_blocks, self.page_size)

    def forget(self, index: int, first: int, end: int) -> None:
        """See `DraftPages`."""
        self._held.forget(self._row(index), first, end)

    def add(self, index: int, first: int, end: int) -> None:
        """See `DraftPages`."""
        self._held.add(self._row(index), first, end)

    def add_read(self, index: int, first: int, end: int, num_tokens: int) -> None:
        """See `DraftPages`."""
        self.add(index, first, end)

    def lacking(self, index: int, num_tokens: int) -> np.ndarray:
        """See `DraftPages`."""
        return np.arange(self._held.first_lacking(self._row(index), num_tokens), num_tokens)

    def entries(self, num_tokens: int) -> np.ndarray:
        """See `DraftPages`; all of them."""
        return np.arange(num_tokens)

    def pages(self, indices: int | np.ndarray, pages: np.ndarray, group: LayerGroup) -> np.ndarray:
        """See `DraftPages`."""
        return self._table(group).block_table.np[indices, pages].astype(np.int64)

    def tables_of(
        self, batch: Batch, indices: Sequence[int], num_tokens: Sequence[int]
    ) -> list[torch.Tensor]:
        """See `DraftPages`."""
        places = on_device(indices, batch.context_lens.device)
        return [batch.block_tables[group.kv_cache_group][places] for group in self._groups]

    def _row(self, index: int) -> np.ndarray:
        return self._table(self._groups[0]).block_table.np[index]


class RingPages(DraftPages):
    """A ring of each request's own, which ends with it.

    Of a prompt nothing is read but what the first round shows: its sinks and its latest tokens, in one pass
    when it is whole. So neither its chunks nor what came from the prefix cache have to be followed.

    Args:
        runner: see `DraftPages`.
        groups: see `DraftPages`; one.
        layout: where the rings' pages are.
        max_model_len: tokens.
        device: where the draft runs.
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

    def begin_step(self, req_ids: Sequence[str]) -> None:
        """See `DraftPages`."""
        table = self._table(self._group)
        numbers = table.num_blocks_per_row[: len(req_ids)].tolist()
        rows = zip(table.block_table.np, numbers, strict=False)
        self._held.begin_step(req_ids, [row[:number] for row, number in rows])

    def forget(self, index: int, first: int, end: int) -> None:
        """See `DraftPages`."""
        self._held.forget(index, first)

    def add(self, index: int, first: int, end: int) -> None:
        """See `DraftPages`."""
        self._held.add(index, first, end)

    def add_read(self, index: int, first: int, end: int, num_tokens: int) -> None:
        """See `DraftPages`."""
        self._held.add_entries(index, num_tokens, end)

    def write_over(self, index: int, end: int) -> None:
        """See `DraftPages`."""
        self._held.write_over(index, end)

    def lacking(self, index: int, num_tokens: int) -> np.ndarray:
        """See `DraftPages`."""
        return self._held.lacking(index, num_tokens)

    def entries(self, num_tokens: int) -> np.ndarray:
        """See `DraftPages`."""
        return self._ring.entries(num_tokens)

    def pages(self, indices: int | np.ndarray, pages: np.ndarray, group: LayerGroup) -> np.ndarray:
        """See `DraftPages`."""
        columns, rows = np.divmod(self._ring.indices(pages), len(self._rows))
        blocks = self._table(group).block_table.np[indices, columns].astype(np.int64)
        return blocks * self._step + self._rows[rows]

    def tables(self, block_tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `DraftPages`."""
        tables = list(block_tables)
        tables[self._group.kv_cache_group] = self._ring_table.pages(tables[self._group.kv_cache_group])
        return tables

    def tables_of(
        self, batch: Batch, indices: Sequence[int], num_tokens: Sequence[int]
    ) -> list[torch.Tensor]:
        """See `DraftPages`."""
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
    """The pages of the draft's layers; vLLM's runner has no part in those of rings from here on.

    Args:
        vllm_config: the engine's.
        kv_cache_config: of all layers.
        runner: vLLM's, of the target.
        groups: the draft's layers.
        device: where the draft runs.
    """
    number = groups[0].kv_cache_group
    layout = RingLayout.bound(vllm_config, kv_cache_config, number)
    if layout is None:
        return SharedPages(runner, groups, kv_cache_config.num_blocks)
    # It would make metadata of that group in every step of the target's.
    runner.attn_groups[number] = []
    return RingPages(runner, groups, layout, vllm_config.model_config.max_model_len, device)
