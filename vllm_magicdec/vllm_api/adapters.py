# SPDX-License-Identifier: Apache-2.0
"""LoRA: a request drafts with its own adapter.

vLLM maps tokens to adapters before every step of the target, and again if the next step's tokens differ, so
a draft leaves nothing to put back. The adapters of a batch are loaded: the target's step has used them. On
a GPU a new mapping makes vLLM wait for the device, so that a round with adapters waits twice.
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
    """Which adapter a drafting pass applies to which token.

    Args:
        model: the target, with vLLM's LoRA manager.
        config: the engine's.
    """

    def __init__(self, model: nn.Module, config: LoRAConfig) -> None:
        self._manager = model.lora_manager
        self._max_loras = config.max_loras
        self._ids = np.zeros(0, dtype=np.int64)

    def take(self, ids: np.ndarray) -> None:
        """Those of a round's requests, [num_reqs] int, in the batch's order; 0: none."""
        self._ids = ids.astype(np.int64)

    @property
    def num_active(self) -> int:
        """Distinct ones, no adapter counted as one beside others; 0: the round has none at all."""
        distinct = np.unique(self._ids)
        return len(distinct) if distinct.any() else 0

    def apply(self, indices: Sequence[int] | None = None, num_tokens: int = 1) -> None:
        """To be called before a pass, outside of CUDA graphs.

        Args:
            indices: of the pass's requests in the round; None: all of them.
            num_tokens: of each.
        """
        self._map(self._ids if indices is None else self._ids[list(indices)], num_tokens)

    def apply_dummies(self, num_active: int, num_reqs: int) -> None:
        """To be called before a CUDA graph is captured, while vLLM's dummy adapters are loaded.

        Args:
            num_active: as vLLM counts what a graph is for: adapters, and one more if it has tokens without.
            num_reqs: of the graph.
        """
        num_adapters = min(num_active, self._max_loras)
        for lora_id in range(1, num_adapters + 1):
            self._manager.activate_adapter(lora_id)
        ids = 1 + np.arange(num_reqs) % num_adapters if num_adapters else np.zeros(num_reqs, dtype=np.int64)
        # Without any adapter vLLM's kernels would not be in the graph at all.
        if num_adapters < num_active <= num_reqs:
            ids[-1] = 0
        self._map(ids, 1)

    def _map(self, ids: np.ndarray, num_tokens: int) -> None:
        # As vLLM calls it for every step: of decodes too.
        tokens, logits = tuple(ids.repeat(num_tokens).tolist()), tuple(ids.tolist())
        self._manager.set_adapter_mapping(LoRAMapping(tokens, logits, is_prefill=True))


def know_adapters(runner: Any, batch: InputBatch) -> None:
    """Tell the speculator which adapters a step's requests have, and vLLM those of the step's logits.

    vLLM 0.32's V2 runner maps one logit per request to an adapter; a verification has 1 + drafts of them.

    Args:
        runner: V2's, with our speculator.
        batch: that it has prepared.
    """
    state: LoraState = runner.lora_state
    ids = state.lora_ids[batch.idx_mapping_np]
    runner.speculator.take_adapters(ids)
    of_logits = tuple(ids.repeat(np.diff(batch.cu_num_logits_np)).tolist())

    def make_lora_inputs(
        req_ids: list[str], *others: np.ndarray
    ) -> tuple[tuple[int, ...], tuple[int, ...], set[LoRARequest]]:
        _, tokens, requests = LoraState.make_lora_inputs(state, req_ids, *others)
        return of_logits, tokens, requests

    state.make_lora_inputs = make_lora_inputs  # type: ignore[assignment]  # of one object, without self
