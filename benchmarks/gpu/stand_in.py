# SPDX-License-Identifier: Apache-2.0
"""What has no code for a CPU: FlashInfer, and the synthetic acceptance of vLLM's rejection sampler."""

import sys
import types
from typing import Any

import torch


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
        self._use_cuda_graph = use_cuda_graph
        self._use_tensor_cores = use_tensor_cores
        self._read: Any = buffers  # indptr, indices, last_page_len: what `run` reads

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

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        keys, values = paged_kv_cache
        num_heads, num_kv_heads, head_dim, page_size = self._shape
        assert keys.stride() == values.stride() and keys.stride(-1) == 1
        assert (q.dtype, keys.dtype) == self._dtypes and q.shape[1:] == (num_heads, head_dim)
        assert keys.shape[1:] == values.shape[1:] == (page_size, num_kv_heads, head_dim)
        indptr, indices, last_page_len = self._read
        assert len(q) == len(indptr) - 1
        output = torch.empty_like(q)
        for request, query in enumerate(q.float()):
            pages = indices[indptr[request] : indptr[request + 1]].long()
            length = (len(pages) - 1) * page_size + int(last_page_len[request])
            k, v = (half[pages].flatten(0, 1)[:length].float().transpose(0, 1) for half in (keys, values))
            logits = query.unflatten(0, (num_kv_heads, -1)) @ k.transpose(1, 2) * self._scale
            if self._soft_cap:
                logits = self._soft_cap * torch.tanh(logits / self._soft_cap)
            output[request] = (logits.softmax(-1) @ v).flatten(0, 1)
        return output


def module() -> types.ModuleType:
    """What `import flashinfer` finds once this is in `sys.modules`."""
    stand_in = types.ModuleType("flashinfer", __doc__)
    vars(stand_in)["BatchDecodeWithPagedKVCacheWrapper"] = StandInWrapper
    return stand_in


def install() -> None:
    """Let this process's FlashInfer be the stand-in."""
    sys.modules["flashinfer"] = module()


def accept_synthetically(
    output_token_ids: torch.Tensor,  # [num_reqs, most drafts + 1], filled with placeholders
    cu_num_draft_tokens: torch.Tensor,  # [num_reqs], drafts up to and including each request
    draft_token_ids: torch.Tensor,  # [num_tokens]
    target_argmax: torch.Tensor,  # [num_tokens]
    bonus_token_ids: torch.Tensor,  # [num_reqs, 1]
    is_greedy: torch.Tensor | None,
    max_spec_len: int,
    uniform_probs: torch.Tensor | None,  # [num_tokens]
    synthetic_conditional_rates: torch.Tensor | None,  # [most drafts]
) -> None:
    """vLLM's `_rejection_greedy_sample` for greedy requests and `rejection_sample_method=synthetic`."""
    assert is_greedy is None or bool(is_greedy.all())
    assert uniform_probs is not None and synthetic_conditional_rates is not None
    first = 0
    for request, end in enumerate(cu_num_draft_tokens.tolist()):
        place, accepted = 0, True
        while accepted and first + place < end:
            accepted = bool(uniform_probs[first + place] < synthetic_conditional_rates[place])
            chosen = draft_token_ids if accepted else target_argmax
            output_token_ids[request, place] = chosen[first + place]
            place += 1
        if accepted:
            output_token_ids[request, place] = bonus_token_ids[request, 0]
        first = end


def install_synthetic_acceptance() -> None:
    """Let this process's V1 runner accept synthetically, which vLLM's C++ sampler refuses."""
    import vllm.v1.sample.rejection_sampler as rejection_sampler

    sample = rejection_sampler._rejection_greedy_sample

    def choose(*args: Any) -> None:
        (sample if args[-1] is None else accept_synthetically)(*args)

    vars(choose)["register_warmup"] = sample.register_warmup
    rejection_sampler._rejection_greedy_sample = choose
