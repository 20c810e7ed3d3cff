# SPDX-License-Identifier: Apache-2.0
"""What drafts have in common on vLLM's two model runners."""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.nn as nn
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.utils import AttentionGroup

from vllm_magicdec.adaptive.metrics import Counts
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.drafting.drafter import Drafter
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.drafting.model_cache import ModelCache
from vllm_magicdec.drafting.ports import Cache, Target
from vllm_magicdec.errors import MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.vllm_api.adapters import Adapters
from vllm_magicdec.vllm_api.attention_groups import (
    attention_groups_of,
    refuse_small_buffers,
    refuse_split_pages,
)
from vllm_magicdec.vllm_api.draft_weights import QuantisedCopy
from vllm_magicdec.vllm_api.kv_cache import layer_groups
from vllm_magicdec.vllm_api.page_metadata import PageMetadata
from vllm_magicdec.vllm_api.spire_cache import SpireCache, TargetActivations

_Class = TypeVar("_Class")


class DraftRunner:
    """A base beside vLLM's class, which has the fields, for a draft that is the target or its copy.

    Subclasses implement `drafting.ports.Target`.
    """

    vllm_config: VllmConfig
    speculative_config: MagicDecSpeculativeConfig
    device: torch.device
    max_num_tokens: int
    reads_ahead = True
    """Whether a pass may take several unverified tokens of a request."""
    adapters: Adapters | None = None
    """LoRA adapters, which apply to the target only."""
    _copy: QuantisedCopy | None = None  # of the target, which drafts in its place
    _drafter: Drafter  # created when vLLM has laid out the KV cache

    @property
    def counts(self) -> Counts:
        """This worker's counts since they were last sent."""
        return self._drafter.counts

    def update_weights(self) -> None:
        """Follow an update of the target's weights, for drafts that copy them."""
        if self._copy is not None:
            self._copy.update()

    def _note_step(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        activations: torch.Tensor | Sequence[torch.Tensor] | None,
        slots: Mapping[str, torch.Tensor],
    ) -> None:
        """Record the target's step, for drafts that use its activations.

        Args:
            tokens: [num_tokens] int32, verified ones and drafts.
            positions: [num_tokens] int64, or [num_dims, num_tokens] under M-RoPE.
            activations: vLLM's auxiliary hidden states, if requested: of [num_tokens or more, hidden_size]
                by layer, or concatenated over layers on the V1 runner.
            slots: [num_tokens or more] int64, slots of the tokens' K/V, by layer, including the draft's.
        """

    def _drafting_model(self, target_model: nn.Module) -> nn.Module:
        """Return the target, or its copy with other weights (`draft_weights`)."""
        weights = self.speculative_config.draft_weights
        if weights == "target":
            return target_model
        self._copy = QuantisedCopy(target_model, self.vllm_config, weights, self.device)
        return self._copy.model

    def _take_adapters_of(self, target_model: nn.Module) -> None:
        if self.vllm_config.lora_config is not None:
            self.adapters = Adapters(target_model, self.vllm_config.lora_config)

    def _lay_out(
        self,
        kv_cache_config: KVCacheConfig,
        layer_names: Container[str] | None,
        builders: Sequence[Sequence[AttentionGroup]],
        target_groups: Sequence[Sequence[AttentionGroup]],
    ) -> None:
        """Create the drafter, once vLLM has laid out the KV cache.

        Args:
            layer_names: the draft's attention layers; None: all layers.
            builders: vLLM's attention groups with builders that the draft's layers may use, by KV-cache
                group.
            target_groups: those of the target.
        """
        groups = layer_groups(self.vllm_config, kv_cache_config, layer_names)
        self._attention_groups = [
            attention_groups_of(group, builders, self.vllm_config, self.device) for group in groups
        ]
        self._cache = self._make_cache(groups)
        target = cast(Target, self)
        self._drafter = Drafter(target, self.vllm_config, groups, kv_cache_config, self.device, self._cache)
        if self._drafter.has_pages:
            refuse_split_pages(self._attention_groups, are_of_layers=self._drafter.has_layer_pages)
        self.page_metadata = PageMetadata(
            kv_cache_config,
            target_groups,
            self._attention_groups,
            groups,
            self.vllm_config.scheduler_config.max_num_seqs,
            self.device,
            {*self._queries_of_steps, *self.speculative_config.round_lengths},
        )

    @property
    def _queries_of_steps(self) -> Sequence[int]:
        """Possible numbers of queries per request in a step's pass."""
        return range(1, 2 + self._cache.max_added)

    def _make_cache(self, groups: Sequence[LayerGroup]) -> Cache:
        """Return the KV cache that the draft reads, once vLLM has allocated it."""
        return Cache()

    def _slots_by_layer(self, slots: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return slots by layer; `slots` [num_tokens] int64 each, by layer group."""
        groups = zip(slots, self._drafter.groups, strict=True)
        return {name: own for own, group in groups for name in group.layer_names}


class ModelDraft(DraftRunner):
    """A draft model that computes the K/V of all tokens itself (`drafting/model_cache.py`)."""

    @override
    def _make_cache(self, groups: Sequence[LayerGroup]) -> Cache:
        if groups[0].reach is not None:  # layers without a window come first
            raise MagicDecConfigError(
                f"{MODEL_METHOD}: no layer of this draft model sees the whole context, and vLLM frees "
                "pages outside of windows; use vLLM's method 'draft_model' with it"
            )
        refuse_small_buffers(self._attention_groups)
        return ModelCache(
            cast(Target, self),
            groups,
            max_num_reqs=self.vllm_config.scheduler_config.max_num_seqs,
            max_num_tokens=self.max_num_tokens,
            max_model_len=self.vllm_config.model_config.max_model_len,
            knows_accepted=not self.vllm_config.use_v2_model_runner,
        )


class SpireDraft(DraftRunner):
    """A draft model that computes the K/V of verified tokens from the target's activations."""

    _cache: SpireCache

    def _follow_target(self, model: Any, target_model: nn.Module) -> None:
        self._cache = SpireCache(model, target_model)
        # A token's memory exists only after its own pass.
        self.reads_ahead = not model.fields.feedback_memory

    @override
    def _note_step(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        activations: torch.Tensor | Sequence[torch.Tensor] | None,
        slots: Mapping[str, torch.Tensor],
    ) -> None:
        if activations is None:  # `SpireCache.begin_round` fails, which the drafter counts
            return
        if isinstance(activations, torch.Tensor):
            activations = activations.chunk(self._cache.num_activations, dim=1)
        # Without the padding of CUDA graphs.
        activations = [each[: len(tokens)] for each in activations]
        self._cache.step = TargetActivations(tokens, positions, activations, slots)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run a pass on the runner, and write its tokens' memory."""
        hidden_states: torch.Tensor
        hidden_states, activations = cast(Any, super()).forward(*args, **kwargs)
        tokens, positions, slots, *_ = args
        if slots:  # there is a KV cache
            self._cache.write_drafted(tokens, positions, activations, slots)
        return hidden_states

    @override
    def _make_cache(self, groups: Sequence[LayerGroup]) -> Cache:
        self._cache.lay_out(groups)
        return self._cache


@contextmanager
def without_kv_connector() -> Iterator[None]:
    """Hide a draft pass from the KV connector (`--kv-transfer-config`, `--kv-offloading-size`).

    Once per step, vLLM's attention layers let the connector wait for and save the K/V of verified tokens.
    In a draft pass they would save again, or the connector would count too many layers.
    """
    # As vLLM does for its own dummy passes (`ActiveKVConnector.set_disabled`).
    connector, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, None
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = connector


def choose_class(vllm_config: VllmConfig, own: _Class, model: _Class, spire: _Class) -> _Class:
    """Return the class for the target or its copy, a draft model, or a SPIRe draft."""
    spec = vllm_config.speculative_config
    assert isinstance(spec, MagicDecSpeculativeConfig)
    if not spec.has_draft_model:
        return own
    return model if spec.spire is None else spire
