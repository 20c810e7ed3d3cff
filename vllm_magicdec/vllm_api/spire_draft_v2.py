# SPDX-License-Identifier: Apache-2.0
"""A SPIRe draft on the V2 runner."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_magicdec.drafting.drafter import OwnCache
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.vllm_api.drafts_v2 import LoadedDraft
from vllm_magicdec.vllm_api.kv_cache import say_what_draft_takes
from vllm_magicdec.vllm_api.spire_cache import SpireCache, TargetStep, refuse_target_without_activations

if TYPE_CHECKING:  # it makes what is here
    from vllm_magicdec.vllm_api.runner_v2 import MagicDecSpeculator


class SpireDraft(LoadedDraft):
    """A model that takes verified tokens from the target's activations.

    Those come with every step of the target, plain ones too, by a hook (`hooks.ACTIVATIONS_HOOK`). What a
    pass writes is part of its CUDA graph.

    Args:
        speculator: makes its passes.

    Raises:
        MagicDecConfigError: the target shows no activations.
    """

    def __init__(self, speculator: "MagicDecSpeculator") -> None:
        super().__init__(speculator)
        refuse_target_without_activations(speculator.vllm_config)

    def load(self, target: nn.Module, target_layer_names: set[str]) -> nn.Module:
        """See `Draft`."""
        model: Any = super().load(target, target_layer_names)
        self._cache = SpireCache(model, target)
        self._has_memory = model.fields.feedback_memory
        return model

    def lay_out(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> None:
        """See `Draft`; raises what `SpireCache.lay_out` does."""
        self._cache.lay_out(groups)
        say_what_draft_takes(kv_cache_config, groups)

    def warm_up(self, inputs: InputBatch) -> None:
        """See `Draft`."""
        hidden_states, _ = self._speculator.forward(inputs.input_ids, inputs.positions, {}, None)
        self._speculator.compute_draft_logits(hidden_states[: inputs.num_reqs], 0)
        self._cache.warm_up(inputs.num_tokens)

    @property
    def own_cache(self) -> OwnCache:
        """See `Draft`."""
        return self._cache

    @property
    def reads_ahead(self) -> bool:
        """See `Draft`; a token's memory is not there before its own pass has ended."""
        return not self._has_memory

    def note_step(
        self,
        inputs: InputBatch,
        slots: Mapping[str, torch.Tensor],
        activations: Sequence[torch.Tensor] | None,
    ) -> None:
        """See `Draft`."""
        if activations is None:  # the drafter finds that out, where failures are counted
            return
        taken = slice(inputs.num_tokens)  # what lies behind pads a graph
        by_layer = [each[taken] for each in activations]
        self._cache.note_step(TargetStep(inputs.input_ids[taken], inputs.positions[taken], by_layer, slots))

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        attn_metadata: Mapping[str, Any],
    ) -> torch.Tensor:
        """See `Draft`."""
        speculator = self._speculator
        hidden_states, activations = speculator.forward(
            tokens, positions, speculator.slots_by_layer(slots), attn_metadata
        )
        self._cache.write_drafted(tokens, positions, activations, slots)
        return hidden_states
