# SPDX-License-Identifier: Apache-2.0
"""M-RoPE positions of a request's tokens: of images and videos in several dimensions, of text in all alike.

What is generated is as far from its index as the request's delta says, in every channel. A prompt's tokens
have positions that vLLM computed when the request came.
"""

from collections.abc import Iterable

import numpy as np
import torch
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu_input_batch import CachedRequestState


def positions_on_host(requests: Iterable[CachedRequestState], places: np.ndarray) -> torch.Tensor:
    """As the V1 runner keeps them, [num_dims, places.size] int64 on the CPU.

    Args:
        requests: [num_reqs].
        places: [num_reqs, n] int, indices of tokens in their requests.
    """
    parts = []
    for request, of_request in zip(requests, places, strict=True):
        assert request.mrope_positions is not None and request.mrope_position_delta is not None
        num_known = request.mrope_positions.shape[1]
        known = request.mrope_positions[:, of_request[of_request < num_known]]
        generated = torch.from_numpy(of_request[of_request >= num_known]) + request.mrope_position_delta
        parts.append(torch.cat([known, generated.expand(len(known), -1)], dim=1))
    return torch.cat(parts, dim=1)


def positions_on_device(
    state: RopeState, rows: torch.Tensor, places: torch.Tensor, prompt_lens: torch.Tensor
) -> torch.Tensor:
    """As the V2 runner keeps them, [num_dims, places.numel()] int64. No host synchronisation.

    Args:
        state: of all requests.
        rows: [num_reqs, 1] int64, of the requests in it.
        places: [num_reqs, n] int64, indices of tokens in their requests.
        prompt_lens: [num_reqs, 1] int, tokens whose positions `state` knows.
    """
    of_prompts = state.prefill_positions.gpu.unflatten(0, (-1, state.num_dims))
    known = of_prompts[rows, :, places].long()  # [num_reqs, n, num_dims]
    generated = (places + state.prefill_delta.gpu[rows]).unsqueeze(-1)
    return torch.where((places < prompt_lens).unsqueeze(-1), known, generated).flatten(0, 1).T
