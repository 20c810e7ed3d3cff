# SPDX-License-Identifier: Apache-2.0
"""A SPIRe draft on the V1 runner: its cache is made from what the target's own passes leave behind.

The draft reads no verified token. The target hands on its activations of every token that it takes, by
vLLM's auxiliary hidden states, and the memory of these goes to the draft's cache at once: of a prompt's
chunk, of a verification, of a plain step. So the draft's pages are as complete as the target's, with which
they share their numbers: who gets one from the prefix cache gets both, and a preempted request that comes
back has both written again. What was rejected is behind the verified tokens, where no step looks before it
has written there itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from vllm.logger import init_logger
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_magicdec import envs
from vllm_magicdec.drafting.drafter import OwnCache
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.errors import MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.views.base import Batch
from vllm_magicdec.vllm_api.drafts_v1 import LoadedDraft, draft_beyond_the_end
from vllm_magicdec.vllm_api.kv_cache import say_what_draft_takes
from vllm_magicdec.vllm_api.spire_model import MagicDecSpireForCausalLM

logger = init_logger(f"vllm.{__name__}")


class SpireDraft(LoadedDraft):
    """A model that takes verified tokens from the target's activations.

    A pass writes the ordinary keys and values of its tokens, which see themselves by them. Later passes of
    the round are to see their memory instead, which is not known before the pass ends: it is written when
    the next one begins, and after a round's last pass not at all.

    Args:
        proposer: makes its passes.
    """

    def __init__(self, proposer: Any) -> None:
        super().__init__(proposer)
        self._unwritten: Callable[[], None] | None = None
        self._verified: Callable[[], None] | None = None
        proposer.target_runner.use_aux_hidden_state_outputs = True

    def load(self, target: nn.Module) -> set[str]:
        """See `Draft`.

        Raises:
            MagicDecConfigError: the target shows no activations.
        """
        if not supports_eagle3(target):
            raise MagicDecConfigError(
                f"{MODEL_METHOD}: vLLM does not hand out the activations of {type(target).__name__}, which "
                "a SPIRe draft reads; use a draft model of another kind"
            )
        self._target: Any = target
        return super().load(target)

    def lay_out(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> None:
        """See `Draft`."""
        for layer in self._model.model.layers:
            attention = layer.self_attn.attn
            if not hasattr(attention.impl, "do_kv_cache_update"):
                raise MagicDecConfigError(
                    f"{MODEL_METHOD}: attention backend {attention.attn_backend.get_name()} writes the KV "
                    "cache of queries alone, and a SPIRe draft's holds memory; use --attention-backend "
                    "FLASH_ATTN or TRITON_ATTN"
                )
        self._group_of = {name: i for i, group in enumerate(groups) for name in group.layer_names}
        say_what_draft_takes(kv_cache_config, groups)
        draft_beyond_the_end(self._proposer)

    @property
    def own_cache(self) -> OwnCache:
        """See `Draft`."""
        return self

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
        self._verified = lambda: self._memorise_verified(
            self._target_token_ids, positions, activations, slots
        )

    def begin_round(self, batch: Batch) -> None:
        """See `drafting.drafter.OwnCache`; what was rejected of the step is written as well, unread."""
        self._unwritten = None
        write, self._verified = self._verified, None
        if write is not None:
            write()

    def catch_up(self, batch: Batch, num_steps: int) -> None:
        """See `drafting.drafter.OwnCache`; the round began with it."""

    def end_round(self, batch: Batch, drafts: torch.Tensor | Sequence[Sequence[int]]) -> None:
        """See `drafting.drafter.OwnCache`."""
        self._unwritten = None

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        attn_metadata: Mapping[str, Any],
    ) -> torch.Tensor:
        """See `Draft`."""
        num_tokens = tokens.shape[0]
        with self._in_pass(num_tokens, slots, attn_metadata) as num_padded:
            if self._unwritten is not None:
                self._unwritten()
            hidden_states, activations = self._run(tokens, positions, num_padded)
        if self._model.fields.feedback_memory:

            def write() -> None:
                embedded = self._model.embed_input_ids(tokens)
                own = torch.stack([embedded, *(each[:num_tokens] for each in activations)])
                self._model.memorise(own, positions, self._by_layer(slots))

            self._unwritten = write
        return hidden_states[:num_tokens]

    @property
    def _model(self) -> MagicDecSpireForCausalLM:
        return self._proposer.model

    def _by_layer(self, slots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """By layer what is by group of layers."""
        layers = self._model.model.layers
        return [slots[self._group_of[layer.self_attn.attn.layer_name]] for layer in layers]

    def _memorise_verified(
        self,
        tokens: torch.Tensor,  # [num_tokens] int32
        positions: torch.Tensor,
        activations: torch.Tensor,
        slots: Mapping[str, torch.Tensor],
    ) -> None:
        """See `Draft.note_activations`."""
        num_tokens, layers = len(activations), self._model.model.layers
        by_layer = activations.unflatten(1, (len(layers) + 1, -1)).transpose(0, 1)
        if self._model.fields.aux_layers[0] == 0:  # which fused norms may have written over
            by_layer = torch.cat([self._target.embed_input_ids(tokens)[None], by_layer[1:]])
        if positions.dim() == 2:  # M-RoPE's, of text
            positions = positions[0]
        self._model.memorise(
            by_layer,
            positions,
            [slots[layer.self_attn.attn.layer_name][:num_tokens] for layer in layers],
        )

    def _note_plain_step(self, scheduler_output: SchedulerOutput) -> None:
        """The runner asks no proposer about such a step, but keeps what the target has left behind.

        This is in the middle of the target's step, which is not to fail with it.
        """
        runner = self._proposer.target_runner
        state, num_tokens = runner.execute_model_state, scheduler_output.total_num_scheduled_tokens
        if state is None:  # nothing was scheduled
            return
        try:
            with torch.inference_mode():
                activations = torch.cat([each[:num_tokens] for each in state.aux_hidden_states], dim=1)
                positions = runner._get_positions(num_tokens)
                tokens = runner.input_ids.gpu[:num_tokens]
                self._memorise_verified(tokens, positions, activations, state.slot_mappings)
        except Exception:
            if envs.strict():
                raise
            logger.exception("%s: a plain step left no memory, which later drafts lack.", MODEL_METHOD)
