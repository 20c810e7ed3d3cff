# SPDX-License-Identifier: Apache-2.0
"""M-RoPE positions of a request's tokens.

vLLM computes those of the prompt when the request arrives. For generated tokens, all dimensions equal the
index plus the request's delta.
"""

from collections.abc import Iterable

import numpy as np
import torch
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu_input_batch import CachedRequestState


def positions_on_host(
    requests: Iterable[CachedRequestState],  # [num_reqs]
    indices: np.ndarray,  # [num_reqs, n] int, of tokens in their requests
) -> torch.Tensor:
    """Return positions from the V1 runner's state, [num_dims, num_reqs * n] int64 on the CPU."""
    parts = []
    for request, of_request in zip(requests, indices, strict=True):
        assert request.mrope_positions is not None and request.mrope_position_delta is not None
        num_known = request.mrope_positions.shape[1]
        known = request.mrope_positions[:, of_request[of_request < num_known]]
        generated = torch.from_numpy(of_request[of_request >= num_known]) + request.mrope_position_delta
        parts.append(torch.cat([known, generated.expand(len(known), -1)], dim=1))
    return torch.cat(parts, dim=1)


def positions_on_device(
    state: RopeState,
    rows: torch.Tensor,  # [num_reqs, 1] int64, of the requests in `state`
    indices: torch.Tensor,  # [num_reqs, n] int64, of tokens in their requests
    prompt_lens: torch.Tensor,  # [num_reqs, 1] int, numbers of tokens whose positions are in `state`
) -> torch.Tensor:
    """Return positions from the V2 runner's state, [num_dims, num_reqs * n] int64. Does not synchronise."""
    of_prompts = state.prefill_positions.gpu.unflatten(0, (-1, state.num_dims))
    known = of_prompts[rows, :, indices].long()  # [num_reqs, n, num_dims]
    generated = (indices + state.prefill_delta.gpu[rows]).unsqueeze(-1)
    return torch.where((indices < prompt_lens).unsqueeze(-1), known, generated).flatten(0, 1).T
