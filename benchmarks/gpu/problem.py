# SPDX-License-Identifier: Apache-2.0
"""What the kernels are given: caches, views, and dense attention masked to the same tokens."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Heads:
    """The attention of a layer, as far as its shape goes."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Of K and V in all KV heads."""
        return 2 * self.num_kv_heads * self.head_size * dtype.itemsize


@dataclass(frozen=True)
class View:
    """The tokens that a decode step reads: for every request and KV head, the first `lens` of a list."""

    lens: torch.Tensor  # [batch] int32
    positions: torch.Tensor  # [batch, num_kv_heads or 1, budget] int64, places in the request's context
    pages: torch.Tensor | None  # [batch, pages] int32, the same tokens as pages of the cache
    slots: torch.Tensor | None  # [batch, num_kv_heads, budget] int32, the same as slots of the cache

    @property
    def index_bytes(self) -> int:
        """Of the list of places that a kernel has to read."""
        listed = self.pages if self.slots is None else self.slots
        assert listed is not None
        return listed.numel() * listed.element_size()


class Layer:
    """One layer's KV cache in vLLM's layout, full of noise, with requests on shuffled pages.

    Args:
        heads: shape of the attention.
        batch: requests.
        context: tokens of each request, whole pages.
        page_size: tokens.
        dtype: of cache and queries.
        device: where they are.
        seed: of the noise and of the views.
    """

    def __init__(
        self,
        heads: Heads,
        *,
        batch: int,
        context: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> None:
        self.heads = heads
        self.batch = batch
        self.context = context
        self.page_size = page_size
        self._generator = torch.Generator(device).manual_seed(seed)
        num_pages = batch * context // page_size
        shape = (num_pages, page_size, heads.num_kv_heads, 2 * heads.head_size)
        # A token's keys and values of all heads are neighbours: vLLM's layout "NHD".
        self.by_page = torch.empty(shape, dtype=dtype, device=device)
        self.by_page.normal_(generator=self._generator)
        order = torch.randperm(num_pages, generator=self._generator, device=device)
        self.block_table = order.view(batch, -1).to(torch.int32)  # [batch, pages of a request]
        self.query = torch.empty(
            (batch, heads.num_heads, heads.head_size), dtype=dtype, device=device
        ).normal_(generator=self._generator)

    @property
    def kv_cache(self) -> torch.Tensor:
        """[num_pages, num_kv_heads, page_size, 2 * head_size], as vLLM passes it to attention."""
        return self.by_page.transpose(1, 2)

    @property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [num_pages, page_size, num_kv_heads, head_size] each."""
        keys, values = self.by_page.split(self.heads.head_size, dim=-1)
        return keys, values

    def page_view(self, budget: int) -> View:
        """Pages all over each context, the same for all heads; a budget of its length is all of them."""
        places = self._spread(1, self.context // self.page_size, budget // self.page_size)[:, 0]
        tokens = torch.arange(self.page_size, device=places.device)
        positions = (places.unsqueeze(2) * self.page_size + tokens).flatten(1).unsqueeze(1)
        return View(self._lens(budget), positions, self.block_table.gather(1, places).contiguous(), None)

    def token_view(self, budget: int) -> View:
        """Tokens all over each context, others for every KV head."""
        positions = self._spread(self.heads.num_kv_heads, self.context, budget)
        pages = self.block_table.gather(1, (positions // self.page_size).flatten(1)).view_as(positions)
        slots = pages * self.page_size + positions % self.page_size
        return View(self._lens(budget), positions, None, slots.to(torch.int32))

    def _spread(self, lists: int, size: int, count: int) -> torch.Tensor:
        """One of every stretch of `size` things, at random; [batch, lists, count] int64."""
        stretch = size // count
        device = self.query.device
        shape = (self.batch, lists, count)
        offsets = torch.randint(stretch, shape, generator=self._generator, device=device)
        return torch.arange(count, device=device) * stretch + offsets

    def _lens(self, budget: int) -> torch.Tensor:
        """Ragged ends, as in serving, within the last page."""
        ends = torch.arange(self.batch, device=self.query.device) % self.page_size
        return (budget - ends).to(torch.int32)

    def bytes_read(self, view: View) -> int:
        """What a decode step over the view cannot do without: its K, V and list of places."""
        tokens = int(view.lens.sum())
        return tokens * self.heads.bytes_per_token(self.query.dtype) + view.index_bytes

    def dense(self, view: View, request: int) -> torch.Tensor:
        """[num_heads, head_size] float32: attention over the whole context, all but the view masked.

        Written without anything that the kernels are made of.
        """
        pages = self.by_page[self.block_table[request].long()]  # the request's own
        query = self.query[request].float().unflatten(0, (self.heads.num_kv_heads, -1))
        results = []
        for head, group in enumerate(query):
            keys, values = pages[:, :, head].flatten(0, 1).float().split(self.heads.head_size, dim=1)
            listed = view.positions[request, head % view.positions.shape[1], : int(view.lens[request])]
            hidden = torch.ones(self.context, dtype=torch.bool, device=keys.device)
            hidden[listed] = False
            logits = (group @ keys.T * self.heads.head_size**-0.5).masked_fill(hidden, -torch.inf)
            results.append(logits.softmax(-1) @ values)
        return torch.cat(results)
