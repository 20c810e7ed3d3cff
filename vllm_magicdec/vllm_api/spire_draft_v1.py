# SPDX-License-Identifier: Apache-2.0
"""A SPIRe draft on the V1 runner."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from typing_extensions import override
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_magicdec.drafting.drafter import OwnCache
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.vllm_api.drafts_v1 import LoadedDraft, draft_beyond_the_end
from vllm_magicdec.vllm_api.kv_cache import log_draft_memory
from vllm_magicdec.vllm_api.spire_cache import SpireCache, TargetStep, refuse_target_without_activations
from vllm_magicdec.vllm_api.spire_model import MagicDecSpireForCausalLM


class SpireDraft(LoadedDraft):
    """A draft that computes the K/V of verified tokens from the target's activations.

    Raises:
        MagicDecConfigError: vLLM does not return the target's activations.
    """

    follows_plain_steps = True

    def __init__(self, proposer: Any) -> None:
        super().__init__(proposer)
        refuse_target_without_activations(proposer.vllm_config)
        proposer.target_runner.use_aux_hidden_state_outputs = True

    @override
    def load(self, target: nn.Module) -> set[str]:
        layer_names = super().load(target)
        self._cache = SpireCache(self._model, target)
        return layer_names

    @override
    def lay_out(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> None:
        self._cache.lay_out(groups)
        log_draft_memory(kv_cache_config, groups)
        draft_beyond_the_end(self._proposer)

    @override
    def warm_up(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        super().warm_up(num_tokens, *args, **kwargs)
        self._cache.warm_up(num_tokens)

    @property
    @override
    def own_cache(self) -> OwnCache:
        return self._cache

    @property
    @override
    def reads_ahead(self) -> bool:
        # A token's memory exists only after its own pass.
        return not self._model.fields.feedback_memory

    @override
    def note_activations(
        self, positions: torch.Tensor, activations: torch.Tensor, slots: Mapping[str, torch.Tensor]
    ) -> None:
        by_layer = activations.chunk(len(self._model.model.layers) + 1, dim=1)
        self._cache.note_step(TargetStep(self._target_token_ids, positions, by_layer, slots))

    @override
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        attn_metadata: Mapping[str, Any],
    ) -> torch.Tensor:
        num_tokens = tokens.shape[0]
        self._cache.begin_pass()
        with self._in_pass(num_tokens, slots, attn_metadata) as num_padded:
            hidden_states, activations = self._run(tokens, positions, num_padded)
        self._cache.end_pass(tokens, positions, activations, slots)
        return hidden_states[:num_tokens]

    @property
    def _model(self) -> MagicDecSpireForCausalLM:
        return self._proposer.model

    @override
    def note_plain_step(self, scheduler_output: SchedulerOutput) -> None:
        # The runner does not call the proposer after such a step, but keeps the target's activations.
        runner = self._proposer.target_runner
        state, num_tokens = runner.execute_model_state, scheduler_output.total_num_scheduled_tokens
        if state is None:  # nothing was scheduled
            return
        activations = [each[:num_tokens] for each in state.aux_hidden_states]
        tokens, positions = runner.input_ids.gpu[:num_tokens], runner._get_positions(num_tokens)
        with torch.inference_mode():
            self._cache.write_verified(TargetStep(tokens, positions, activations, state.slot_mappings))
