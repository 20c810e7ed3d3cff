# SPDX-License-Identifier: Apache-2.0
"""A SPIRe draft's KV cache, on both runners, computed from the target's activations.

The draft runs no pass over verified tokens. After every step of the target (a prompt's chunk, verification
or plain step), vLLM's auxiliary hidden states of its tokens are turned into K/V and written to the draft's
pages. These share the target's page numbers and are always as complete as the target's, also in the prefix
cache and after preemption. Rejected tokens lie behind the verified ones and are overwritten before they are
read, so the cache need not know which drafts were accepted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.interfaces import EagleModelMixin, supports_eagle3

from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.drafting.ports import Cache
from vllm_magicdec.errors import MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.views.round import Batch
from vllm_magicdec.vllm_api.spire_model import MagicDecSpireForCausalLM


@dataclass(frozen=True)
class TargetActivations:
    """Inputs and activations of a step of the target, including rejected tokens."""

    tokens: torch.Tensor  # [num_tokens] int32
    positions: torch.Tensor  # [num_tokens] int64, or [num_dims, num_tokens] under M-RoPE, of text
    # Draft's num_layers + 1 of [num_tokens, hidden_size]: before each target block that a draft layer
    # corresponds to, and after the last one.
    activations: Sequence[torch.Tensor]
    slots: Mapping[str, torch.Tensor]  # [num_tokens or more] int64, by layer, including the draft's


def refuse_target_without_activations(vllm_config: VllmConfig) -> None:
    """Raise MagicDecConfigError, before weights are loaded, if vLLM returns no target activations."""
    target_class = get_model_cls(vllm_config.model_config)
    if not supports_eagle3(target_class):
        raise MagicDecConfigError(
            f"{MODEL_METHOD}: vLLM does not return the activations of {target_class.__name__}, which a "
            "SPIRe draft needs; use an ordinary draft model"
        )


class SpireCache(Cache):
    """Writes the K/V of verified and of drafted tokens."""

    is_own = True

    def __init__(self, model: MagicDecSpireForCausalLM, target: nn.Module) -> None:
        self._model = model
        self._target: Any = target
        self._attentions = [layer.self_attn.attn for layer in model.model.layers]
        self.num_activations = len(self._attentions) + 1
        # The target's step that the round begins with; None: not recorded, and the round fails.
        self.step: TargetActivations | None = None

    def lay_out(self, groups: Sequence[LayerGroup]) -> None:
        """Prepare for drafting, once vLLM has allocated the KV cache.

        Raises:
            MagicDecConfigError: the target returns other activations than the draft was trained with, or
                the attention backend cannot write keys and values without attending.
        """
        expected = self._model.fields.aux_layers
        layers = (
            one.aux_hidden_state_layers
            for one in self._target.modules()
            if isinstance(one, EagleModelMixin)
        )
        returned = next(filter(None, layers), ())  # (): unknown
        if returned and tuple(returned) != tuple(expected):
            raise MagicDecConfigError(
                f"{MODEL_METHOD}: this SPIRe draft was trained with the target's activations before its "
                f"blocks {expected}, and this vLLM returns those before {returned}; use another draft model"
            )
        for attention in self._attentions:
            if not hasattr(attention.impl, "do_kv_cache_update"):
                raise MagicDecConfigError(
                    f"{MODEL_METHOD}: attention backend {attention.attn_backend.get_name()} cannot write "
                    "a SPIRe draft's memory to the KV cache; use --attention-backend FLASH_ATTN or "
                    "TRITON_ATTN"
                )
        group_of = {name: index for index, group in enumerate(groups) for name in group.layer_names}
        self._groups = [group_of[attention.layer_name] for attention in self._attentions]

    def warm_up(self, num_tokens: int) -> None:
        """Allocate as much memory as a step of `num_tokens` does; there is no KV cache yet."""
        weight = self._model.model.norm.weight
        nothing = weight.new_zeros(1, weight.shape[0]).expand(num_tokens, -1)
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=weight.device)
        self._model.memorise([nothing] * self.num_activations, positions, None)

    @override
    def begin_round(self, batch: Batch) -> None:
        step, self.step = self.step, None  # frees the activations
        assert step is not None
        self.write_verified(step)

    def write_verified(self, step: TargetActivations) -> None:
        """Write the memory of the tokens in a step of the target."""
        activations, positions = step.activations, step.positions
        num_tokens = len(step.tokens)
        if self._model.fields.aux_layers[0] == 0:  # fused norms may have overwritten it
            activations = [self._target.embed_input_ids(step.tokens), *activations[1:]]
        if positions.dim() == 2:
            positions = positions[0]
        slots = [step.slots[attention.layer_name][:num_tokens] for attention in self._attentions]
        self._model.memorise(activations, positions, slots)

    def write_drafted(
        self,
        tokens: torch.Tensor,  # [num_tokens] int32
        positions: torch.Tensor,  # [num_tokens] int64
        activations: Sequence[torch.Tensor],  # of [num_tokens or more, hidden_size], after each block
        slots: Sequence[torch.Tensor],  # [num_tokens] int64 each, by layer group
    ) -> None:
        """Replace the K/V that a pass wrote of its tokens by their memory."""
        if not self._model.fields.feedback_memory:
            return
        own = [self._model.embed_input_ids(tokens), *(each[: len(tokens)] for each in activations)]
        self._model.memorise(own, positions, [slots[group] for group in self._groups])
