# SPDX-License-Identifier: Apache-2.0
"""A SPIRe draft on the V2 runner."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from typing_extensions import override
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_magicdec.drafting.drafter import OwnCache
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.vllm_api.drafts_v2 import LoadedDraft
from vllm_magicdec.vllm_api.kv_cache import log_draft_memory
from vllm_magicdec.vllm_api.spire_cache import SpireCache, TargetStep, refuse_target_without_activations

if TYPE_CHECKING:  # imports this module
    from vllm_magicdec.vllm_api.runner_v2 import MagicDecSpeculator


class SpireDraft(LoadedDraft):
    """A draft that computes the K/V of verified tokens from the target's activations.

    Every step of the target returns them, plain ones too, by `hooks.ACTIVATIONS_HOOK` or the registry of
    `patches/`. A pass writes its memory within its CUDA graph.

    Raises:
        MagicDecConfigError: vLLM does not return the target's activations.
    """

    def __init__(self, speculator: "MagicDecSpeculator") -> None:
        super().__init__(speculator)
        refuse_target_without_activations(speculator.vllm_config)

    @override
    def load(self, target: nn.Module, target_layer_names: set[str]) -> nn.Module:
        model: Any = super().load(target, target_layer_names)
        self._cache = SpireCache(model, target)
        self._has_memory = model.fields.feedback_memory
        return model

    @override
    def lay_out(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> None:
        self._cache.lay_out(groups)
        log_draft_memory(kv_cache_config, groups)

    @override
    def warm_up(self, inputs: InputBatch) -> None:
        hidden_states, _ = self._speculator.forward(inputs.input_ids, inputs.positions, {}, None)
        self._speculator.compute_draft_logits(hidden_states[: inputs.num_reqs], 0)
        self._cache.warm_up(inputs.num_tokens)

    @property
    @override
    def own_cache(self) -> OwnCache:
        return self._cache

    @property
    @override
    def reads_ahead(self) -> bool:
        # A token's memory exists only after its own pass.
        return not self._has_memory

    @override
    def note_step(
        self,
        inputs: InputBatch,
        slots: Mapping[str, torch.Tensor],
        activations: Sequence[torch.Tensor] | None,
    ) -> None:
        if activations is None:  # `SpireCache.begin_round` fails, which the drafter counts
            return
        taken = slice(inputs.num_tokens)  # without the padding of CUDA graphs
        by_layer = [each[taken] for each in activations]
        self._cache.note_step(TargetStep(inputs.input_ids[taken], inputs.positions[taken], by_layer, slots))

    @override
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        attn_metadata: Mapping[str, Any],
    ) -> torch.Tensor:
        speculator = self._speculator
        hidden_states, activations = speculator.forward(
            tokens, positions, speculator.slots_by_layer(slots), attn_metadata
        )
        self._cache.write_drafted(tokens, positions, activations, slots)
        return hidden_states
