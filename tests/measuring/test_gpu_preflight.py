# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu_preflight.py: a sentence names each missing requirement and says what to type."""

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import gpu_preflight
import pytest
import torch

from vllm_magicdec import plugin
from vllm_magicdec.errors import MagicDecConfigError

GIB = 2**30


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A complete GPU machine, but for FlashInfer's kernels, which need a real one; returns its model."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    versions = {"vllm": "0.32.0+cu130", "vllm-magicdec": "0.2.0", "flashinfer-python": "0.7.0.post1"}
    answer = SimpleNamespace(stdout="NVIDIA H200, 580.1, 143771 MiB\n")
    checks = [check for check in gpu_preflight.CHECKS if check is not gpu_preflight.flashinfer]
    monkeypatch.setattr(gpu_preflight, "CHECKS", checks)
    monkeypatch.setattr(gpu_preflight, "version", versions.get)
    monkeypatch.setattr(gpu_preflight, "make_record", lambda name, **fields: fields)
    # Not `subprocess.run` itself, which vLLM calls when it is imported.
    monkeypatch.setattr(gpu_preflight, "subprocess", SimpleNamespace(**vars(subprocess)))
    monkeypatch.setattr(gpu_preflight.subprocess, "run", lambda *args, **kwargs: answer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (139 * GIB, 140 * GIB))
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * GIB))
    for name in ("VLLM_PLUGINS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def missing(model: Path, *arguments: str) -> dict[str, str]:
    """What a preflight finds missing; its exit status must agree."""
    out = model / "preflight.json"
    try:
        gpu_preflight.main(["--model", str(model), "--out", str(out), *arguments])
    except SystemExit as end:
        assert "nothing was measured" in end.code
        return json.loads(out.read_text())["missing"]
    record = json.loads(out.read_text())
    assert not record["missing"] and "NVIDIA H200" in record["found"]["driver"]
    return {}


def test_nothing_is_missing_on_a_complete_machine(machine):
    assert missing(machine) == {}


def fail(error: Exception):
    def raise_error(*args: object, **kwargs: object) -> None:
        raise error

    return raise_error


REFUSED = MagicDecConfigError("vllm-magicdec cannot hook it: install one of these")


@pytest.mark.parametrize(
    ("patched", "name", "value", "check", "typed"),
    [
        ("driver", "run", fail(FileNotFoundError()), "driver", "ubuntu-drivers install"),
        ("driver", "run", fail(subprocess.CalledProcessError(9, "", "ERR")), "driver", "type nvidia-smi"),
        (torch.version, "cuda", None, "device", "make venv"),
        (torch.cuda, "is_available", lambda: False, "device", "type nvidia-smi"),
        (torch.cuda, "mem_get_info", lambda: (60 * GIB, 140 * GIB), "memory", "60.0 of 140.0 GiB"),
        (gpu_preflight, "version", lambda name: "0.31.0", "vllm", "pip install vllm==0.33.0"),
        (gpu_preflight, "version", lambda name: "0.32.0+cpu", "vllm", "make venv"),
        (gpu_preflight, "entry_points", lambda group: (), "plugin", "pip install --no-deps -e ."),
        (plugin, "register", fail(REFUSED), "plugin", "install one of these"),
        (shutil, "which", lambda name: None, "ninja", "export PATH="),
        (shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * GIB), "disk", "export HOME="),
    ],
)
def test_a_missing_thing_is_named(machine, monkeypatch, patched, name, value, check, typed):
    monkeypatch.setattr(gpu_preflight.subprocess if patched == "driver" else patched, name, value)
    named = missing(machine)
    assert list(named) == [check] and typed in named[check]


@pytest.mark.parametrize(
    ("variable", "check"), [("CUDA_VISIBLE_DEVICES", "device"), ("VLLM_PLUGINS", "plugin")]
)
def test_a_variable_that_hides_something_is_named(machine, monkeypatch, variable, check):
    monkeypatch.setenv(variable, "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: variable != "CUDA_VISIBLE_DEVICES")
    assert f"type unset {variable}" in missing(machine)[check]


def test_a_model_that_is_not_on_the_disk_is_named(machine):
    assert "hf download nobody/no-model" in missing(machine, "--model", "nobody/no-model")["model"]
    (machine / "model.safetensors").unlink()
    assert "no weights" in missing(machine)["model"]


def test_flashinfer_may_be_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(gpu_preflight.MissingError, match=r"pip install flashinfer-python==0\.7"):
        gpu_preflight.flashinfer(SimpleNamespace())
