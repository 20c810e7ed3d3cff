# SPDX-License-Identifier: Apache-2.0
"""A SPIRe draft on the V1 runner."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_magicdec.drafting.drafter import OwnCache
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.vllm_api.drafts_v1 import LoadedDraft, draft_beyond_the_end
from vllm_magicdec.vllm_api.kv_cache import say_what_draft_takes
from vllm_magicdec.vllm_api.spire_cache import SpireCache, TargetStep, refuse_target_without_activations
from vllm_magicdec.vllm_api.spire_model import MagicDecSpireForCausalLM


class SpireDraft(LoadedDraft):
    """A model that takes verified tokens from the target's activations.

    Args:
        proposer: makes its passes.

    Raises:
        MagicDecConfigError: the target shows no activations.
    """

    def __init__(self, proposer: Any) -> None:
        super().__init__(proposer)
        refuse_target_without_activations(proposer.vllm_config)
        proposer.target_runner.use_aux_hidden_state_outputs = True

    def load(self, target: nn.Module) -> set[str]:
        """See `Draft`."""
        layer_names = super().load(target)
        self._cache = SpireCache(self._model, target)
        return layer_names

    def lay_out(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> None:
        """See `Draft`; raises what `SpireCache.lay_out` does."""
        self._cache.lay_out(groups)
        say_what_draft_takes(kv_cache_config, groups)
        draft_beyond_the_end(self._proposer)

    def warm_up(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """See `Draft`."""
        super().warm_up(num_tokens, *args, **kwargs)
        self._cache.warm_up(num_tokens)

    @property
    def own_cache(self) -> OwnCache:
        """See `Draft`."""
        return self._cache

    @property
    def note_plain_step(self) -> Callable[[SchedulerOutput], None]:
        """See `Draft`."""
        return self._note_plain_step

    @property
    def reads_ahead(self) -> bool:
        """See `Draft`; a token's memory is not there before its own pass has ended."""
        return not self._model.fields.feedback_memory

    def note_activations(
        self, positions: torch.Tensor, activations: torch.Tensor, slots: Mapping[str, torch.Tensor]
    ) -> None:
        """See `Draft`."""
        by_layer = activations.chunk(len(self._model.model.layers) + 1, dim=1)
        self._cache.note_step(TargetStep(self._target_token_ids, positions, by_layer, slots))

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        attn_metadata: Mapping[str, Any],
    ) -> torch.Tensor:
        """See `Draft`."""
        num_tokens = tokens.shape[0]
        self._cache.begin_pass()
        with self._in_pass(num_tokens, slots, attn_metadata) as num_padded:
            hidden_states, activations = self._run(tokens, positions, num_padded)
        self._cache.end_pass(tokens, positions, activations, slots)
        return hidden_states[:num_tokens]

    @property
    def _model(self) -> MagicDecSpireForCausalLM:
        return self._proposer.model

    def _note_plain_step(self, scheduler_output: SchedulerOutput) -> None:
        """The runner asks no proposer about such a step, but keeps what the target has left behind."""
        runner = self._proposer.target_runner
        state, num_tokens = runner.execute_model_state, scheduler_output.total_num_scheduled_tokens
        if state is None:  # nothing was scheduled
            return
        activations = [each[:num_tokens] for each in state.aux_hidden_states]
        tokens, positions = runner.input_ids.gpu[:num_tokens], runner._get_positions(num_tokens)
        with torch.inference_mode():
            self._cache.write_verified(TargetStep(tokens, positions, activations, state.slot_mappings))
