# SPDX-License-Identifier: Apache-2.0
"""Draft attention by FlashInfer's paged decode (written against flashinfer-python 0.7.0.post1).

FlashInfer reads pages of all heads; a view has its own tokens per KV head. So the cache is shown to it as
pages of one row each, with one KV head, and each (request, KV head) as a request of its own. Nothing is
copied: keys and values are two strided views of the cache, and row numbers take the place of page numbers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_magicdec.attention.rows import FP8_DTYPES, KVRows
from vllm_magicdec.views.base import ceil_div

ALIGNMENT = 16  # bytes; FlashInfer's vectorised loads
MAX_ROWS = 2**31  # page numbers are int32
MULTIPROCESSORS = 256  # no GPU has more; what a plan wants at least depends on them
# From here on a group fills enough of a tensor core's tile; CUDA cores know no groups of 5, 7 or above 8.
TENSOR_CORE_GROUP = 4
HEAD_SIZES = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


class UnreadableCacheError(ValueError):
    """FlashInfer cannot read a KV cache row by row."""


def row_pages(rows: KVRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as FlashInfer pages of one token and one KV head.

    Returns:
        two views [num_rows, 1, 1, head_size] with equal strides.

    Raises:
        UnreadableCacheError: the cache's strides do not allow it.
    """
    table, values = rows.keys, rows.values
    unit = table.rows.stride(0)
    unit_bytes = unit * table.rows.element_size()
    reason = None
    if table.by_token is None or table.rows.stride(2) != 1:
        reason = "a head's elements are not contiguous"
    elif (table.steps, table.rows.stride()) != (values.steps, values.rows.stride()):
        reason = "keys and values have different strides"
    elif any(t.rows.data_ptr() % ALIGNMENT for t in (table, values)) or unit_bytes % ALIGNMENT:
        reason = f"rows are not aligned to {ALIGNMENT} bytes"
    elif table.rows.shape[0] > MAX_ROWS:
        reason = f"it has more than {MAX_ROWS} rows"
    if reason:
        raise UnreadableCacheError(
            f"FlashInfer cannot read this KV cache row by row ({reason}); use the Triton draft attention"
        )
    shape = (table.rows.shape[0], 1, 1, rows.head_size)
    strides = (unit, rows.head_size, rows.head_size, 1)
    return table.rows.as_strided(shape, strides), values.rows.as_strided(shape, strides)


def page_indptr(lens: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Where each virtual request's row numbers start.

    `lens` [num_reqs] int32; returns [num_reqs * num_kv_heads + 1] int32, on the same device.
    """
    counts = lens.repeat_interleave(num_kv_heads).cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(counts, (1, 0))


def make_page_indices(num_lists: int, max_budget: int, device: torch.device) -> torch.Tensor:
    """Room for the row numbers of so many views, and for what `fill_page_indices` puts aside; int32."""
    return torch.zeros(num_lists * max_budget + 1, dtype=torch.int32, device=device)


def fill_page_indices(
    indices: torch.Tensor,  # from `make_page_indices`, written
    rows: KVRows,
    slots: torch.Tensor,  # [num_reqs, num_kv_heads, budget] int32
    lens: torch.Tensor,  # [num_reqs] int32
    indptr: torch.Tensor,  # [num_reqs * num_kv_heads + 1] int32
) -> None:
    """Write the row numbers of all views one after the other. No host synchronisation."""
    columns = torch.arange(slots.shape[-1], device=slots.device)
    in_view = columns < lens.view(-1, 1, 1)
    starts = indptr[:-1].view(*slots.shape[:2], 1)
    # Shapes stay static: what lies behind a view goes to the last cell, which nobody reads.
    targets = torch.where(in_view, starts + columns, indices.shape[0] - 1)
    indices.scatter_(0, targets.flatten(), rows.keys.numbers(slots).to(indices.dtype).flatten())


def _fill_page_indices(device: torch.device) -> Callable[..., None]:
    if device.type == "cuda":
        from vllm_magicdec.attention import triton_indices

        return triton_indices.fill_page_indices
    return fill_page_indices


@dataclass(frozen=True)
class Geometry:
    """What a plan depends on besides the lengths."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    query_dtype: torch.dtype
    cache_dtype: torch.dtype
    scale: float
    soft_cap: float = 0.0

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def use_tensor_cores(self) -> bool:
        """Whether FlashInfer is asked for its kernels on tensor cores."""
        return self.group >= TENSOR_CORE_GROUP

    @property
    def max_tile(self) -> int:
        """Most query rows that a thread block on tensor cores computes."""
        return 128 if self.head_size < 256 else 64

    @property
    def refusal(self) -> str | None:
        """Why FlashInfer has no kernel for this, or None."""
        if self.head_size not in HEAD_SIZES:
            return f"it has no kernel for heads of {self.head_size}"
        is_fp8 = self.cache_dtype in FP8_DTYPES
        if self.query_dtype not in DTYPES or (self.query_dtype != self.cache_dtype and not is_fp8):
            return f"it has no kernel for {self.query_dtype} queries and a {self.cache_dtype} cache"
        if is_fp8 and self.use_tensor_cores and self.head_size == 64:
            # So its prefill.cuh says of the functions that load keys and values.
            return f"its kernels on tensor cores read no {self.cache_dtype} heads of 64"
        return None

    def plan_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `BatchDecodeWithPagedKVCacheWrapper.plan`, without its three tensors."""
        return dict(
            num_qo_heads=self.group,
            num_kv_heads=1,
            head_dim=self.head_size,
            page_size=1,
            pos_encoding_mode="NONE",
            logits_soft_cap=self.soft_cap,
            q_data_type=self.query_dtype,
            kv_data_type=self.cache_dtype,
            sm_scale=self.scale,
        )


def plan_bytes(geometry: Geometry, num_reqs: int) -> tuple[int, int]:
    """What FlashInfer allocates in its two workspaces for a plan that a CUDA graph may keep.

    That is the arithmetic of `PrefillPlan` (tensor cores) and `DecodePlan` in FlashInfer's scheduler.cuh,
    for one query token and one KV head per list of rows, on Ampere or newer. In a graph lists are always
    split into chunks: the results of each, a tile of query rows in float32, wait until they are merged. The
    number of chunks is an upper bound from the number of lists and of processors. A plan without a graph
    splits only what would leave processors idle, and wants no more.

    Args:
        geometry: of the layers.
        num_reqs: of the plan.

    Returns:
        bytes of the float workspace, bytes of the int workspace.
    """
    group, num_lists = geometry.group, num_reqs * geometry.num_kv_heads
    if geometry.use_tensor_cores:
        # Query rows that a thread block computes.
        tile = next(rows for rows in (16, 64, 128) if group <= rows or rows == geometry.max_tile)
        num_chunks = max(2 * MULTIPROCESSORS, ceil_div(num_lists * group, tile) + num_lists - 1)
    else:
        tile = 1
        num_chunks = max(16 * MULTIPROCESSORS, num_lists)  # 16 blocks of 128 threads are all that fit
    num_floats = group * num_chunks * tile * (geometry.head_size + 1)  # results, and the sums they merge by
    # By chunk three numbers and a flag, by list where it starts twice, and two numbers.
    num_int_bytes = num_chunks * (3 * 4 + 1) + 2 * (num_lists + 1) * 4 + 2 * 4
    # Each of FlashInfer's allocations is aligned.
    return 4 * num_floats + 2 * ALIGNMENT, num_int_bytes + 8 * ALIGNMENT


def make_workspace(geometry: Geometry, num_reqs: int, device: torch.device) -> torch.Tensor:
    """Room for the floats of plans for so many requests; decodes that run in turn may share it."""
    return torch.zeros(plan_bytes(geometry, num_reqs)[0], dtype=torch.uint8, device=device)


class FlashInferDecode:
    """Planned decode attention; all layers share one plan.

    `run` writes the layer's row numbers into the buffer that the plan was made with. With `cuda_graph` it
    may be captured, and the number of requests is fixed.

    Args:
        geometry: of the layers.
        num_reqs: most requests of a plan; with `cuda_graph`, all plans are for so many.
        workspace: from `make_workspace`.
        indices: from `make_page_indices`. It and the workspace may be shared by decodes that run in turn.
        cuda_graph: whether `run` may be captured.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        num_reqs: int,
        workspace: torch.Tensor,
        indices: torch.Tensor,
        cuda_graph: bool = True,
    ) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        device = workspace.device
        self._geometry = geometry
        num_lists = num_reqs * geometry.num_kv_heads
        self._lens = torch.ones(num_reqs, dtype=torch.int32, device=device)
        self._indptr = torch.zeros(num_lists + 1, dtype=torch.int32, device=device)
        self._indices = indices
        buffers = dict(
            paged_kv_indptr_buffer=self._indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=torch.ones(num_lists, dtype=torch.int32, device=device),
        )
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=cuda_graph,
            use_tensor_cores=geometry.use_tensor_cores,
            **(buffers if cuda_graph else {}),
        )
        # In the place of the 8 MiB, on the device and pinned, that every wrapper brings.
        num_int_bytes = plan_bytes(geometry, num_reqs)[1]
        self._wrapper.reset_workspace_buffer(
            workspace, torch.empty(num_int_bytes, dtype=torch.uint8, device=device)
        )

    def plan(self, lens_cpu: torch.Tensor) -> None:
        """Plan for these lengths. `lens_cpu` [num_reqs] int32 on the host. Not capturable."""
        indptr = page_indptr(lens_cpu, self._geometry.num_kv_heads)
        # The driver may wait for the stream before it stages memory that is not pinned.
        self._lens[: len(lens_cpu)].copy_(lens_cpu, non_blocking=True)
        self._indptr[: len(indptr)].copy_(indptr, non_blocking=True)
        self._wrapper.plan(
            indptr,
            # Without a CUDA graph the wrapper keeps this very tensor, since it is on the device.
            self._indices[: int(indptr[-1])],
            torch.ones(indptr.shape[0] - 1, dtype=torch.int32),
            **self._geometry.plan_arguments(),
        )

    def run(
        self,
        query: torch.Tensor,  # [num_reqs, num_heads, head_size]
        rows: KVRows,
        slots: torch.Tensor,  # [num_reqs, num_kv_heads, budget] int32
        out: torch.Tensor | None = None,  # as `query`, contiguous
        *,
        sinks: torch.Tensor | None = None,  # [num_heads]
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> torch.Tensor:
        """Attend under the last plan. Returns [num_reqs, num_heads, head_size] in the query's dtype: `out`.

        What layers differ in is no part of the plan: see `attend` for sinks and scales; that of keys
        multiplies the plan's.

        Raises:
            UnreadableCacheError: see `row_pages`.
        """
        pages = row_pages(rows)
        num_reqs = query.shape[0]
        indptr = self._indptr[: num_reqs * self._geometry.num_kv_heads + 1]
        _fill_page_indices(query.device)(self._indices, rows, slots, self._lens[:num_reqs], indptr)
        return self._read(query, pages, out, sinks=sinks, key_scale=key_scale, value_scale=value_scale)

    def run_again(self, query: torch.Tensor, rows: KVRows) -> torch.Tensor:
        """`run` for the slots of the last one, whose row numbers are still there."""
        return self._read(query, row_pages(rows), None)

    def _read(
        self,
        query: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        *,
        sinks: torch.Tensor | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> torch.Tensor:
        shape = (-1, self._geometry.group, query.shape[-1])
        virtual_out = None if out is None else out.view(shape)
        options = dict(out=virtual_out, k_scale=key_scale, v_scale=value_scale)
        if sinks is None:
            return self._wrapper.run(query.reshape(shape), pages, **options).view(query.shape)
        # FlashInfer's own sinks are those of a request's heads, and every (request, KV head) is a request
        # here. So its result is scaled to the share of the denominator that is not the sink's.
        read, lse = self._wrapper.run(query.reshape(shape), pages, return_lse=True, **options)
        share = torch.sigmoid(lse.view(query.shape[:2]) * math.log(2) - sinks)  # `lse` is to the base of 2
        return read.view(query.shape).mul_(share.unsqueeze(-1))


def attend(
    query: torch.Tensor,  # [num_reqs, num_heads, head_size]
    rows: KVRows,
    slots: torch.Tensor,  # [num_reqs, num_kv_heads, budget] int32
    lens: torch.Tensor,  # [num_reqs] int32
    *,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [num_heads]
    value_scale: float = 1.0,
) -> torch.Tensor:
    """See `vllm_magicdec.attention.attend`. Plans and runs once."""
    num_reqs, num_heads, head_size = query.shape
    geometry = Geometry(
        num_heads, rows.num_kv_heads, head_size, query.dtype, rows.keys.rows.dtype, scale, soft_cap
    )
    decode = FlashInferDecode(
        geometry,
        num_reqs=num_reqs,
        workspace=make_workspace(geometry, num_reqs, query.device),
        indices=make_page_indices(num_reqs * rows.num_kv_heads, slots.shape[-1], query.device),
    )
    decode.plan(lens.cpu())
    return decode.run(query, rows, slots, sinks=sinks, value_scale=value_scale)
