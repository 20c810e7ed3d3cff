# SPDX-License-Identifier: Apache-2.0
"""Loading the plugin never raises: with an unsupported vLLM it is off, and its methods give the reason."""

import itertools
import logging
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType

import engines
import pytest
import vllm
from test_hooks import attributes, unhooked  # noqa: F401
from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_magicdec import TESTED_VLLM_VERSIONS, hooking, plugin, vllm_api
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.vllm_api import hooks
from vllm_magicdec.vllm_api.engine_config import EngineSpeculativeConfig

PATCHES = Path(__file__).parents[2] / "patches"


@pytest.fixture
def log(unhooked, caplog, monkeypatch):  # noqa: F811
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


def remove_a_method(monkeypatch):
    monkeypatch.delattr(Scheduler, "update_from_output")
    return "Scheduler has no update_from_output"


def change_a_signature(monkeypatch):
    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, output: None)
    return "update_from_output takes ('self', 'output'), not"


def remove_a_required_name(monkeypatch):
    monkeypatch.delattr(Scheduler, "update_draft_token_ids")
    return "Scheduler has no update_draft_token_ids"


def fail_halfway(monkeypatch):
    calls = itertools.count()

    def set_half(owner, name, value):
        if next(calls) == 8:
            raise RuntimeError("no more")
        setattr(owner, name, value)

    monkeypatch.setattr(hooking, "setattr", set_half, raising=False)
    return "RuntimeError: no more"


def break_an_import(monkeypatch):
    monkeypatch.delitem(sys.modules, hooks.__name__)
    monkeypatch.delattr(vllm_api, "hooks")
    monkeypatch.setitem(sys.modules, "vllm_magicdec.vllm_api.engine_config", None)
    return "import of vllm_magicdec.vllm_api.engine_config halted"


FAULTS = [remove_a_method, change_a_signature, remove_a_required_name, fail_halfway, break_an_import]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_unsupported_vllm_is_left_unchanged(log, monkeypatch, fault):
    with monkeypatch.context() as patch:
        problem = fault(patch)
        before = [vars(one.find_owner()).get(one.name) for one in hooks.HOOKS[1:]]
        plugin.register()
        after = [vars(one.find_owner()).get(one.name) for one in hooks.HOOKS[1:]]
        changed = [one for one, a, b in zip(hooks.HOOKS[1:], before, after, strict=True) if a is not b]
        assert [one.name for one in changed] == ["add_cli_args"]  # to give the reason
        (record,) = [record for record in log.records if record.name == plugin.logger.name]
        line = record.getMessage()
        assert problem in line
        assert f"is off because vLLM {vllm.__version__}" in line
        assert f"install vLLM {' or '.join(TESTED_VLLM_VERSIONS)}, or a version of " in line
        assert "\n" not in line
        for fields in ({"method": METHOD}, {"model": METHOD}, {"method": MODEL_METHOD, "model": "m"}):
            with pytest.raises(MagicDecConfigError) as raised:
                SpeculativeConfig(num_speculative_tokens=2, **fields)
            assert f"{raised.value}." == line
        other = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)
        assert type(other) is SpeculativeConfig
    plugin.register()
    assert hooking.installed() == hooks.HOOKS


def test_command_line_gives_the_reason(log, monkeypatch, capsys):
    remove_a_method(monkeypatch)
    plugin.register()
    reason = f"{log.records[-1].getMessage()}".rstrip(".")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--speculative-model", METHOD])
    assert reason in capsys.readouterr().err
    args = parser.parse_args(["--spec-method", METHOD, "--spec-tokens", "4"])
    assert args.spec_method == METHOD
    assert parser.parse_args([]).speculative_config is None


def test_plugin_loads_if_no_target_exists(log, monkeypatch):
    monkeypatch.setattr("vllm.config.SpeculativeConfig", None)
    monkeypatch.setattr("vllm.engine.arg_utils.EngineArgs", None)
    plugin.register()
    assert hooking.installed() == ()
    assert "is off because vLLM" in log.text


def patched_registry(version: str) -> str:
    """Return the text of registry.py in the patches for a version of vLLM."""
    (patch,) = (PATCHES / f"vllm-{version}").glob("0001-*.patch")
    _, added = patch.read_text().split("+++ b/vllm/v1/spec_decode/registry.py\n")
    added = added.split("\ndiff --git ")[0]
    return "\n".join(line[1:] for line in added.splitlines() if line.startswith("+"))


@pytest.fixture
def registry(monkeypatch) -> ModuleType:
    module = ModuleType(plugin.REGISTRY)
    monkeypatch.setattr(plugin, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, plugin.REGISTRY, module)
    exec(patched_registry(TESTED_VLLM_VERSIONS[0]), vars(module))
    return module


def register_with_any_parameters(name, **parts):
    raise AssertionError("is never called")


SPEC_FIELDS = ("config_cls", "proposer_cls", "speculator_cls", "add_cli_args", "reads_aux_hidden_states")


@pytest.mark.parametrize(
    "changes",
    [
        {"register_speculative_method": None},
        {"register_speculative_method": register_with_any_parameters},
        {"SpeculativeMethodSpec": dict},
        {"SpeculativeMethodSpec": make_dataclass("SpeculativeMethodSpec", SPEC_FIELDS[:-1])},
        {"SpeculativeMethodSpec": make_dataclass("SpeculativeMethodSpec", (*SPEC_FIELDS, "other"))},
    ],
    ids=["no function", "any parameters", "other spec", "a field less", "a field more"],
)
def test_other_registry_is_ignored(log, registry, changes):
    vars(registry).update(changes)
    plugin.register()
    assert hooking.installed() == hooks.HOOKS
    assert registry.find_by_fields({"method": METHOD}) is None
    assert not log.records


def test_registry_of_the_patches_is_used(log, registry):
    plugin.register()
    assert hooking.installed() == hooks.HOOKS_BESIDE_REGISTRY
    spec = registry.find_by_fields({"method": METHOD})
    assert spec is registry.find_by_fields({"model": METHOD})
    assert spec is registry.find_by_fields({"method": MODEL_METHOD, "model": "a draft"})
    for field in SPEC_FIELDS:
        assert callable(resolve_obj_by_qualname(getattr(spec, field)))
    assert not log.records


def test_registry_knows_the_methods_by_their_configuration(registry, monkeypatch):
    plugin.register()
    spec = EngineSpeculativeConfig(method=METHOD)
    assert registry.find_by_config(spec) is registry.find_by_fields({"method": METHOD})
    assert not registry.reads_aux_hidden_states(spec)
    monkeypatch.setattr(EngineSpeculativeConfig, "spire", "settings of a SPIRe draft")
    assert registry.reads_aux_hidden_states(spec)
    other = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)
    assert registry.find_by_config(other) is None
    assert not registry.reads_aux_hidden_states(other)


def test_all_patched_versions_have_the_same_registry():
    assert len({patched_registry(version) for version in TESTED_VLLM_VERSIONS}) == 1


def test_untested_vllm_gets_a_warning_with_tested_versions(log, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.99.1")
    plugin.register()
    assert f"was tested with vLLM {', '.join(TESTED_VLLM_VERSIONS)}, not with 0.99.1" in log.text


def test_entry_point_does_not_import_vllm():
    code = "import sys, vllm_magicdec.plugin; print([m for m in sys.modules if m.split('.')[0] == 'vllm'])"
    child = subprocess.run(
        [sys.executable, "-c", code], env=engines.environment(), capture_output=True, text=True, check=True
    )
    assert child.stdout.strip() == "[]"
