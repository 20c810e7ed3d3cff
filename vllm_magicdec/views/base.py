# SPDX-License-Identifier: Apache-2.0
"""Types that all views share: a round's batch, a draft step, and the slots that it writes to.

Keys are cached with RoPE applied at their true positions, so a view may skip some and positions stay true.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from vllm_magicdec.lookup.history import History

if TYPE_CHECKING:  # passes.py imports this module
    from vllm_magicdec.views.passes import RoundSteps

# vLLM's cache-write kernels skip this slot.
PAD_SLOT = -1


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels prepare rounds on the device, rather than torch operations."""
    return device.type == "cuda"


def on_device(numbers: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy the numbers to the device, int64, without waiting for it; indexing with a list waits."""
    # The driver may wait for the stream before it stages memory that is not pinned.
    pinned = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide and round up."""
    return -(-numerator // denominator)


@dataclass(frozen=True)
class Batch:
    """The requests of one round, in the runner's order."""

    req_ids: Sequence[str]
    tokens: torch.Tensor  # [num_reqs], the last sampled token of each request
    block_tables: Sequence[torch.Tensor]  # [num_reqs, max_blocks] int32 each, by KV-cache group
    context_lens: torch.Tensor  # [num_reqs] int64, verified tokens before `tokens` = first drafted position
    # Tokens whose K/V and ids are available, on the device and as the host knows (an upper bound); with
    # asynchronous scheduling they may lag behind `context_lens`.
    observable_lens: torch.Tensor  # [num_reqs] int64
    known_lens: Sequence[int]
    is_prefilling: Sequence[bool]  # the prompt is not complete in the cache: drafts will be dropped
    is_first: Sequence[bool]  # nothing was generated before `tokens`
    kv_cache_group: int = 0  # group of `block_table`
    histories: Sequence[History] = ()  # token histories for lookups

    @property
    def block_table(self) -> torch.Tensor:
        """[num_reqs, max_blocks] int32, the requests' pages in `kv_cache_group`."""
        return self.block_tables[self.kv_cache_group]

    def of_group(self, kv_cache_group: int) -> "Batch":
        """Return the same requests with the block table of another KV-cache group."""
        return replace(self, kv_cache_group=kv_cache_group)

    def part(self, first: int, end: int) -> "Batch":
        """Return the requests from `first` up to `end`."""
        requests = {name: values[first:end] for name, values in vars(self).items() if name not in _BY_GROUP}
        return replace(self, **requests, block_tables=[table[first:end] for table in self.block_tables])


_BY_GROUP = ("block_tables", "kv_cache_group")  # fields of `Batch` without one entry per request


@dataclass(frozen=True)
class PageView:
    """The same pages for all layers and heads."""

    lens: torch.Tensor  # [num_reqs] int32, K/V entries in view, including the query's own
    block_table: torch.Tensor  # [num_reqs, max_pages] int32
    max_len: int  # upper bound of `lens`

    def of_layer(self, index: int) -> "PageView":
        """Return the view of one layer."""
        return self


@dataclass(frozen=True)
class LayerPageView:
    """Pages by layer."""

    lens: torch.Tensor  # [num_reqs] int32, as in `PageView`
    block_tables: torch.Tensor  # [num_layers, num_reqs, max_pages] int32
    max_len: int

    def of_layer(self, index: int) -> PageView:
        """Return the view of one layer."""
        return PageView(self.lens, self.block_tables[index], self.max_len)


@dataclass(frozen=True)
class TokenView:
    """A list of slots for every layer and KV head, valid until the round's next step."""

    lens: torch.Tensor  # [num_reqs] int32, valid columns of `slots`, including the query's own
    slots: torch.Tensor  # [num_layers, num_reqs, num_kv_heads, budget] int32
    common_len: int | None  # the value of all `lens` in every step of the round, if the host knows it


View = PageView | LayerPageView | TokenView


@dataclass(frozen=True)
class ViewStep:
    """Input of one draft step in the layers of a view: one query token per request."""

    index: int  # 0 .. gamma - 1
    positions: torch.Tensor  # [num_reqs] int64, true positions of the query tokens
    slots: torch.Tensor  # [num_reqs] int64, slot of the query's K/V, or PAD_SLOT
    view: View


@dataclass(frozen=True)
class DraftStep:
    """Input of one draft step in all layers."""

    parts: Sequence[ViewStep]  # by group of layers
    is_padding: torch.Tensor | None = None  # [num_tokens] bool, tokens that only pad a CUDA graph

    @property
    def index(self) -> int:
        """0 .. gamma - 1."""
        return self.parts[0].index

    @property
    def positions(self) -> torch.Tensor:
        """[num_reqs] int64, true positions of the query tokens."""
        return self.parts[0].positions


class Selector(Protocol):
    """The part of a policy that runs every round and updates the selections."""

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Device memory in addition to the selections, by purpose."""
        ...

    def update(self, batch: Batch, num_steps: int) -> None:
        """Select for the requests of a round that are due, each with `num_steps` drafts."""
        ...


class Views(Protocol):
    """Prepares the views of each round, in buffers that live as long as the engine."""

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Device memory of the views, by purpose."""
        ...

    @property
    def common_lens(self) -> Sequence[int | None]:
        """Values of `TokenView.common_len`, including None, for which a draft step runs other kernels."""
        ...

    def prepare(self, batch: Batch, num_steps: int) -> "RoundSteps":
        """Prepare a round of `num_steps` drafts for each request. No host synchronisation."""
        ...

    def capture_view(self, num_reqs: int, lens: torch.Tensor, common_len: int | None) -> View:
        """Return the view that the buffers hold, for a CUDA graph to read.

        Args:
            num_reqs: at most `max_num_seqs`; requests that the round lacks see data of an earlier round.
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
        """Fill the buffers for a round and return its positions, [num_steps, num_reqs] int64.

        Positions at or above the model length are clamped and write to PAD_SLOT; their drafts are never
        scheduled.
        """
        num_reqs = batch.context_lens.shape[0]
        unclamped = batch.context_lens + self._offsets[:num_steps]
        positions = unclamped.clamp(max=self.max_model_len - 1)
        pages = batch.block_table.gather(1, (positions // self.page_size).T).T
        slots = pages * self.page_size + positions % self.page_size
        self.positions[:num_steps, :num_reqs] = positions
        self.slots[:num_steps, :num_reqs] = slots.masked_fill(unclamped != positions, PAD_SLOT)
        return positions

    def step(self, index: int, num_reqs: int, view: View) -> ViewStep:
        """Return a step of the prepared round over a view."""
        return ViewStep(index, self.positions[index, :num_reqs], self.slots[index, :num_reqs], view)
