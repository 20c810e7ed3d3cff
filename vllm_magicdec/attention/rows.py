# SPDX-License-Identifier: Apache-2.0
"""One layer's paged KV cache, readable token by token, whatever its layout in memory."""

from dataclasses import dataclass

import torch

# How many tokens (or dims) the CPU's AMX kernels keep side by side.
_AMX_TILE = 16


@dataclass(frozen=True)
class KVRows:
    """Views of a cache; nothing is copied until a row is read.

    `keys` and `values` are [num_blocks, num_kv_heads, *tokens, *dims], where `token_shape` splits a page's
    tokens and the remaining axes split a head's dims, as the layout demands.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_tokens: tuple[int, ...]
    value_tokens: tuple[int, ...]
    page_size: int
    head_size: int

    @classmethod
    def of(cls, kv_cache: torch.Tensor, backend: str, isa: str | None = None) -> "KVRows":
        """The rows of what vLLM 0.32 hands to `impl.forward`.

        Args:
            kv_cache: [num_blocks, num_kv_heads, page_size, 2 * head_size], in any physical order.
            backend: name of vLLM's attention backend.
            isa: for the CPU's backend, the instruction set by which it packs its pages.

        Raises:
            ValueError: the CPU packs its pages in a way that is not known here.
        """
        _, _, page_size, content = kv_cache.shape
        size = content // 2
        if backend != "CPU_ATTN":
            keys, values = kv_cache.split(size, dim=-1)
            return cls(keys, values, (page_size,), (page_size,), page_size, size)
        # The CPU's pages hold all keys, then all values.
        halves = kv_cache.flatten(2).unflatten(2, (2, page_size * size))
        keys, values = halves.unbind(2)
        if isa in ("vec", "vec16"):  # keys are transposed: [head_size, page_size]
            return cls(
                keys.unflatten(2, (size, page_size)).transpose(2, 3),
                values.unflatten(2, (page_size, size)),
                (page_size,),
                (page_size,),
                page_size,
                size,
            )
        if isa == "amx":  # pairs of dims (keys) or of tokens (values) side by side
            tile = _AMX_TILE
            return cls(
                keys.unflatten(2, (page_size // tile, size // 2, tile, 2)).permute(0, 1, 2, 4, 3, 5),
                values.unflatten(2, (size // tile, page_size // 2, tile, 2)).permute(0, 1, 3, 5, 2, 4),
                (page_size // tile, tile),
                (page_size // 2, 2),
                page_size,
                size,
            )
        raise ValueError(
            f"vLLM's CPU attention packs its pages for {isa!r} here, which token views cannot read; "
            "use draft_kv_policy='streamingllm'"
        )

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[1]

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows by slot.

        Args:
            slots: [num_reqs, num_kv_heads, n] int, block * page_size + place in the page.

        Returns:
            keys, values: [num_reqs, num_kv_heads, n, head_size] in the cache's dtype.
        """
        values = self.values[self._index(slots, self.value_tokens)]
        return self.gather_keys(slots), values.flatten(3)

    def gather_keys(self, slots: torch.Tensor) -> torch.Tensor:
        """The keys alone."""
        return self.keys[self._index(slots, self.key_tokens)].flatten(3)

    def _index(self, slots: torch.Tensor, token_shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        slots = slots.long()
        block, place = slots // self.page_size, slots % self.page_size
        head = torch.arange(self.num_kv_heads, device=slots.device)[:, None]
        return (block, head, *_split(place, token_shape))

    def keys_by_page(self, blocks: torch.Tensor) -> torch.Tensor:
        """All keys of some pages, [len(blocks), num_kv_heads, page_size, head_size]; `blocks` [n] int."""
        keys = self.keys[blocks.long()]
        return keys.reshape(len(blocks), self.num_kv_heads, self.page_size, self.head_size)


def _split(places: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """A place in the page as indices into the axes that split it."""
    if len(shape) == 1:
        return (places,)
    return places // shape[1], places % shape[1]
