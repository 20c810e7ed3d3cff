# SPDX-License-Identifier: Apache-2.0
"""A cache that keeps of each request what views of sinks and a window read, and nothing between.

Pages are numbered within a request, and a view is a list of them. So a ring changes nothing but where a
page is: the sinks stay where they are, the others share as many places as there can be latest ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_magicdec.views.base import ceil_div
from vllm_magicdec.views.pages import PageBudget


@dataclass(frozen=True)
class Ring:
    """Which pages of a request are kept, and where."""

    page_size: int  # tokens
    sink_pages: int
    window_pages: int  # the latest ones that a view may show, beside the sinks
    spare_pages: int  # beyond these: what a round wrote ahead and the next one does not show

    @classmethod
    def of(cls, budget: PageBudget, num_speculative_tokens: int) -> "Ring":
        """The one that views of this budget can be read from.

        Args:
            budget: of sinks and latest pages.
            num_speculative_tokens: drafts of a round, at most.
        """
        sinks, page_size = budget.sink_pages, budget.page_size
        window = budget.max_pages - sinks
        # A view ends with the page of the round's last draft, and the next one may end before it.
        return cls(page_size, sinks, window, ceil_div(num_speculative_tokens - 1, page_size))

    @property
    def num_pages(self) -> int:
        """Of a request, at most."""
        return self.sink_pages + self._turning_pages

    @property
    def _turning_pages(self) -> int:
        return self.window_pages + self.spare_pages

    def places(self, pages: np.ndarray) -> np.ndarray:
        """Where the request's `pages` are, from 0 to `num_pages` less one; both of any shape, int64."""
        turning = self.sink_pages + (pages - self.sink_pages) % self._turning_pages
        return np.where(pages < self.sink_pages, pages, turning)

    def first_seen(self, num_tokens: int) -> int:
        """The first position after the sinks that a round after `num_tokens` verified tokens may show."""
        return max(self.sink_pages, num_tokens // self.page_size + 1 - self.window_pages) * self.page_size

    def first_left(self, num_written: int) -> int:
        """The first position after the sinks that is left when `num_written` tokens have been written."""
        last = (num_written - 1) // self.page_size
        return max(self.sink_pages, last + 1 - self._turning_pages) * self.page_size

    def entries(self, num_tokens: int) -> np.ndarray:
        """[num_entries] int64, positions before `num_tokens` that the round after them may show."""
        sinks, first = self.sink_pages * self.page_size, self.first_seen(num_tokens)
        return np.concatenate(
            [np.arange(min(sinks, num_tokens)), np.arange(min(first, num_tokens), num_tokens)]
        )


@dataclass(frozen=True)
class RingTable:
    """Block tables of rings, some of whose pages may share a block, as block tables of pages.

    Args:
        blocks: [max_pages] int64, the column of a request's block table in which each of its pages is.
        offsets: [max_pages] int32, the place of each page in that block, in pages of the cache.
        step: pages of the cache from one block to the next.
    """

    blocks: torch.Tensor
    offsets: torch.Tensor
    step: int

    @classmethod
    def of(
        cls, ring: Ring, max_pages: int, rows: Sequence[int], step: int, device: torch.device
    ) -> "RingTable":
        """The table of requests of up to `max_pages` pages.

        Args:
            ring: of each request.
            max_pages: columns.
            rows: places of the pages of one block, in pages of the cache.
            step: see `RingTable`.
            device: where the tables are.
        """
        places = ring.places(np.arange(max_pages))
        offsets = np.array(rows)[places % len(rows)]
        return cls(
            torch.from_numpy(places // len(rows)).to(device),
            torch.from_numpy(offsets).to(torch.int32).to(device),
            step,
        )

    def pages(self, block_table: torch.Tensor) -> torch.Tensor:
        """[num_reqs, max_pages] int32, the cache's page of every page of the requests.

        Args:
            block_table: [num_reqs, max_blocks] int32.
        """
        return block_table[:, self.blocks] * self.step + self.offsets
