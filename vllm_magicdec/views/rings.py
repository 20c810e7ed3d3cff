# SPDX-License-Identifier: Apache-2.0
"""Ring caches, which keep only the sinks and the latest pages of each request.

A ring maps a request's page numbers to cache pages: sinks are fixed, the others share as many cache pages
as a view can show.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_magicdec.views.pages import PageBudget
from vllm_magicdec.views.tensors import ceil_div


@dataclass(frozen=True)
class Ring:
    """Maps the pages of a request to the pages that are kept."""

    page_size: int  # tokens
    sink_pages: int
    window_pages: int  # latest pages that a view may show in addition to the sinks
    spare_pages: int  # additional pages, for drafts that the next round does not show

    @classmethod
    def of(cls, budget: PageBudget, num_speculative_tokens: int) -> "Ring":
        """Return the ring for views of a budget of sinks and latest pages."""
        # A view ends with the page of the round's last draft, and the next one may end before it.
        spare = ceil_div(num_speculative_tokens - 1, budget.unit)
        return cls(budget.unit, budget.num_sinks, budget.max_entries - budget.num_sinks, spare)

    @property
    def num_pages(self) -> int:
        """Maximum pages of a request."""
        return self.sink_pages + self._turning_pages

    @property
    def _turning_pages(self) -> int:
        return self.window_pages + self.spare_pages

    def indices(self, pages: np.ndarray) -> np.ndarray:
        """Map the request's `pages` to indices below `num_pages`; both of any shape, int64."""
        turning = self.sink_pages + (pages - self.sink_pages) % self._turning_pages
        return np.where(pages < self.sink_pages, pages, turning)

    def first_seen(self, num_tokens: int) -> int:
        """Return the first position after the sinks that a round after `num_tokens` tokens may show."""
        return max(self.sink_pages, num_tokens // self.page_size + 1 - self.window_pages) * self.page_size

    def first_left(self, num_written: int) -> int:
        """Return the first position after the sinks that is not overwritten after `num_written` tokens."""
        last = (num_written - 1) // self.page_size
        return max(self.sink_pages, last + 1 - self._turning_pages) * self.page_size

    def entries(self, num_tokens: int) -> np.ndarray:
        """Return positions below `num_tokens` that the next round may show, [num_entries] int64."""
        sinks, first = self.sink_pages * self.page_size, self.first_seen(num_tokens)
        return np.concatenate(
            [np.arange(min(sinks, num_tokens)), np.arange(min(first, num_tokens), num_tokens)]
        )


@dataclass(frozen=True)
class RingTable:
    """Converts block tables of rings, whose pages may share blocks, to block tables of pages.

    Args:
        blocks: [max_pages] int64, the column of each page in a request's block table.
        offsets: [max_pages] int32, the offset of each page in its block, in cache pages.
        step: cache pages from one block to the next.
    """

    blocks: torch.Tensor
    offsets: torch.Tensor
    step: int

    @classmethod
    def of(
        cls, ring: Ring, max_pages: int, rows: Sequence[int], step: int, device: torch.device
    ) -> "RingTable":
        """Make the table of requests of up to `max_pages` pages.

        Args:
            ring: ring of each request.
            max_pages: columns.
            rows: offsets of the pages of one block, in cache pages.
            step: see `RingTable`.
            device: device of the tables.
        """
        indices = ring.indices(np.arange(max_pages))
        offsets = np.array(rows)[indices % len(rows)]
        return cls(
            torch.from_numpy(indices // len(rows)).to(device),
            torch.from_numpy(offsets).to(torch.int32).to(device),
            step,
        )

    def pages(self, block_table: torch.Tensor) -> torch.Tensor:
        """Map [num_reqs, max_blocks] int32 blocks to [num_reqs, max_pages] int32 cache pages."""
        return block_table[:, self.blocks] * self.step + self.offsets
