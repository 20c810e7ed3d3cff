# SPDX-License-Identifier: Apache-2.0
"""Draft models on the V1 runner."""

from typing import Any

import torch
import torch.nn as nn
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from vllm_magicdec.drafting.model_cache import ModelCache
from vllm_magicdec.vllm_api.draft_runner import ModelDraft, SpireDraft, choose_class
from vllm_magicdec.vllm_api.embeddings import refuse_more_inputs
from vllm_magicdec.vllm_api.runner_v1 import MagicDecProposer
from vllm_magicdec.vllm_api.runner_wrappers import bypass_rejection_sampler
from vllm_magicdec.vllm_api.spire_cache import TargetActivations, refuse_target_without_activations


class LoadedProposer(MagicDecProposer):
    """A proposer whose draft is a model that vLLM loads as for `draft_model`."""

    @override
    def load_model(self, target_model: nn.Module) -> None:
        DraftModelProposer.load_model(self, target_model)
        refuse_more_inputs(self.model)


class ModelProposer(ModelDraft, LoadedProposer):
    """A proposer with a draft model."""

    _cache: ModelCache

    @override
    def _bypass_rejection_sampler(self) -> None:
        bypass_rejection_sampler(self.target_runner, may_skip=self._may_skip)

    def _may_skip(self, scheduler_output: SchedulerOutput) -> bool:
        cached = scheduler_output.scheduled_cached_reqs
        ends = [number + 1 for number in cached.num_computed_tokens]
        return not scheduler_output.scheduled_new_reqs and self._drafter.follow_plain_step(
            lambda: self._cache.skip_plain_step(cached.req_ids, ends)
        )


class SpireProposer(SpireDraft, LoadedProposer):
    """A proposer with a SPIRe draft.

    Raises:
        MagicDecConfigError: vLLM does not return the target's activations.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        refuse_target_without_activations(vllm_config)
        runner.use_aux_hidden_state_outputs = True

    @override
    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self._follow_target(self.model, target_model)

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
    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        super().dummy_run(num_tokens, *args, **kwargs)
        self._cache.warm_up(num_tokens)


def proposer_class(vllm_config: VllmConfig) -> type[MagicDecProposer]:
    """Return the proposer for what the engine drafts with."""
    return choose_class(vllm_config, MagicDecProposer, ModelProposer, SpireProposer)


def make_proposer(vllm_config: VllmConfig, device: torch.device, runner: Any) -> MagicDecProposer:
    """Create the proposer of an engine; the registry of `patches/` calls it."""
    return proposer_class(vllm_config)(vllm_config, device, runner)
