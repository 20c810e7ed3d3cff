# SPDX-License-Identifier: Apache-2.0
"""A stand-in for FlashInfer on a CPU: torch reads what FlashInfer is told to read."""

import math
import types
from typing import Any

import torch


class StandInWrapper:
    """`BatchDecodeWithPagedKVCacheWrapper` of flashinfer 0.7 in float32, with the arguments used here."""

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
        self._use_cuda_graph = use_cuda_graph
        self._use_tensor_cores = use_tensor_cores
        self._read: Any = buffers  # indptr, indices, last_page_len: what `run` reads

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8

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
    stand_in = types.ModuleType("flashinfer", __doc__)
    vars(stand_in)["BatchDecodeWithPagedKVCacheWrapper"] = StandInWrapper
    return stand_in
