# SPDX-License-Identifier: Apache-2.0
"""Copies of what was chosen for a request, for as long as the choice stays.

A choice is made when a prompt ends and read in every step from then on. On CPUs vLLM keeps a block's keys
transposed, so that reading a few of its tokens takes what reading all of them does. Copied, one after the
other, they are read at the price of so many tokens of a context. K/V of verified tokens does not change
while their request runs; when it is not in a round, its copy goes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_magicdec.views.base import ceil_div
from vllm_magicdec.views.selections import Selections


@dataclass(frozen=True)
class LayerCopies:
    """One layer's part of `CopiedTokens`."""

    pages: torch.Tensor  # [num_pages, num_kv_heads, page_size, 2 * head_size], laid out as its KV cache
    firsts: torch.Tensor  # see `CopiedTokens`
    counts: torch.Tensor


@dataclass(frozen=True)
class CopiedTokens:
    """Of each request the first columns of its lists in a token view, which may be read here instead.

    They are the same tokens in another order. So every query token has to see all of them, as it does:
    what was chosen and the sinks are in view in every step of a round.
    """

    pages: Sequence[torch.Tensor]  # by layer, see `LayerCopies`
    firsts: torch.Tensor  # [num_reqs] int32, a request's first page; its others follow
    counts: torch.Tensor  # [num_reqs] int32, columns; 0: it has no copy

    def of_layer(self, index: int) -> LayerCopies:
        """One layer's."""
        return LayerCopies(self.pages[index], self.firsts, self.counts)

    def of_requests(self, places: torch.Tensor) -> "CopiedTokens":
        """Those at `places` [n] int64 in the batch."""
        return CopiedTokens(self.pages, self.firsts[places], self.counts[places])


class CopyPages(Protocol):
    """Pages for copies, of all layers of a view; see `attention.copies`."""

    @property
    def pages(self) -> Sequence[torch.Tensor]:
        """By layer, [num_pages, num_kv_heads, page_size, 2 * head_size], laid out as its KV cache."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that they take at most, beside a KV cache of this size."""
        ...

    def write(self, first: int, slots: torch.Tensor) -> None:
        """Copy tokens of every layer and KV head.

        Args:
            first: page that the first one goes to.
            slots: [num_layers, num_kv_heads, n] int, where they are; n fills whole pages.
        """
        ...


class TokenCopies:
    """Keeps copies of the selections of a batch's requests; of as many requests as there is room for.

    Args:
        selections: of tokens.
        num_sinks: tokens at the start of a context, which every view has; they are copied as well.
        pages: for the copies.
    """

    def __init__(self, selections: Selections, num_sinks: int, pages: CopyPages) -> None:
        self._selections, self._pages = selections, pages
        num_pages, _, self._page_size, _ = pages.pages[0].shape
        self._sinks = torch.arange(num_sinks)
        each = pages_of_copy(selections, num_sinks, self._page_size)
        self._free = [n * each for n in range(num_pages // each)]
        self._firsts: dict[str, int] = {}
        self._versions: dict[str, int] = {}  # of the selections that the copies are of

    @property
    def num_bytes(self) -> int:
        """See `CopyPages`."""
        return self._pages.num_bytes

    def prepare(
        self, req_ids: Sequence[str], counts: torch.Tensor, block_table: torch.Tensor
    ) -> CopiedTokens | None:
        """Copy what has been chosen since the last round; None: no request has a copy.

        Args:
            req_ids: of the batch.
            counts: [num_reqs] int64, how many of the selected tokens are in view; 0: nothing is read here.
            block_table: [num_reqs, n] int32.
        """
        # Their K/V may be computed anew, by other weights or of other tokens.
        for gone in self._firsts.keys() - set(req_ids):
            self._free.append(self._firsts.pop(gone))
            self._versions.pop(gone, None)
        firsts = [
            self._first_page(req_id, block_table[index]) if count else -1
            for index, (req_id, count) in enumerate(zip(req_ids, counts.tolist(), strict=True))
        ]
        if max(firsts, default=-1) < 0:
            return None
        found = torch.tensor(firsts, dtype=torch.int32)
        columns = (len(self._sinks) + counts).to(torch.int32).masked_fill(found < 0, 0)
        return CopiedTokens(self._pages.pages, found.clamp(min=0), columns)

    def _first_page(self, req_id: str, blocks: torch.Tensor) -> int:
        """Of a request's copy, which is made if there is none yet and room; -1: there is none."""
        version = self._selections.version(req_id)
        if version is None:
            return -1
        if req_id not in self._firsts:
            if not self._free:
                return -1
            self._firsts[req_id] = self._free.pop()
        if self._versions.get(req_id) != version:
            self._copy(req_id, blocks)
            self._versions[req_id] = version
        return self._firsts[req_id]

    def _copy(self, req_id: str, blocks: torch.Tensor) -> None:
        row = self._selections.row(req_id)
        chosen = self._selections.positions[row, ..., : int(self._selections.counts[row])].long()
        # Sinks first: so they and the best of the selection are neighbours, however many are in view.
        chosen = torch.cat([self._sinks.expand(*chosen.shape[:2], -1), chosen], dim=-1)
        # The last page's rest is read by nobody, and any token does.
        rest = ceil_div(chosen.shape[-1], self._page_size) * self._page_size - chosen.shape[-1]
        chosen = torch.cat([chosen, chosen[..., :1].expand(*chosen.shape[:2], rest)], dim=-1)
        slots = blocks[chosen // self._page_size] * self._page_size + chosen % self._page_size
        self._pages.write(self._firsts[req_id], slots)


def pages_of_copy(selections: Selections, num_sinks: int, page_size: int) -> int:
    """Pages that the copy of one request's selection takes, with its sinks."""
    return max(1, ceil_div(num_sinks + selections.positions.shape[-1], page_size))
