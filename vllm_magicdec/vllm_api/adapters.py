# SPDX-License-Identifier: Apache-2.0
"""LoRA: a request drafts with its own adapter.

vLLM sets the mapping of tokens to adapters before every step of the target, so drafting need not restore
it, and the target's step has loaded the batch's adapters. On a GPU, a new mapping synchronises with the
device, twice per round with adapters.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.nn as nn
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import LoRAMapping
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.lora_utils import LoraState


class Adapters:
    """Maps the tokens of draft passes to LoRA adapters."""

    def __init__(self, model: nn.Module, config: LoRAConfig) -> None:
        self._manager = model.lora_manager
        self._max_loras = config.max_loras
        self._ids = np.zeros(0, dtype=np.int64)

    def take(self, ids: np.ndarray) -> None:
        """Set the adapters of a round's requests, [num_reqs] int, in batch order; 0: none."""
        self._ids = ids.astype(np.int64)

    @property
    def num_active(self) -> int:
        """Number of distinct adapters, counting "none" if some requests have one; 0: no request has one."""
        distinct = np.unique(self._ids)
        return len(distinct) if distinct.any() else 0

    def apply(self, indices: Sequence[int] | np.ndarray, num_tokens: int = 1) -> None:
        """Apply the mapping of a pass; call it before the pass, outside of CUDA graphs.

        `indices` are those in the round's batch of requests with `num_tokens` each, or of each query's.
        """
        self._map(self._ids[indices], num_tokens)

    def apply_dummies(self, num_active: int, num_reqs: int) -> None:
        """Map the next `num_reqs` to vLLM's dummy adapters before a CUDA graph is captured.

        `num_active` is vLLM's count for a graph: adapters, plus one if some tokens have none.
        """
        num_adapters = min(num_active, self._max_loras)
        for lora_id in range(1, num_adapters + 1):
            self._manager.activate_adapter(lora_id)
        ids = 1 + np.arange(num_reqs) % num_adapters if num_adapters else np.zeros(num_reqs, dtype=np.int64)
        # With no adapter at all, vLLM's kernels would be missing from the graph.
        if num_adapters < num_active <= num_reqs:
            ids[-1] = 0
        self._map(ids, 1)

    def _map(self, ids: np.ndarray, num_tokens: int) -> None:
        # `is_prefill` as vLLM sets it, for decodes too.
        tokens, logits = tuple(ids.repeat(num_tokens).tolist()), tuple(ids.tolist())
        self._manager.set_adapter_mapping(LoRAMapping(tokens, logits, is_prefill=True))


def pass_adapters(runner: Any, batch: InputBatch) -> None:
    """Pass the adapters of a step's requests to the speculator, and fix vLLM's mapping of logits.

    vLLM 0.32's V2 runner maps one logit per request to an adapter, but a verification has 1 + drafts each.
    """
    state: LoraState = runner.lora_state
    ids = state.lora_ids[batch.idx_mapping_np]
    if runner.speculator.adapters is not None:
        runner.speculator.adapters.take(ids)
    of_logits = tuple(ids.repeat(np.diff(batch.cu_num_logits_np)).tolist())

    def make_lora_inputs(
        req_ids: list[str], *others: np.ndarray
    ) -> tuple[tuple[int, ...], tuple[int, ...], set[LoRARequest]]:
        _, tokens, requests = LoraState.make_lora_inputs(state, req_ids, *others)
        return of_logits, tokens, requests

    state.make_lora_inputs = make_lora_inputs  # type: ignore[assignment]  # of one object, without self
