# SPDX-License-Identifier: Apache-2.0
"""Hooks are installed once, all or none; they do nothing for other methods and uninstall completely."""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm.config import SpeculativeConfig

from vllm_magicdec import hooking, plugin
from vllm_magicdec.errors import METHOD, MagicDecConfigError
from vllm_magicdec.vllm_api import hooks
from vllm_magicdec.vllm_api.engine_config import EngineSpeculativeConfig
from vllm_magicdec.vllm_api.requirements import REQUIRED


def attributes() -> list[object]:
    return [getattr(hook.find_owner(), hook.name) for hook in hooks.HOOKS]


@pytest.fixture
def unhooked():
    """Uninstall all hooks; return the original attributes of vLLM."""
    hooking.uninstall()
    yield attributes()
    hooking.uninstall()
    plugin.register()


def test_hooks_are_installed_once_and_removed_completely(unhooked):
    plugin.register()
    once = attributes()
    plugin.register()
    assert attributes() == once
    assert all(a is not b for a, b in zip(once, unhooked, strict=True))
    assert hooking.installed() == hooks.HOOKS
    hooking.uninstall()
    assert attributes() == unhooked
    assert "__new__" not in vars(SpeculativeConfig)


@pytest.mark.parametrize("one", REQUIRED, ids=lambda one: one.target)
def test_renamed_names_and_parameters_are_reported(one):
    renamed = replace(one, name=f"{one.name}_renamed")
    assert renamed.find_problem() == f"{one.owner or one.module} has no {one.name}_renamed"
    if one.parameters:
        changed = replace(one, parameters=(*one.parameters, "renamed"))
        assert changed.find_problem() == f"{one.target} takes no renamed"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"module": "vllm.moved"}, "No module named 'vllm.moved'"),
        ({"owner": "EngineArguments"}, "has no attribute 'EngineArguments'"),
    ],
)
def test_a_moved_module_or_class_is_named_and_nothing_is_wrapped(unhooked, change, problem):
    moved = next(hook for hook in hooks.HOOKS if hook.name == "create_engine_config")
    with pytest.raises(MagicDecConfigError, match=problem):
        hooking.install((*hooks.HOOKS, replace(moved, **change)))
    assert attributes() == unhooked


def test_only_the_plugins_methods_get_its_classes(unhooked):
    hooking.install(hooks.HOOKS)
    assert type(SpeculativeConfig(method=METHOD)) is EngineSpeculativeConfig
    assert type(SpeculativeConfig(model=METHOD)) is EngineSpeculativeConfig
    assert type(SpeculativeConfig(method="ngram", num_speculative_tokens=2)) is SpeculativeConfig
    other = SimpleNamespace(speculative_config=SimpleNamespace(method="custom"))
    proposer = next(hook for hook in hooks.HOOKS if hook.owner == "DraftModelProposer").find_owner()
    assert type(proposer.__new__(proposer, other)) is proposer
    runner = importlib.import_module("vllm.v1.worker.gpu.model_runner")
    with pytest.raises(AttributeError, match="use_gemma4_mtp"):  # vLLM's function runs
        runner.init_speculator(other, None, None)
