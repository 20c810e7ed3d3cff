# SPDX-License-Identifier: Apache-2.0
"""Draft models on the V2 runner."""

import torch
import torch.nn as nn
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_magicdec.vllm_api.draft_runner import ModelDraft, SpireDraft, choose_class
from vllm_magicdec.vllm_api.runner_v2 import MagicDecSpeculator
from vllm_magicdec.vllm_api.spire_cache import refuse_target_without_activations


class LoadedSpeculator(MagicDecSpeculator):
    """A speculator whose draft is a model that vLLM loads as for `draft_model`."""

    @override
    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        return StandaloneARSpeculator.load_draft_model(self, target_model, target_attn_layer_names)


class ModelSpeculator(ModelDraft, LoadedSpeculator):
    """A speculator with a draft model."""


class SpireSpeculator(SpireDraft, LoadedSpeculator):
    """A speculator with a SPIRe draft.

    Every step of the target returns its activations, plain ones too, by `hooks.ACTIVATIONS_HOOK` or the
    registry of `patches/`. A pass writes its memory within its CUDA graph.

    Raises:
        MagicDecConfigError: vLLM does not return the target's activations.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> None:
        super().__init__(vllm_config, device, req_states)
        refuse_target_without_activations(vllm_config)

    @override
    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        model = super().load_draft_model(target_model, target_attn_layer_names)
        self._follow_target(model, target_model)
        return model

    @override
    def _warm_up(self, inputs: InputBatch) -> None:
        super()._warm_up(inputs)
        self._cache.warm_up(inputs.num_tokens)


def make_speculator(
    vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> MagicDecSpeculator:
    """Create the speculator of an engine; the registry of `patches/` calls it too."""
    made = choose_class(vllm_config, MagicDecSpeculator, ModelSpeculator, SpireSpeculator)
    return made(vllm_config, device, req_states)
