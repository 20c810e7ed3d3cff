# SPDX-License-Identifier: Apache-2.0
"""The hooks: installed once, inert unless selected, undone completely, loud where vLLM has changed."""

import importlib
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm.config import SpeculativeConfig

from vllm_magicdec import plugin
from vllm_magicdec.errors import METHOD, MagicDecConfigError
from vllm_magicdec.vllm_api import hooks
from vllm_magicdec.vllm_api.engine_config import EngineSpeculativeConfig


def attributes() -> list[object]:
    """What vLLM has at every hook point now."""
    return [getattr(hook.find_owner(), hook.name) for hook in hooks.HOOKS]


@pytest.fixture
def unhooked():
    """vLLM as it was before the plugin was loaded."""
    hooks.uninstall()
    yield attributes()
    hooks.uninstall()
    hooks.install()


def test_installing_twice_is_installing_once(unhooked):
    plugin.register()
    once = attributes()
    plugin.register()
    assert attributes() == once
    assert all(a is not b for a, b in zip(once, unhooked, strict=True))


def test_uninstalling_leaves_vllm_as_it_was(unhooked):
    hooks.install()
    hooks.uninstall()
    assert attributes() == unhooked
    assert "__new__" not in vars(SpeculativeConfig)


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: hook.target)
def test_the_installed_vllm_has_every_hook_point(unhooked, hook):
    assert hooks.find_problem(hook) is None
    assert hook.reason


BROKEN = {
    "a module that moved": {"module": "vllm.moved"},
    "a class that moved": {"owner": "EngineArguments"},
    "a method that moved": {"name": "make_engine_config"},
    "a signature that changed": {"parameters": ("self", "settings")},
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_missing_hook_point_names_the_tested_versions_and_wraps_nothing(unhooked, case):
    create_engine_config = next(hook for hook in hooks.HOOKS if hook.name == "create_engine_config")
    changed = replace(create_engine_config, **BROKEN[case])
    with pytest.raises(
        MagicDecConfigError, match=r"it was tested with vLLM 0\.32\.0: install one of these"
    ):
        hooks.install((*hooks.HOOKS, changed))
    assert attributes() == unhooked


def test_a_class_that_gets_its_own_constructor_is_noticed(unhooked, monkeypatch):
    monkeypatch.setattr(SpeculativeConfig, "__new__", lambda cls, **_: object.__new__(cls), raising=False)
    assert "constructor of its own" in hooks.find_problem(hooks.HOOKS[0])


def test_other_speculative_methods_get_vllms_own_classes(unhooked):
    hooks.install()
    assert type(SpeculativeConfig(method="ngram", num_speculative_tokens=2)) is SpeculativeConfig
    other = SimpleNamespace(speculative_config=SimpleNamespace(method="custom"))
    proposer = next(hook for hook in hooks.HOOKS if hook.owner == "DraftModelProposer").find_owner()
    assert type(proposer.__new__(proposer, other)) is proposer
    runner = importlib.import_module("vllm.v1.worker.gpu.model_runner")
    with pytest.raises(AttributeError, match="use_gemma4_mtp"):  # vLLM's own choice goes on
        runner.init_speculator(other, None, None)


def test_our_method_gets_our_class(unhooked):
    hooks.install()
    assert type(SpeculativeConfig(method=METHOD)) is EngineSpeculativeConfig
    assert type(SpeculativeConfig(model=METHOD)) is EngineSpeculativeConfig


def test_an_untested_vllm_gets_a_warning_that_names_the_tested_ones(unhooked, monkeypatch, caplog):
    monkeypatch.setattr("vllm.__version__", "0.99.1")
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(plugin.logger, "propagate", True)
        logging.getLogger("vllm").propagate = True
        plugin.register()
    assert "was tested with vLLM 0.32.0, not with 0.99.1" in caplog.text
