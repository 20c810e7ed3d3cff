# SPDX-License-Identifier: Apache-2.0
"""Draft attention by FlashInfer's paged decode (written against flashinfer-python 0.7.0.post1).

FlashInfer reads pages of all heads; a view has its own tokens per KV head. So the cache is shown to it as
pages of one row each, with one KV head, and each (request, KV head) as a request of its own. Nothing is
copied: keys and values are two strided views of the cache, and row numbers take the place of page numbers.
"""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_magicdec.attention.rows import KVRows

ALIGNMENT = 16  # bytes; FlashInfer's vectorised loads
MAX_ROWS = 2**31  # page numbers are int32
WORKSPACE_BYTES = 128 * 2**20  # what FlashInfer recommends
# From here on a group fills enough of a tensor core's tile; CUDA cores know no groups of 5, 7 or above 8.
TENSOR_CORE_GROUP = 4


def row_pages(rows: KVRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as FlashInfer pages of one token and one KV head.

    Returns:
        two views [num_rows, 1, 1, head_size] with equal strides.

    Raises:
        ValueError: the cache's strides do not allow it.
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
        raise ValueError(
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


def fill_page_indices(
    indices: torch.Tensor,  # [at least num_reqs * num_kv_heads * budget + 1] int32, written
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
        return self.num_heads // self.num_kv_heads

    @property
    def use_tensor_cores(self) -> bool:
        return self.group >= TENSOR_CORE_GROUP

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


class FlashInferDecode:
    """Planned decode attention for a fixed number of requests; all layers share one plan.

    `run` may be captured in a CUDA graph: it swaps the layer's row numbers into the buffer that the plan
    was made with.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        num_reqs: int,
        max_budget: int,
        workspace: torch.Tensor,  # [WORKSPACE_BYTES] uint8, zeroed before its first use; may be shared
    ) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        device = workspace.device
        self._geometry = geometry
        num_lists = num_reqs * geometry.num_kv_heads
        self._lens = torch.ones(num_reqs, dtype=torch.int32, device=device)
        self._indptr = torch.zeros(num_lists + 1, dtype=torch.int32, device=device)
        # One cell more than can be used, see `fill_page_indices`.
        self._indices = torch.zeros(num_lists * max_budget + 1, dtype=torch.int32, device=device)
        self._last_page_len = torch.ones(num_lists, dtype=torch.int32, device=device)
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=geometry.use_tensor_cores,
            paged_kv_indptr_buffer=self._indptr,
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=self._last_page_len,
        )

    def plan(self, lens_cpu: torch.Tensor) -> None:
        """Plan for these lengths. `lens_cpu` [num_reqs] int32 on the host. Not capturable."""
        self._lens.copy_(lens_cpu)
        indptr = page_indptr(lens_cpu, self._geometry.num_kv_heads)
        self._wrapper.plan(
            indptr,
            self._indices[: int(indptr[-1])],
            torch.ones(indptr.shape[0] - 1, dtype=torch.int32),
            **self._geometry.plan_arguments(),
        )

    def run(
        self,
        query: torch.Tensor,  # [num_reqs, num_heads, head_size]
        rows: KVRows,
        slots: torch.Tensor,  # [num_reqs, num_kv_heads, up to max_budget] int32
    ) -> torch.Tensor:
        """Attend under the last plan. Returns [num_reqs, num_heads, head_size] in the query's dtype."""
        fill_page_indices(self._indices, rows, slots, self._lens, self._indptr)
        virtual_query = query.reshape(-1, self._geometry.group, query.shape[-1])
        return self._wrapper.run(virtual_query, row_pages(rows)).view(query.shape)


def attend(
    query: torch.Tensor,  # [num_reqs, num_heads, head_size]
    rows: KVRows,
    slots: torch.Tensor,  # [num_reqs, num_kv_heads, budget] int32
    lens: torch.Tensor,  # [num_reqs] int32
    *,
    scale: float,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """See `vllm_magicdec.attention.attend`. Plans and runs once."""
    num_reqs, num_heads, head_size = query.shape
    geometry = Geometry(
        num_heads, rows.num_kv_heads, head_size, query.dtype, rows.keys.rows.dtype, scale, soft_cap
    )
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    decode = FlashInferDecode(geometry, num_reqs=num_reqs, max_budget=slots.shape[-1], workspace=workspace)
    decode.plan(lens.cpu())
    return decode.run(query, rows, slots)
