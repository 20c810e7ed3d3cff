# SPDX-License-Identifier: Apache-2.0
"""A stand-in for FlashInfer on a CPU: torch reads what FlashInfer is told to read."""

import math
import types
from typing import Any

import torch

INT_BYTES = 8 * 2**20  # of the workspace that a wrapper brings
MULTIPROCESSORS = 132  # of an H100
# Thread blocks of the decode kernel that fit a multiprocessor; the original asks the driver.
DECODE_BLOCKS = 8


class Workspace:
    """`AlignedAllocator` of flashinfer's allocator.h."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def allocate(self, num_bytes: int, alignment: int = 16) -> None:
        self.num_bytes += -self.num_bytes % alignment + num_bytes


def _chunk_lengths(low: int, kv_lens: list[int], num_tiles: int, most: int) -> int:
    """The shortest chunk that makes no more than `most` of them; `PrefillBinarySearchKVChunkSize`."""
    high = max(1, *kv_lens)
    while low < high:
        middle = (low + high) // 2
        chunks = sum(num_tiles * -(-max(length, 1) // middle) for length in kv_lens)
        low, high = (middle + 1, high) if chunks > most else (low, middle)
    return low


def prefill_workspaces(
    kv_lens: list[int], group: int, head_dim: int, cuda_graph: bool, multiprocessors: int = MULTIPROCESSORS
) -> tuple[int, int]:
    """`PrefillPlanImpl` of flashinfer's scheduler.cuh, step by step: bytes of the float and int workspaces.

    For one query token and one KV head per request, pages of one token, and no sliding window.
    """
    batch_size = total_num_rows = len(kv_lens)
    max_batch_size_if_split = 2 * multiprocessors
    max_qo_len = (total_num_rows - batch_size + 1) * group
    cta_tile_q = 64 if max_qo_len > 16 else 16
    if max_qo_len > 64 and head_dim < 256:
        cta_tile_q = 128
    tiles_of_one = -(-group // cta_tile_q)
    if cuda_graph:
        total_num_tiles_q = -(-total_num_rows * group // cta_tile_q) + batch_size - 1
    else:
        total_num_tiles_q = batch_size * tiles_of_one
    chunk = _chunk_lengths(128, kv_lens, tiles_of_one, max_batch_size_if_split)
    split_kv = cuda_graph or chunk < max(1, *kv_lens)
    new_batch_size = sum(tiles_of_one * -(-max(length, 1) // chunk) for length in kv_lens)
    padded = max(max_batch_size_if_split, total_num_tiles_q) if cuda_graph else new_batch_size
    assert new_batch_size <= padded
    ints, floats = Workspace(), Workspace()
    for _ in range(3):
        ints.allocate(4 * padded)
    ints.allocate(4 * (batch_size + 1))
    ints.allocate(4, alignment=1)
    if cuda_graph:
        ints.allocate(4)
    if split_kv:
        floats.allocate(group * padded * cta_tile_q * head_dim * 4)
        floats.allocate(group * padded * cta_tile_q * 4)
        ints.allocate(4 * (total_num_rows + 1))
        ints.allocate(padded)
    return floats.num_bytes, ints.num_bytes


def decode_workspaces(
    kv_lens: list[int], group: int, head_dim: int, cuda_graph: bool, multiprocessors: int = MULTIPROCESSORS
) -> tuple[int, int]:
    """`DecodePlanImpl` of flashinfer's scheduler.cuh, likewise."""
    batch_size = len(kv_lens)
    max_grid_size = DECODE_BLOCKS * multiprocessors
    chunk, split_kv = max(1, *kv_lens), False
    if batch_size < max_grid_size:
        chunk = _chunk_lengths(128, kv_lens, 1, max_grid_size)
        split_kv = cuda_graph or sum(-(-length // chunk) for length in kv_lens) != batch_size
    new_batch_size = sum(-(-max(length, 1) // chunk) for length in kv_lens)
    padded = (max_grid_size if split_kv else batch_size) if cuda_graph else new_batch_size
    ints, floats = Workspace(), Workspace()
    ints.allocate(4 * padded)
    ints.allocate(4 * padded)
    ints.allocate(4 * (padded + 1))
    ints.allocate(4, alignment=1)
    if split_kv:
        floats.allocate(group * padded * head_dim * 4)
        floats.allocate(group * padded * 4)
        ints.allocate(padded)
    return floats.num_bytes, ints.num_bytes


class StandInWrapper:
    """`BatchDecodeWithPagedKVCacheWrapper` of flashinfer 0.7, as far as this project uses it.

    It takes the same arguments, refuses those that the original refuses, keeps the tensors that the
    original keeps, and evaluates the pages that they name, request by request in float32.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        assert kv_layout == "NHD"
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        assert all((buffer is not None) == use_cuda_graph for buffer in buffers)
        self._workspaces = (float_workspace_buffer.numel(), INT_BYTES)
        self._use_cuda_graph = use_cuda_graph
        self._use_tensor_cores = use_tensor_cores
        self._read: Any = buffers  # indptr, indices, last_page_len: what `run` reads

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8
        self._workspaces = (float_workspace_buffer.numel(), int_workspace_buffer.numel())

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        assert pos_encoding_mode == "NONE" and num_qo_heads % num_kv_heads == 0
        assert self._use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8)
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert indptr[-1] == len(indices) and len(indptr) == len(last_page_len) + 1
        assert torch.all((last_page_len >= 1) & (last_page_len <= page_size))
        if page_size == num_kv_heads == 1:
            needed = (prefill_workspaces if self._use_tensor_cores else decode_workspaces)(
                indptr.diff().tolist(), num_qo_heads, head_dim, self._use_cuda_graph
            )
            for has, needs in zip(self._workspaces, needed, strict=True):
                if needs > has:
                    raise RuntimeError(f"Buffer overflow: {needs} bytes needed, {has} available")
        planned = (indptr, indices, last_page_len)
        if self._use_cuda_graph:
            # The number of requests is fixed; there may be fewer indices than there is room for.
            assert len(indptr) == len(self._read[0])
            for buffer, tensor in zip(self._read, planned, strict=True):
                buffer[: len(tensor)].copy_(tensor)
        else:
            self._read = planned
        self._scale = head_dim**-0.5 if sm_scale is None else sm_scale
        self._soft_cap = logits_soft_cap
        self._shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._dtypes = (q_data_type, kv_data_type or q_data_type)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        keys, values = paged_kv_cache
        num_heads, num_kv_heads, head_dim, page_size = self._shape
        assert keys.stride() == values.stride() and keys.stride(-1) == 1
        assert (q.dtype, keys.dtype) == self._dtypes and q.shape[1:] == (num_heads, head_dim)
        assert keys.shape[1:] == values.shape[1:] == (page_size, num_kv_heads, head_dim)
        indptr, indices, last_page_len = self._read
        assert len(q) == len(indptr) - 1
        output = torch.empty_like(q) if out is None else out
        assert output.shape == q.shape and output.dtype == q.dtype
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        scale = self._scale * (1.0 if k_scale is None else k_scale)
        for request, query in enumerate(q.float()):
            pages = indices[indptr[request] : indptr[request + 1]].long()
            length = (len(pages) - 1) * page_size + int(last_page_len[request])
            k, v = (half[pages].flatten(0, 1)[:length].float().transpose(0, 1) for half in (keys, values))
            logits = query.unflatten(0, (num_kv_heads, -1)) @ k.transpose(1, 2) * scale
            if self._soft_cap:
                logits = self._soft_cap * torch.tanh(logits / self._soft_cap)
            output[request] = (logits.softmax(-1) @ v).flatten(0, 1)
            lse[request] = logits.logsumexp(-1).flatten() / math.log(2)  # to the base of 2
        if v_scale is not None:
            output *= v_scale
        return (output, lse) if return_lse else output


def module() -> types.ModuleType:
    """What `import flashinfer` finds once this is in `sys.modules`."""
    stand_in = types.ModuleType("flashinfer", __doc__)
    vars(stand_in)["BatchDecodeWithPagedKVCacheWrapper"] = StandInWrapper
    return stand_in
