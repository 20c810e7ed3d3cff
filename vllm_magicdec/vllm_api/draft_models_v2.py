# SPDX-License-Identifier: Apache-2.0
"""Drafts other than the target itself on the V2 runner."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.drafting.model_cache import ModelCache
from vllm_magicdec.drafting.ports import Cache
from vllm_magicdec.vllm_api.attention_groups import refuse_small_buffers
from vllm_magicdec.vllm_api.draft_weights import QuantisedCopy
from vllm_magicdec.vllm_api.embeddings import refuse_more_inputs
from vllm_magicdec.vllm_api.kv_cache import log_draft_memory, refuse_draft_without_whole_context
from vllm_magicdec.vllm_api.runner_v2 import MagicDecSpeculator
from vllm_magicdec.vllm_api.spire_cache import (
    SpireCache,
    TargetActivations,
    refuse_target_without_activations,
)


class LoadedSpeculator(MagicDecSpeculator):
    """A speculator whose draft is a model that vLLM loads as for `draft_model`."""

    @override
    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        return StandaloneARSpeculator.load_draft_model(self, target_model, target_attn_layer_names)

    @override
    def _layer_names(self) -> set[str]:
        return self.draft_attn_layer_names

    @override
    def _refuse_inputs(self, model_state: Any) -> None:
        refuse_more_inputs(self.model)


class QuantisedSpeculator(MagicDecSpeculator):
    """A speculator whose draft is a quantised copy of the target, over the target's KV cache."""

    @override
    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        weights = self.speculative_config.draft_weights
        self._copy = QuantisedCopy(target_model, self.vllm_config, weights, self.device)
        return self._copy.model

    @override
    def update_weights(self) -> None:
        self._copy.update()

    @override
    def _warm_up(self, inputs: InputBatch) -> None:
        hidden_states = self.forward(inputs.input_ids, inputs.positions, {}, None)
        self.compute_draft_logits(hidden_states[: inputs.num_reqs], 0)


class ModelSpeculator(LoadedSpeculator):
    """A speculator whose draft computes the K/V of all tokens itself (`drafting/model_cache.py`)."""

    @override
    def _make_cache(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> Cache:
        refuse_draft_without_whole_context(groups)
        refuse_small_buffers(self.attn_groups)
        log_draft_memory(kv_cache_config, groups)
        return ModelCache(
            self,
            groups,
            max_num_reqs=self.max_num_reqs,
            max_num_tokens=self.max_num_tokens,
            max_model_len=self.max_model_len,
            knows_accepted=False,
            may_lag=all(group.reach is None for group in groups),
        )

    @override
    def _warm_up(self, inputs: InputBatch) -> None:
        hidden_states = self.forward(inputs.input_ids, inputs.positions, {}, None)
        self.compute_draft_logits(hidden_states[: inputs.num_reqs], 0)


class SpireSpeculator(LoadedSpeculator):
    """A speculator whose draft computes the K/V of verified tokens from the target's activations.

    Every step of the target returns them, plain ones too, by `hooks.ACTIVATIONS_HOOK` or the registry of
    `patches/`. A pass writes its memory within its CUDA graph.

    Raises:
        MagicDecConfigError: vLLM does not return the target's activations.
    """

    _cache: SpireCache

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> None:
        super().__init__(vllm_config, device, req_states)
        refuse_target_without_activations(vllm_config)

    @override
    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        model: Any = super().load_draft_model(target_model, target_attn_layer_names)
        self._cache = SpireCache(model, target_model)
        # A token's memory exists only after its own pass.
        self.reads_ahead = not model.fields.feedback_memory
        return model

    @override
    def _make_cache(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> Cache:
        self._cache.lay_out(groups)
        log_draft_memory(kv_cache_config, groups)
        return self._cache

    @override
    def _warm_up(self, inputs: InputBatch) -> None:
        hidden_states, _ = self.forward(inputs.input_ids, inputs.positions, {}, None)
        self.compute_draft_logits(hidden_states[: inputs.num_reqs], 0)
        self._cache.warm_up(inputs.num_tokens)

    @override
    def _note_activations(
        self,
        inputs: InputBatch,
        slots: Mapping[str, torch.Tensor],
        activations: Sequence[torch.Tensor] | None,
    ) -> None:
        if activations is None:  # `SpireCache.begin_round` fails, which the drafter counts
            return
        taken = slice(inputs.num_tokens)  # without the padding of CUDA graphs
        by_layer = [each[taken] for each in activations]
        self._cache.note_step(
            TargetActivations(inputs.input_ids[taken], inputs.positions[taken], by_layer, slots)
        )

    @override
    def _forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        attn_metadata: Mapping[str, Any],
    ) -> torch.Tensor:
        hidden_states: torch.Tensor
        hidden_states, activations = self.forward(
            tokens, positions, self.slots_by_layer(slots), attn_metadata
        )
        self._cache.write_drafted(tokens, positions, activations, slots)
        return hidden_states


def speculator_class(vllm_config: VllmConfig) -> type[MagicDecSpeculator]:
    """Return the speculator for the target, a quantised copy of it, a draft model or a SPIRe draft."""
    spec = vllm_config.speculative_config
    assert isinstance(spec, MagicDecSpeculativeConfig)
    if spec.spire is not None:
        return SpireSpeculator
    if spec.has_draft_model:
        return ModelSpeculator
    return MagicDecSpeculator if spec.draft_weights == "target" else QuantisedSpeculator


def make_speculator(
    vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> MagicDecSpeculator:
    """Create the speculator of an engine; the registry of `patches/` calls it too."""
    return speculator_class(vllm_config)(vllm_config, device, req_states)
