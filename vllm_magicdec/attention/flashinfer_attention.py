# SPDX-License-Identifier: Apache-2.0
"""Draft attention by FlashInfer's paged decode (written against flashinfer-python 0.7.0.post1).

FlashInfer reads pages of all heads, but a view has its own tokens per KV head. So FlashInfer gets two
strided views of the cache as pages of one row and one KV head, and each (request, KV head) as a request.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from vllm_magicdec.attention.rows import FP8_DTYPES, KVRows
from vllm_magicdec.views.tensors import ceil_div

ALIGNMENT = 16  # bytes, of FlashInfer's vectorised loads
MAX_ROWS = 2**31  # page numbers are int32
MULTIPROCESSORS = 256  # upper bound for all GPUs; determines the minimum workspace of a plan
# Smaller groups fill too little of a tensor core's tile; CUDA cores support no groups of 5, 7 or above 8.
TENSOR_CORE_GROUP = 4
HEAD_SIZES = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


class UnreadableCacheError(ValueError):
    """FlashInfer cannot read a KV cache row by row."""


def row_pages(rows: KVRows) -> tuple[torch.Tensor, torch.Tensor]:
    """View keys and values as FlashInfer pages of one token and one KV head.

    Returns:
        Two views [num_rows, 1, 1, head_size] with equal strides.

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
    """Return the start of each list of row numbers, [num_reqs * num_kv_heads + 1] int32.

    `lens` is [num_reqs] int32 on the same device.
    """
    counts = lens.repeat_interleave(num_kv_heads).cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(counts, (1, 0))


def make_page_indices(num_lists: int, max_budget: int, device: torch.device) -> torch.Tensor:
    """Allocate row numbers of all lists, [num_lists * max_budget] int32."""
    return torch.zeros(num_lists * max_budget, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Geometry:
    """Dimensions and dtypes that determine a plan, besides the lengths."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    query_dtype: torch.dtype
    cache_dtype: torch.dtype
    scale: float
    soft_cap: float = 0.0

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def use_tensor_cores(self) -> bool:
        """Whether to use FlashInfer's tensor-core kernels."""
        return self.group >= TENSOR_CORE_GROUP

    @property
    def refusal(self) -> str | None:
        """The reason why FlashInfer has no kernel, or None."""
        if self.head_size not in HEAD_SIZES:
            return f"it has no kernel for heads of {self.head_size}"
        is_fp8 = self.cache_dtype in FP8_DTYPES
        if self.query_dtype not in DTYPES or (self.query_dtype != self.cache_dtype and not is_fp8):
            return f"it has no kernel for {self.query_dtype} queries and a {self.cache_dtype} cache"
        if is_fp8 and self.use_tensor_cores and self.head_size == 64:
            # A limit of the load functions in its prefill.cuh.
            return f"its kernels on tensor cores read no {self.cache_dtype} heads of 64"
        return None

    def plan_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `BatchDecodeWithPagedKVCacheWrapper.plan`."""
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
    """Return the bytes of FlashInfer's float and int workspaces for a plan that a CUDA graph may keep.

    This follows `PrefillPlan` (tensor cores) and `DecodePlan` in FlashInfer's scheduler.cuh, for one query
    token and one KV head per list of rows, on Ampere or newer. In a graph, lists are always split into
    chunks, and each chunk's tile of query rows is kept in float32 until all are merged. The number of
    chunks is an upper bound, also for plans without a graph.
    """
    group, num_lists = geometry.group, num_reqs * geometry.num_kv_heads
    if geometry.use_tensor_cores:
        max_tile = 128 if geometry.head_size < 256 else 64  # query rows per thread block
        tile = next(rows for rows in (16, 64, 128) if group <= rows or rows == max_tile)
        num_chunks = max(2 * MULTIPROCESSORS, ceil_div(num_lists * group, tile) + num_lists - 1)
    else:
        tile = 1
        num_chunks = max(16 * MULTIPROCESSORS, num_lists)  # at most 16 blocks of 128 threads
    num_floats = group * num_chunks * tile * (geometry.head_size + 1)  # results and sums
    # Three numbers and a flag per chunk, two offsets per list, and two numbers.
    num_int_bytes = num_chunks * (3 * 4 + 1) + 2 * (num_lists + 1) * 4 + 2 * 4
    # Each of FlashInfer's allocations is aligned.
    return 4 * num_floats + 2 * ALIGNMENT, num_int_bytes + 8 * ALIGNMENT


def make_workspace(geometry: Geometry, num_reqs: int, device: torch.device) -> torch.Tensor:
    """Allocate the float workspace of plans; decodes that do not overlap may share it."""
    return torch.zeros(plan_bytes(geometry, num_reqs)[0], dtype=torch.uint8, device=device)


class FlashInferDecode:
    """Planned decode attention; all layers share one plan.

    Args:
        num_reqs: maximum requests of a plan; with `cuda_graph`, their exact number.
        workspace: from `make_workspace`.
        indices: from `make_page_indices`, written. Decodes that do not overlap may share both.
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
        # Replaces the wrapper's default of 8 MiB, on the device and pinned.
        num_int_bytes = plan_bytes(geometry, num_reqs)[1]
        self._wrapper.reset_workspace_buffer(
            workspace, torch.empty(num_int_bytes, dtype=torch.uint8, device=device)
        )

    def plan(self, lens_cpu: torch.Tensor) -> None:
        """Plan for `lens_cpu`, [num_reqs] int32 on the host. Not capturable."""
        indptr = page_indptr(lens_cpu, self._geometry.num_kv_heads)
        for buffer, numbers in ((self._lens, lens_cpu), (self._indptr, indptr)):
            # The driver may wait for the stream before it stages memory that is not pinned.
            pinned = numbers.pin_memory() if buffer.is_cuda else numbers
            buffer[: len(numbers)].copy_(pinned, non_blocking=True)
        self._wrapper.plan(
            indptr,
            # Without a CUDA graph the wrapper keeps this tensor, since it is on the device.
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
        """Attend under the last plan; return `out`, [num_reqs, num_heads, head_size] in the query's dtype.

        Sinks and scales are not part of the plan; `key_scale` multiplies the scale of the plan.

        Raises:
            UnreadableCacheError: see `row_pages`.
        """
        from vllm_magicdec.attention.triton_indices import fill_page_indices  # Triton may not be installed

        pages = row_pages(rows)
        num_reqs = query.shape[0]
        indptr = self._indptr[: num_reqs * self._geometry.num_kv_heads + 1]
        fill_page_indices(self._indices, rows, slots, self._lens[:num_reqs], indptr)
        shape = (-1, self._geometry.group, query.shape[-1])
        virtual_out = None if out is None else out.view(shape)
        options = dict(out=virtual_out, k_scale=key_scale, v_scale=value_scale)
        if sinks is None:
            return self._wrapper.run(query.reshape(shape), pages, **options).view(query.shape)
        # FlashInfer's sinks are per head of a request, but here each KV head is a request. So scale the
        # result by the sink-free share of the denominator.
        read, lse = self._wrapper.run(query.reshape(shape), pages, return_lse=True, **options)
        share = torch.sigmoid(lse.view(query.shape[:2]) * math.log(2) - sinks)  # base 2
        return read.view(query.shape).mul_(share.unsqueeze(-1))
