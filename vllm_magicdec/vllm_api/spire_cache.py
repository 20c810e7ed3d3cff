# SPDX-License-Identifier: Apache-2.0
"""A SPIRe draft's cache, on both runners: it is made from what the target's own passes leave behind.

The draft reads no verified token. The target hands on its activations of every token that it takes, by
vLLM's auxiliary hidden states, and the memory of these goes to the draft's cache at once: of a prompt's
chunk, of a verification, of a plain step. So the draft's pages are as complete as the target's, with which
they share their numbers: who gets one from the prefix cache gets both, and a preempted request that comes
back has both written again. What was rejected is behind the verified tokens, where no step looks before it
has written there itself. So nothing has to be known about what was accepted, and nobody waits for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.interfaces import EagleModelMixin, supports_eagle3

from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.errors import MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.views.base import Batch
from vllm_magicdec.vllm_api.spire_model import MagicDecSpireForCausalLM


@dataclass(frozen=True)
class TargetStep:
    """What a step of the target took, and what it left behind; what it rejected is among it."""

    tokens: torch.Tensor  # [num_tokens] int32
    positions: torch.Tensor  # [num_tokens] int64, or [num_dims, num_tokens] under M-RoPE, of text
    # num_layers + 1 of the draft's, [num_tokens, hidden_size] each: before each of the blocks that these
    # were made from, and after the last one.
    activations: Sequence[torch.Tensor]
    slots: Mapping[str, torch.Tensor]  # [num_tokens or more] int64, by layer, the draft's among them


def refuse_target_without_activations(vllm_config: VllmConfig) -> None:
    """Refuse targets that vLLM has no auxiliary hidden states of, in a worker, before any weight is read.

    Raises:
        MagicDecConfigError: with the way out.
    """
    target_class = get_model_cls(vllm_config.model_config)
    if not supports_eagle3(target_class):
        raise MagicDecConfigError(
            f"{MODEL_METHOD}: vLLM does not hand out the activations of {target_class.__name__}, which "
            "a SPIRe draft reads; use a draft model of another kind"
        )


def handed_out(target: nn.Module) -> tuple[int, ...]:
    """Before which blocks a target hands out its activations; (): it does not say."""
    layers = (one.aux_hidden_state_layers for one in target.modules() if isinstance(one, EagleModelMixin))
    return next(filter(None, layers), ())


class SpireCache:
    """Keys and values of verified and of drafted tokens; see `drafting.drafter.OwnCache`.

    Args:
        model: the draft.
        target: its target.
    """

    def __init__(self, model: MagicDecSpireForCausalLM, target: nn.Module) -> None:
        self._model = model
        self._target: Any = target
        self._attentions = [layer.self_attn.attn for layer in model.model.layers]
        self._step: TargetStep | None = None  # None: it was not seen, and the round fails
        self._write_latest: Callable[[], None] | None = None

    def lay_out(self, groups: Sequence[LayerGroup]) -> None:
        """The KV cache is there.

        Args:
            groups: the draft's layers.

        Raises:
            MagicDecConfigError: the target hands out other activations than the draft was trained with, or
                their attention has no way to write keys and values alone.
        """
        wanted, handed = self._model.fields.aux_layers, handed_out(self._target)
        if handed and tuple(handed) != tuple(wanted):
            raise MagicDecConfigError(
                f"{MODEL_METHOD}: this SPIRe draft was trained with the target's activations before its "
                f"blocks {wanted}, and this vLLM hands out those before {handed}; use another draft model"
            )
        for attention in self._attentions:
            if not hasattr(attention.impl, "do_kv_cache_update"):
                raise MagicDecConfigError(
                    f"{MODEL_METHOD}: attention backend {attention.attn_backend.get_name()} writes the KV "
                    "cache of queries alone, and a SPIRe draft's holds memory; use --attention-backend "
                    "FLASH_ATTN or TRITON_ATTN"
                )
        group_of = {name: index for index, group in enumerate(groups) for name in group.layer_names}
        self._groups = [group_of[attention.layer_name] for attention in self._attentions]

    def warm_up(self, num_tokens: int) -> None:
        """Take what memory of the device the activations of a step take; there is no KV cache yet.

        Args:
            num_tokens: of the step.
        """
        weight = self._model.model.norm.weight
        nothing = weight.new_zeros(1, weight.shape[0]).expand(num_tokens, -1)
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=weight.device)
        self._model.memorise([nothing] * (len(self._attentions) + 1), positions, None)

    def note_step(self, step: TargetStep) -> None:
        """What the round is to begin with."""
        self._step = step

    def begin_round(self, batch: Batch) -> None:
        """See `drafting.drafter.OwnCache`; what was rejected of the step is written as well, unread."""
        self._write_latest = None  # of a round that failed
        # Not kept, as it is large.
        step, self._step = self._step, None
        assert step is not None
        self.write_verified(step)

    def catch_up(self, batch: Batch, num_steps: int) -> None:
        """See `drafting.drafter.OwnCache`; the round began with it."""

    def end_round(self, batch: Batch, drafts: torch.Tensor | Sequence[Sequence[int]]) -> None:
        """See `drafting.drafter.OwnCache`; nobody reads what the last pass has left."""
        self._write_latest = None

    def write_verified(self, step: TargetStep) -> None:
        """The memory of what the target's step took."""
        activations, positions = step.activations, step.positions
        num_tokens = len(step.tokens)
        if self._model.fields.aux_layers[0] == 0:  # which fused norms may have written over
            activations = [self._target.embed_input_ids(step.tokens), *activations[1:]]
        if positions.dim() == 2:
            positions = positions[0]
        slots = [step.slots[attention.layer_name][:num_tokens] for attention in self._attentions]
        self._model.memorise(activations, positions, slots)

    def begin_pass(self) -> None:
        """Another pass of the round follows: write what the one before has left."""
        write, self._write_latest = self._write_latest, None
        if write is not None:
            write()

    def end_pass(self, *left: Any) -> None:
        """Keep what a pass has left until another follows; `left` are arguments of `write_drafted`."""
        self._write_latest = partial(self.write_drafted, *left)

    def write_drafted(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        activations: Sequence[torch.Tensor],
        slots: Sequence[torch.Tensor],
    ) -> None:
        """The memory of a pass's tokens, which the pass has seen by their ordinary keys and values.

        Args:
            tokens: [num_tokens] int32.
            positions: [num_tokens] int64.
            activations: num_layers of [num_tokens or more, hidden_size], after each of the draft's blocks.
            slots: [num_tokens] int64 each, by group of layers.
        """
        if not self._model.fields.feedback_memory:
            return
        own = [self._model.embed_input_ids(tokens), *(each[: len(tokens)] for each in activations)]
        self._model.memorise(own, positions, [slots[group] for group in self._groups])
