# SPDX-License-Identifier: Apache-2.0
"""Drafts other than the target itself on the V1 runner."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.drafting.model_cache import ModelCache
from vllm_magicdec.drafting.ports import Cache
from vllm_magicdec.vllm_api.attention_groups import refuse_small_buffers
from vllm_magicdec.vllm_api.draft_weights import QuantisedCopy
from vllm_magicdec.vllm_api.embeddings import refuse_more_inputs
from vllm_magicdec.vllm_api.kv_cache import log_draft_memory, refuse_draft_without_whole_context
from vllm_magicdec.vllm_api.runner_v1 import MagicDecProposer
from vllm_magicdec.vllm_api.runner_wrappers import bypass_rejection_sampler
from vllm_magicdec.vllm_api.spire_cache import (
    SpireCache,
    TargetActivations,
    refuse_target_without_activations,
)


class LoadedProposer(MagicDecProposer):
    """A proposer whose draft is a model that vLLM loads as for `draft_model`."""

    @override
    def load_model(self, target_model: nn.Module) -> None:
        DraftModelProposer.load_model(self, target_model)

    @override
    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        DraftModelProposer.dummy_run(self, *args, **kwargs)

    @override
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        attn_metadata: Mapping[str, Any],
    ) -> Any:
        num_tokens = tokens.shape[0]
        # In vLLM's buffers, whose alignment the compiled model expects.
        input_ids = self.input_ids[:num_tokens].copy_(tokens)
        own_positions = self.positions[:num_tokens].copy_(positions)
        with self._in_pass(num_tokens, slots, attn_metadata):
            return self.model(input_ids=input_ids, positions=own_positions, inputs_embeds=None)


class QuantisedProposer(LoadedProposer):
    """A proposer whose draft is a quantised copy of the target, over the target's KV cache."""

    @override
    def load_model(self, target_model: nn.Module) -> None:
        MagicDecProposer.load_model(self, target_model)
        weights = self.speculative_config.draft_weights
        self._copy = QuantisedCopy(target_model, self.vllm_config, weights, self.device)
        self.model = self._copy.model

    @override
    def update_weights(self) -> None:
        self._copy.update()


class ModelProposer(LoadedProposer):
    """A proposer whose draft computes the K/V of all tokens itself (`drafting/model_cache.py`)."""

    _cache: ModelCache

    @override
    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        refuse_more_inputs(self.model)

    @property
    def _may_lag(self) -> bool:
        # For layers with a window vLLM may have freed the pages that they need.
        config = self.speculative_config.draft_model_config.hf_text_config
        return not any(getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))

    @override
    def _bypass_rejection_sampler(self) -> None:
        if self._may_lag:
            bypass_rejection_sampler(self.target_runner, may_skip=self._may_skip)

    def _may_skip(self, scheduler_output: SchedulerOutput) -> bool:
        cached = scheduler_output.scheduled_cached_reqs
        ends = [number + 1 for number in cached.num_computed_tokens]
        return not scheduler_output.scheduled_new_reqs and self._drafter.follow_plain_step(
            lambda: self._cache.skip_plain_step(cached.req_ids, ends)
        )

    @override
    def _make_cache(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> Cache:
        refuse_draft_without_whole_context(groups)
        refuse_small_buffers(self._attention_groups)
        log_draft_memory(kv_cache_config, groups)
        self._draft_beyond_the_end()
        return ModelCache(
            self,
            groups,
            max_num_reqs=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_model_len=self.max_model_len,
            knows_accepted=True,
            may_lag=self._may_lag,
        )


class SpireProposer(LoadedProposer):
    """A proposer whose draft computes the K/V of verified tokens from the target's activations.

    Raises:
        MagicDecConfigError: vLLM does not return the target's activations.
    """

    _cache: SpireCache

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        refuse_target_without_activations(vllm_config)
        runner.use_aux_hidden_state_outputs = True

    @override
    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self._cache = SpireCache(self.model, target_model)
        # A token's memory exists only after its own pass.
        self.reads_ahead = not self.model.fields.feedback_memory

    @override
    def _bypass_rejection_sampler(self) -> None:
        def follow(scheduler_output: SchedulerOutput) -> None:
            self._drafter.follow_plain_step(lambda: self._write_plain_step(scheduler_output))

        bypass_rejection_sampler(self.target_runner, may_skip=lambda _: True, follow=follow)

    def _write_plain_step(self, scheduler_output: SchedulerOutput) -> bool:
        """Write the memory of a plain step, whose activations the runner keeps; False if there is none."""
        runner = self.target_runner
        state, num_tokens = runner.execute_model_state, scheduler_output.total_num_scheduled_tokens
        if state is None:
            return False
        activations = [each[:num_tokens] for each in state.aux_hidden_states]
        tokens, positions = runner.input_ids.gpu[:num_tokens], runner._get_positions(num_tokens)
        with torch.inference_mode():
            self._cache.write_verified(
                TargetActivations(tokens, positions, activations, state.slot_mappings)
            )
        return True

    @override
    def _make_cache(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> Cache:
        self._cache.lay_out(groups)
        log_draft_memory(kv_cache_config, groups)
        self._draft_beyond_the_end()
        return self._cache

    @override
    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        super().dummy_run(num_tokens, *args, **kwargs)
        self._cache.warm_up(num_tokens)

    @override
    def _note_activations(
        self, positions: torch.Tensor, activations: torch.Tensor, slots: Mapping[str, torch.Tensor]
    ) -> None:
        by_layer = activations.chunk(len(self.model.model.layers) + 1, dim=1)
        self._cache.note_step(TargetActivations(self._target_token_ids, positions, by_layer, slots))

    @override
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        attn_metadata: Mapping[str, Any],
    ) -> torch.Tensor:
        self._cache.begin_pass()
        hidden_states, activations = super().forward(tokens, positions, slots, attn_metadata)
        self._cache.end_pass(tokens, positions, activations, slots)
        own: torch.Tensor = hidden_states
        return own


def proposer_class(vllm_config: VllmConfig) -> type[MagicDecProposer]:
    """Return the proposer for the target, a quantised copy of it, a draft model or a SPIRe draft."""
    spec = vllm_config.speculative_config
    assert isinstance(spec, MagicDecSpeculativeConfig)
    if spec.spire is not None:
        return SpireProposer
    if spec.has_draft_model:
        return ModelProposer
    return MagicDecProposer if spec.draft_weights == "target" else QuantisedProposer


def make_proposer(vllm_config: VllmConfig, device: torch.device, runner: Any) -> MagicDecProposer:
    """Create the proposer of an engine; the registry of `patches/` calls it."""
    return proposer_class(vllm_config)(vllm_config, device, runner)
