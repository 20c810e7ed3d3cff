# SPDX-License-Identifier: Apache-2.0
"""One layer's paged KV cache as rows, each the key or value of one token and KV head.

In all of vLLM's layouts a row's address is affine in the block, the head and the token's index in the
block. So rows have numbers, and a slot is a row number per head.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_magicdec.attention.softmax import Softmax

# These backends store a token's value after its key; strides show the physical order.
KEY_VALUE_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Backends store these as bytes, without the layer's scales.
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

# For messages: drafts that read rows of the cache, and drafts that leave reading to the backend.
READERS = "snapkv, verify-topk and SPIRe drafts"
NO_READER = "draft_kv_policy='streamingllm' without a SPIRe draft"

AMX_TILE = 16  # rows of an AMX tile, each of 16 words of 32 bits


def read_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a cache is read as; bfloat16 holds every fp8 number exactly."""
    return torch.bfloat16 if dtype in FP8_DTYPES else dtype


@dataclass(frozen=True)
class RowTable:
    """The keys or the values of one layer.

    The CPU's AMX layout interleaves groups of a row's elements and splits blocks into tiles; elsewhere one
    group holds the whole head.
    """

    cells: torch.Tensor  # [num_blocks, num_kv_heads, tiles, tile_size, groups, group_size], a view
    rows: torch.Tensor  # [num_rows, groups, group_size], the same storage; rows may overlap
    steps: tuple[int, int, int, int]  # rows from one block, head, tile, token in the tile to the next

    @classmethod
    def of(cls, cells: torch.Tensor) -> "RowTable":
        """Number the rows of `cells` by the largest common unit of their strides."""
        # A dimension of size 1 may have any stride.
        strides = [
            0 if size == 1 else stride
            for size, stride in zip(cells.shape[:4], cells.stride()[:4], strict=True)
        ]
        unit = math.gcd(*strides) or cells.shape[4] * cells.shape[5]
        block, head, tile, token = (stride // unit for stride in strides)
        steps = (block, head, tile, token)
        last = sum((size - 1) * step for size, step in zip(cells.shape[:4], steps, strict=True))
        rows = cells.as_strided((last + 1, *cells.shape[4:]), (unit, *cells.stride()[4:]))
        return cls(cells, rows, steps)

    @property
    def by_token(self) -> torch.Tensor | None:
        """[num_blocks, num_kv_heads, page_size, head_size] view, or None where the layout is packed."""
        tile_size, groups = self.cells.shape[3:5]
        return self.cells.squeeze(4).squeeze(3) if tile_size == groups == 1 else None

    def numbers(self, slots: torch.Tensor) -> torch.Tensor:
        """Return row numbers of `slots` [..., num_kv_heads, n] int, in the same shape, int64."""
        num_heads, tiles, tile_size = self.cells.shape[1:4]
        page_size = tiles * tile_size
        slots = slots.long()  # a row number may not fit 32 bits
        tokens = slots % page_size
        heads = torch.arange(num_heads, device=slots.device).unsqueeze(1)
        block, head, tile, token = self.steps
        numbers = slots // page_size * block + heads * head
        return numbers + tokens // tile_size * tile + tokens % tile_size * token

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        """Read `slots` [..., num_kv_heads, n] int as [..., num_kv_heads, n, head_size] (`read_dtype`)."""
        numbers = self.numbers(slots)
        taken = self.rows.index_select(0, numbers.flatten())
        return taken.to(read_dtype(taken.dtype)).flatten(1).unflatten(0, numbers.shape)


class WeighTokens(Protocol):
    """A kernel that computes the attention weights of a request's tokens in place."""

    def __call__(
        self, queries: torch.Tensor, pages: torch.Tensor, length: int, softmax: Softmax
    ) -> torch.Tensor | None:
        """Sum the softmax's weights over queries and over the query heads of each KV head.

        Args:
            queries: [num_tokens, num_heads, head_size] of the request's last tokens, in the model's dtype.
            pages: [n] int, the request's pages.

        Returns:
            [num_kv_heads, length] float32; None if the kernel does not support so many queries.
        """


@dataclass(frozen=True)
class KVRows:
    """One layer's paged KV cache, readable token by token.

    An fp8 cache is read without its scales: logits include those of keys, results those of values.
    """

    keys: RowTable
    values: RowTable
    page_size: int  # tokens of the cache's own blocks
    num_kv_heads: int
    head_size: int
    weigh: WeighTokens | None = None

    @classmethod
    def of(
        cls,
        kv_cache: torch.Tensor,
        backend_name: str,
        isa: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> "KVRows":
        """View a cache as its attention backend lays it out.

        Args:
            kv_cache: [num_blocks, num_kv_heads, page_size, 2 * head_size], any strides, as vLLM passes it
                to `AttentionImpl.forward`.
            backend_name: `AttentionBackend.get_name()`.
            isa: `layer.isa` of the CPU backend.
            dtype: dtype of the elements of a tensor of bytes.

        Raises:
            ValueError: the cache's quantisation or layout is not supported.
        """
        _, num_kv_heads, page_size, content = kv_cache.shape
        head_size = content // 2
        if dtype is not None:
            kv_cache = kv_cache.view(dtype)
        if kv_cache.dtype not in CACHE_DTYPES + FP8_DTYPES:
            raise ValueError(
                f"{READERS} read float32, bfloat16 and float16 KV caches, and fp8 ones with scales of "
                f"a layer or of its KV heads, not {kv_cache.dtype} (scales by token, int8, nvfp4 and "
                f"others); use --kv-cache-dtype fp8, or bfloat16 or float16, as the model's, or {NO_READER}"
            )
        if backend_name == "CPU_ATTN":
            keys, values = _cpu_cells(kv_cache, isa)
        elif backend_name in KEY_VALUE_BACKENDS:
            keys, values = (_plain(half) for half in kv_cache.split(head_size, dim=-1))
        else:
            raise ValueError(
                f"{READERS} do not support the KV cache of attention backend {backend_name}; use one of "
                f"{', '.join(KEY_VALUE_BACKENDS)}, or {NO_READER}"
            )
        return cls(RowTable.of(keys), RowTable.of(values), page_size, num_kv_heads, head_size)

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the keys and values of `slots`, see `RowTable.gather`."""
        return self.keys.gather(slots), self.values.gather(slots)

    def keys_by_page(self, blocks: torch.Tensor, page_size: int) -> torch.Tensor:
        """Read all keys of some pages of a block table.

        Args:
            blocks: [n] int, pages of the table.
            page_size: tokens of each; the backend may split them into contiguous smaller blocks.

        Returns:
            [n, num_kv_heads, page_size, head_size], see `read_dtype`.
        """
        parts = page_size // self.page_size
        own = blocks.long().unsqueeze(1) * parts + torch.arange(parts, device=blocks.device)
        keys = self.keys.cells[own].transpose(1, 2)  # [n, num_kv_heads, parts, ...]
        keys = keys.reshape(len(blocks), self.num_kv_heads, page_size, self.head_size)
        return keys.to(read_dtype(keys.dtype))


def _plain(cells: torch.Tensor) -> torch.Tensor:
    """Reshape [num_blocks, num_kv_heads, page_size, head_size] to the shape of `RowTable.cells`."""
    return cells.unsqueeze(3).unsqueeze(4)


def _cpu_cells(kv_cache: torch.Tensor, isa: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Split each head's part of a block of the CPU backend: packed keys, then packed values."""
    *outer, page_size, content = kv_cache.shape
    regions = kv_cache.view(*outer, 2, page_size, content // 2)
    layout = _CPU_LAYOUTS.get(isa or "")
    if layout is None:
        raise ValueError(
            f"{READERS} do not support the CPU attention backend's layout for {isa}, only "
            f"{', '.join(_CPU_LAYOUTS)}; use {NO_READER}"
        )
    return layout(regions[:, :, 0], regions[:, :, 1])


def _vector_cells(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View keys stored as [head_size, page_size] and values stored as [page_size, head_size]."""
    page_size, head_size = keys.shape[2:]
    transposed = keys.view(*keys.shape[:2], head_size, page_size).transpose(2, 3)
    return _plain(transposed), _plain(values)


def _amx_cells(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View AMX tiles, whose 32-bit words hold adjacent elements of a key or adjacent tokens' values."""
    *outer, page_size, head_size = keys.shape
    if head_size % 32:
        # vLLM's kernel has no tiles for such heads and falls back to vectors.
        return _vector_cells(keys, values)
    word = 4 // max(2, keys.element_size())  # elements; the kernel multiplies fp8 as bfloat16
    key_tiles = keys.view(*outer, page_size // AMX_TILE, head_size // word, AMX_TILE, word)
    value_tiles = values.view(*outer, head_size // AMX_TILE, page_size // word, AMX_TILE, word)
    return key_tiles.permute(0, 1, 2, 4, 3, 5), value_tiles.permute(0, 1, 3, 5, 2, 4)


# By the names in vLLM's `layer.isa`.
_CPU_LAYOUTS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "vec": _vector_cells,
    "vec16": _vector_cells,
    "amx": _amx_cells,
}
