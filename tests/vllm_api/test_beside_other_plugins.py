# SPDX-License-Identifier: Apache-2.0
"""Beside a plugin that changes the same places; vLLM loads plugins in any order, so both are tried."""

import subprocess
import sys
from types import SimpleNamespace

import engines
import pytest

from vllm_magicdec.errors import MagicDecConfigError
from vllm_magicdec.vllm_api import hooks

OTHER = """
import contextlib
import functools
import sys

seen = []

def wrap(owner, name, note):
    own = getattr(owner, name)
    @functools.wraps(own)
    def wrapper(*args, **kwargs):
        seen.append(note)
        return object.__new__(args[0]) if own is object.__new__ else own(*args, **kwargs)
    setattr(owner, name, wrapper)

def change():
    import vllm.config, vllm.config.speculative, vllm.engine.arg_utils
    from vllm.config import SpeculativeConfig
    from vllm.v1.worker.gpu import model_runner
    wrap(SpeculativeConfig, "__init__", "init")
    wrap(SpeculativeConfig, "__new__", "new")
    class Theirs(SpeculativeConfig):
        def __init__(self, *args, **kwargs):
            seen.append("theirs")
            super().__init__(*args, **kwargs)
    for module in (vllm.config, vllm.config.speculative, vllm.engine.arg_utils):
        module.SpeculativeConfig = Theirs
    wrap(model_runner, "init_speculator", "speculator")

from vllm_magicdec.plugin import register

steps = [change, lambda: print("reason", register())]
for step in steps if sys.argv[1] == "first" else steps[::-1]:
    step()

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu import model_runner

import vllm_magicdec.vllm_api.draft_models_v2 as draft_models

def configure(**speculative):
    return EngineArgs("examples/tiny-llama", speculative_config=speculative).create_engine_config()

ours = configure(method="magicdec-self", num_speculative_tokens=3, draft_kv_budget=128)
draft_models.make_speculator = lambda *args: "our speculator"
speculator = model_runner.init_speculator(ours, torch.device("cpu"), None)
print(type(ours.speculative_config).__name__, speculator)

seen.clear()
ngram = configure(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
with contextlib.suppress(Exception):
    model_runner.init_speculator(ngram, torch.device("cpu"), None)
print(type(ngram.speculative_config).__name__, sorted(set(seen)))
"""


@pytest.mark.parametrize("order", ["first", "second"])
def test_both_plugins_work_in_either_order(order):
    env = engines.environment(VLLM_PLUGINS="", VLLM_LOGGING_LEVEL="ERROR")
    options = {"capture_output": True, "text": True, "timeout": engines.TIME_LIMIT_S}
    command = [sys.executable, "-c", OTHER, order]
    child = subprocess.run(command, cwd=engines.HERE.parent, env=env, **options)
    assert child.returncode == 0, child.stderr[-3000:]
    assert child.stdout.splitlines()[-3:] == [
        "reason None",
        "EngineSpeculativeConfig our speculator",
        "Theirs ['init', 'new', 'speculator', 'theirs']",
    ]


@pytest.mark.parametrize(
    ("name", "attribute"), [("initialize_kv_cache_tensors", "drafter"), ("load_model", "speculator")]
)
def test_a_drafter_of_another_plugin_is_refused(configure_tiny, name, attribute):
    (hook,) = (hook for hook in hooks.HOOKS if hook.owner == "GPUModelRunner" and hook.name == name)
    loaded = []
    wrapped = hook.wrap(object, lambda *args: loaded.append(args))
    runner = SimpleNamespace(vllm_config=configure_tiny(), **{attribute: SimpleNamespace()})
    with pytest.raises(MagicDecConfigError, match=r"makes the drafter \(types.SimpleNamespace\)"):
        wrapped(runner, None)
    assert not loaded
