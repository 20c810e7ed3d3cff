# SPDX-License-Identifier: Apache-2.0
"""Checks of the target's activations for a SPIRe draft's cache; tests/engine/test_spire.py has its K/V."""

from types import SimpleNamespace

import pytest
import torch.nn as nn
from vllm.model_executor.models.interfaces import EagleModelMixin
from vllm.model_executor.models.llama import LlamaForCausalLM

from vllm_magicdec.errors import MagicDecConfigError
from vllm_magicdec.vllm_api import spire_cache
from vllm_magicdec.vllm_api.spire_cache import SpireCache, refuse_target_without_activations


def test_targets_without_auxiliary_hidden_states_are_refused(monkeypatch):
    monkeypatch.setattr(spire_cache, "get_model_cls", lambda model_config: nn.Linear)
    with pytest.raises(MagicDecConfigError, match="the activations of Linear, which a SPIRe draft needs"):
        refuse_target_without_activations(SimpleNamespace(model_config=None))
    monkeypatch.setattr(spire_cache, "get_model_cls", lambda model_config: LlamaForCausalLM)
    refuse_target_without_activations(SimpleNamespace(model_config=None))


class Blocks(nn.Module, EagleModelMixin):
    aux_hidden_state_layers = (3, 4)


def cache_of(aux_layers: tuple[int, ...], language_model: nn.Module) -> SpireCache:
    """The cache of a draft with one layer, beside a target that wraps the language model."""
    attention = SimpleNamespace(layer_name="draft", impl=SimpleNamespace(do_kv_cache_update=None))
    layers = [SimpleNamespace(self_attn=SimpleNamespace(attn=attention))]
    fields = SimpleNamespace(aux_layers=aux_layers)
    model = SimpleNamespace(model=SimpleNamespace(layers=layers), fields=fields)
    target = nn.Module()
    target.language_model = language_model
    return SpireCache(model, target)


def test_activations_of_other_layers_are_refused():
    groups = [SimpleNamespace(layer_names=["draft"])]
    cache_of((3, 4), Blocks()).lay_out(groups)
    cache_of((0, 1), nn.Module()).lay_out(groups)  # unknown layers are accepted
    with pytest.raises(MagicDecConfigError, match=r"blocks \(0, 1\), and .* those before \(3, 4\)"):
        cache_of((0, 1), Blocks()).lay_out(groups)


def test_a_round_fails_if_the_step_was_not_recorded():
    """The drafter counts the failure."""
    with pytest.raises(AssertionError):
        cache_of((3, 4), Blocks()).begin_round(None)
