# SPDX-License-Identifier: Apache-2.0
"""What every view is made from and made of: a round's batch, a draft step, and the slots that it writes to.

Keys are cached with RoPE applied at their true positions, so leaving some out changes what the draft
attends to and nothing else: positions stay the true ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from vllm_magicdec.lookup.history import History

if TYPE_CHECKING:  # it is made of what is here
    from vllm_magicdec.views.passes import RoundSteps

# vLLM's cache-write kernels skip this slot.
PAD_SLOT = -1


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels prepare rounds there, and not many small operations."""
    return device.type == "cuda"


def on_device(numbers: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """The numbers there, int64, sent without waiting for the device; indexing with a list waits."""
    # What is not pinned the driver may stage only when the stream has got there.
    pinned = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient rounded up."""
    return -(-numerator // denominator)


@dataclass(frozen=True)
class Batch:
    """The requests of one round, in the order of the runner's batch."""

    req_ids: Sequence[str]
    tokens: torch.Tensor  # [num_reqs], the last sampled token of each request
    block_tables: Sequence[torch.Tensor]  # [num_reqs, max_blocks] int32 each, by KV-cache group
    context_lens: torch.Tensor  # [num_reqs] int64, verified tokens before `tokens` = first drafted position
    # For token views. K/V and token ids of this many tokens are there, on the device and as the host
    # knows (an upper bound); with asynchronous scheduling they may lag behind `context_lens`.
    observable_lens: torch.Tensor  # [num_reqs] int64
    known_lens: Sequence[int]
    is_prefilling: Sequence[bool]  # the prompt is not all in the cache yet: drafts will be dropped
    is_first: Sequence[bool]  # nothing was generated before `tokens`
    kv_cache_group: int = 0  # that `block_table` is of
    histories: Sequence[History] = ()  # where drafts are looked up

    @property
    def block_table(self) -> torch.Tensor:
        """[num_reqs, max_blocks] int32, the requests' own pages in one KV-cache group."""
        return self.block_tables[self.kv_cache_group]

    def of_group(self, kv_cache_group: int) -> "Batch":
        """The same requests as another KV-cache group holds them."""
        return replace(self, kv_cache_group=kv_cache_group)

    def part(self, first: int, end: int) -> "Batch":
        """The requests from `first` up to `end`."""
        requests = {name: values[first:end] for name, values in vars(self).items() if name not in _BY_GROUP}
        return replace(self, **requests, block_tables=[table[first:end] for table in self.block_tables])


_BY_GROUP = ("block_tables", "kv_cache_group")  # fields of `Batch` that are not lists of requests


@dataclass(frozen=True)
class PageView:
    """The same pages for all layers and heads."""

    lens: torch.Tensor  # [num_reqs] int32, K/V entries in view, the query's own included
    block_table: torch.Tensor  # [num_reqs, max_pages] int32
    max_len: int  # upper bound of `lens`

    def of_layer(self, index: int) -> "PageView":
        """One layer's."""
        return self


@dataclass(frozen=True)
class LayerPageView:
    """Pages of its own for every layer."""

    lens: torch.Tensor  # [num_reqs] int32, as in `PageView`
    block_tables: torch.Tensor  # [num_layers, num_reqs, max_pages] int32
    max_len: int

    def of_layer(self, index: int) -> PageView:
        """One layer's."""
        return PageView(self.lens, self.block_tables[index], self.max_len)


@dataclass(frozen=True)
class TokenView:
    """A list of slots for every layer and KV head. Good until the round's next step is made."""

    lens: torch.Tensor  # [num_reqs] int32, valid columns of `slots`, the query's own slot included
    slots: torch.Tensor  # [num_layers, num_reqs, num_kv_heads, budget] int32
    common_len: int | None  # what all `lens` are, where the host knows it: in every step of the round


View = PageView | LayerPageView | TokenView


@dataclass(frozen=True)
class ViewStep:
    """What one draft step reads and writes in the layers of a view: one query token per request."""

    index: int  # 0 .. gamma - 1
    positions: torch.Tensor  # [num_reqs] int64, true positions of the query tokens
    slots: torch.Tensor  # [num_reqs] int64, where the query's K/V goes; PAD_SLOT: nowhere
    view: View


@dataclass(frozen=True)
class DraftStep:
    """What one draft step reads and writes in all layers."""

    parts: Sequence[ViewStep]  # by group of layers

    @property
    def index(self) -> int:
        """0 .. gamma - 1."""
        return self.parts[0].index

    @property
    def positions(self) -> torch.Tensor:
        """[num_reqs] int64, true positions of the query tokens."""
        return self.parts[0].positions


class Selector(Protocol):
    """The part of a policy that works every round: it keeps what views look up up to date."""

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Device memory beside the selections, by what it is for."""
        ...

    def update(self, batch: Batch, num_steps: int) -> None:
        """Select for the requests of a batch that are due.

        Args:
            batch: the round's requests.
            num_steps: drafts of each.
        """
        ...


class Views(Protocol):
    """Prepares the views of one round after the other, in buffers that live as long as the engine."""

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Device memory of what the draft looks up, by what it is for."""
        ...

    @property
    def common_lens(self) -> Sequence[int | None]:
        """`TokenView.common_len`s for which a draft step runs other kernels; None is one."""
        ...

    def prepare(self, batch: Batch, num_steps: int) -> "RoundSteps":
        """The round's steps. No host synchronisation.

        Args:
            batch: the round's requests.
            num_steps: drafts of each.
        """
        ...

    def capture_view(self, num_reqs: int, lens: torch.Tensor, common_len: int | None) -> View:
        """The view of `num_reqs` requests that is in the buffers now, for a CUDA graph to read.

        Args:
            num_reqs: requests, at most `max_num_seqs`; those that the round does not have see what an
                earlier round left.
            lens: [num_reqs] int32, entries in view.
            common_len: one of `common_lens`.
        """
        ...


class DraftSlots:
    """Positions of the drafted tokens and the slots they write to, in buffers that live with the engine."""

    def __init__(
        self,
        *,
        page_size: int,
        max_num_reqs: int,
        max_num_steps: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.max_model_len = max_model_len
        self._offsets = torch.arange(max_num_steps, device=device).unsqueeze(1)  # [steps, 1] int64
        shape = (max_num_steps, max_num_reqs)
        self.positions = torch.zeros(shape, dtype=torch.int64, device=device)
        self.slots = torch.full(shape, PAD_SLOT, dtype=torch.int64, device=device)

    def prepare(self, batch: Batch, num_steps: int) -> torch.Tensor:
        """Fill the buffers for a round; returns its positions, [num_steps, num_reqs] int64.

        Positions at or above the model length are clamped and write to PAD_SLOT: what is drafted there
        is never scheduled.
        """
        num_reqs = batch.context_lens.shape[0]
        wanted = batch.context_lens + self._offsets[:num_steps]
        positions = wanted.clamp(max=self.max_model_len - 1)
        pages = batch.block_table.gather(1, (positions // self.page_size).T).T
        slots = pages * self.page_size + positions % self.page_size
        self.positions[:num_steps, :num_reqs] = positions
        self.slots[:num_steps, :num_reqs] = slots.masked_fill(wanted != positions, PAD_SLOT)
        return positions

    def step(self, index: int, num_reqs: int, view: View) -> ViewStep:
        """A step of the round that was prepared, over a view."""
        return ViewStep(index, self.positions[index, :num_reqs], self.slots[index, :num_reqs], view)
