# SPDX-License-Identifier: Apache-2.0
"""Checks of the target's activations for a SPIRe draft's cache; tests/engine/test_spire.py has its K/V."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from vllm.model_executor.models.interfaces import EagleModelMixin
from vllm.model_executor.models.llama import LlamaForCausalLM

from vllm_magicdec.errors import MagicDecConfigError
from vllm_magicdec.vllm_api import spire_cache
from vllm_magicdec.vllm_api.spire_cache import (
    SpireCache,
    TargetActivations,
    refuse_target_without_activations,
)


def test_targets_without_auxiliary_hidden_states_are_refused(monkeypatch):
    monkeypatch.setattr(spire_cache, "get_model_cls", lambda model_config: nn.Linear)
    with pytest.raises(MagicDecConfigError, match="the activations of Linear, which a SPIRe draft needs"):
        refuse_target_without_activations(SimpleNamespace(model_config=None))
    monkeypatch.setattr(spire_cache, "get_model_cls", lambda model_config: LlamaForCausalLM)
    refuse_target_without_activations(SimpleNamespace(model_config=None))


class Blocks(nn.Module, EagleModelMixin):
    aux_hidden_state_layers = (3, 4)


class ImaginedTarget(nn.Module):
    """Like a multimodal target of vLLM, which wraps the language model."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = nn.Module()
        self.language_model.model = Blocks()

    def embed_input_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, None] * 100


def imagined_cache(aux_layers: tuple[int, ...]) -> tuple[SpireCache, list[tuple]]:
    """Cache of a draft with one layer, and a list of the arguments of `memorise`."""
    written: list[tuple] = []
    attention = SimpleNamespace(layer_name="draft", impl=SimpleNamespace(do_kv_cache_update=None))
    layer = SimpleNamespace(self_attn=SimpleNamespace(attn=attention))
    model = SimpleNamespace(
        model=SimpleNamespace(layers=[layer]),
        fields=SimpleNamespace(aux_layers=aux_layers),
        memorise=lambda *args: written.append(args),
    )
    return SpireCache(model, ImaginedTarget()), written


@pytest.mark.parametrize("first", [0, 3])
def test_a_step_is_written_once_and_the_first_blocks_input_is_embedded_again(first):
    cache, written = imagined_cache((first, first + 1))
    activations = [torch.tensor([[1], [2], [3]]), torch.tensor([[4], [5], [6]])]
    step = TargetActivations(
        tokens=torch.tensor([7, 8, 9]),
        positions=torch.tensor([[4, 5, 6]] * 3),
        activations=activations,
        slots={"target": torch.arange(4), "draft": torch.arange(10, 14)},  # the last one is padding
    )
    cache.note_step(step)
    cache.begin_round(None)
    ((own, positions, slots),) = written
    assert own[0].flatten().tolist() == ([700, 800, 900] if first == 0 else [1, 2, 3])
    assert own[1] is activations[1]
    assert positions.tolist() == [4, 5, 6] and slots[0].tolist() == [10, 11, 12]
    # A prompt's activations are large and must be freed.
    assert cache._step is None


def test_activations_of_other_layers_are_refused():
    """They would silently lower acceptance."""
    groups = [SimpleNamespace(layer_names=["draft"])]
    imagined_cache((3, 4))[0].lay_out(groups)
    of_others = SpireCache(imagined_cache((0, 1))[0]._model, nn.Module())
    of_others.lay_out(groups)  # unknown layers are accepted
    with pytest.raises(MagicDecConfigError, match=r"blocks \(0, 1\), and .* those before \(3, 4\)"):
        imagined_cache((0, 1))[0].lay_out(groups)


def test_a_round_fails_if_the_step_was_not_recorded():
    """The drafter counts the failure."""
    with pytest.raises(AssertionError):
        imagined_cache((3, 4))[0].begin_round(None)
