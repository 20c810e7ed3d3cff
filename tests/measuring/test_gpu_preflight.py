# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu/preflight.py: every missing thing is named in a sentence that says what to type."""

import importlib.util
import json
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
import vllm.utils.flashinfer as vllm_flashinfer

from benchmarks.gpu import draft_attention, preflight

GIB = 2**30


@pytest.fixture(autouse=True)
def forget_what_vllm_found():
    """It asks once per process whether FlashInfer is there."""

    def forget() -> None:
        vllm_flashinfer.has_flashinfer.cache_clear()
        vllm_flashinfer.has_flashinfer_cubin.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A GPU machine on which nothing is missing; tests take things away."""
    modules = {"flashinfer", "flashinfer_cubin"}
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> object:
        if name.startswith("flashinfer"):
            return SimpleNamespace(name=name) if name in modules else None
        return find(name, package)

    programs = {"nvcc": "/cuda/bin/nvcc", "/cuda/bin/nvcc": "/cuda/bin/nvcc", "ninja": "/bin/ninja"}
    versions = {
        "vllm": "0.32.0",
        "vllm-magicdec": preflight.version("vllm-magicdec"),
        "flashinfer-python": "0.7.0.post1",
    }

    def answer(command: list[str], **_: object) -> SimpleNamespace:
        return SimpleNamespace(stdout="NVIDIA H200, 580.1, 143771 MiB\n")

    monkeypatch.setattr(subprocess, "run", answer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (139 * GIB, 140 * GIB))
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(shutil, "which", lambda name, **_: programs.get(name))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * GIB))
    monkeypatch.setattr(preflight, "_version", versions.get)
    monkeypatch.setattr(preflight, "flashinfer_kernels", lambda: preflight.Finding("FlashInfer kernels"))
    for name in (
        "VLLM_PLUGINS",
        "CUDA_HOME",
        "CUDA_PATH",
        "CUDA_VISIBLE_DEVICES",
        "VLLM_HAS_FLASHINFER_CUBIN",
    ):
        monkeypatch.delenv(name, raising=False)
    return SimpleNamespace(modules=modules, programs=programs, versions=versions)


def missing(model: str | None = None) -> list[preflight.Finding]:
    return [finding for finding in preflight.findings("cuda", model) if finding.missing]


def test_nothing_is_missing_where_everything_is(machine):
    assert missing() == []


def no_driver(machine, monkeypatch):
    def run(command: list[str], **_: object) -> None:
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(subprocess, "run", run)


def silent_driver(machine, monkeypatch):
    def run(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(9, command, "NVIDIA-SMI has failed\n")

    monkeypatch.setattr(subprocess, "run", run)


def torch_of_a_cpu(machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)


def hidden_device(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def old_driver(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def busy_gpu(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 * GIB, 140 * GIB))


def no_vllm(machine, monkeypatch):
    del machine.versions["vllm"]


def hidden_plugin(machine, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")


def older_plugin(machine, monkeypatch):
    machine.versions["vllm-magicdec"] = "0.0.1"


def unknown_plugin(machine, monkeypatch):
    monkeypatch.setattr(preflight, "entry_points", lambda group: ())


@pytest.mark.parametrize(
    ("take_away", "what", "typed"),
    [
        (no_driver, "no NVIDIA driver", "ubuntu-drivers install"),
        (silent_driver, "does not answer (NVIDIA-SMI has failed)", "type nvidia-smi"),
        (torch_of_a_cpu, "is built without CUDA", "rm -rf .venv"),
        (hidden_device, "CUDA_VISIBLE_DEVICES=''", "unset CUDA_VISIBLE_DEVICES"),
        (old_driver, "CUDA 13.0 needs a newer driver", "type nvidia-smi"),
        (busy_gpu, "60.0 of 140.0 GiB of GPU memory are free", "type nvidia-smi"),
        (no_vllm, "vLLM is not installed", "make venv"),
        (hidden_plugin, "VLLM_PLUGINS keeps the plugin out", "export VLLM_PLUGINS=lora_resolver,magicdec"),
        (older_plugin, "vllm-magicdec 0.0.1 is installed", "pip install --no-deps -e"),
        (unknown_plugin, "vLLM cannot find the plugin", "pip install --no-deps -e"),
    ],
)
def test_what_nothing_runs_without_is_the_last_that_is_looked_at(
    machine, monkeypatch, take_away, what, typed
):
    take_away(machine, monkeypatch)
    [finding] = missing()
    assert what in finding.missing and typed in finding.missing
    assert finding.is_fatal and list(preflight.findings("cuda", None))[-1] == finding


def test_another_version_of_vllm_is_named_and_tried(machine):
    machine.versions["vllm"] = "0.33.0"
    [finding] = missing()
    assert "vLLM 0.33.0" in finding.missing and "pip install vllm==0.32.0" in finding.missing
    assert not finding.is_fatal


@pytest.mark.parametrize("local", ["0.32.0+cu129", "0.32.0"])
def test_a_build_of_the_tested_version_is_that_version(machine, local):
    machine.versions["vllm"] = local
    assert missing() == []


@pytest.mark.parametrize(
    ("programs", "named", "typed"),
    [
        (["ninja"], "ninja cannot be found", "export PATH="),
        (["nvcc"], "nvcc cannot be found", "export CUDA_HOME="),
        (["nvcc", "ninja"], "nvcc and ninja cannot be found", "export CUDA_HOME="),
    ],
)
def test_flashinfer_without_cubins_needs_nvcc_and_ninja(machine, programs, named, typed):
    """By vLLM's own rules, which are asked here and not stood in for."""
    machine.modules.remove("flashinfer_cubin")
    assert missing() == []
    for program in programs:
        del machine.programs[program]
    vllm_flashinfer.has_flashinfer.cache_clear()
    [finding] = missing()
    assert not vllm_flashinfer.has_flashinfer()
    assert named in finding.missing and typed in finding.missing
    assert "vllm download-kernels" in finding.missing and not finding.is_fatal


def test_cubins_do_without_nvcc_and_ninja(machine):
    machine.programs.clear()
    assert missing() == []


def test_flashinfer_itself_may_be_missing(machine):
    machine.modules.clear()
    [finding] = missing()
    assert "pip install flashinfer-python==0.7.0.post1" in finding.missing


def test_kernels_that_do_not_compile_are_named(monkeypatch):
    def fail(layer: object, view: object) -> None:
        raise RuntimeError("Ninja build failed.\nnvcc: no such file")

    monkeypatch.setattr(draft_attention, "token_flashinfer", fail)
    monkeypatch.setattr(torch, "device", lambda name: torch.zeros(0).device)
    finding = preflight.flashinfer_kernels()
    assert "(nvcc: no such file;" in finding.missing and "vllm download-kernels" in finding.missing


def test_a_full_disk_is_named(machine, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * GIB))
    [finding] = missing()
    assert "2 GiB free" in finding.missing and "export HOME=" in finding.missing


def test_weights_that_are_not_on_the_disk_are_named(machine, tmp_path):
    [finding] = missing("nobody/has-this-model")
    assert "hf download nobody/has-this-model" in finding.missing and "100 GiB free" in finding.missing
    (tmp_path / "config.json").write_text("{}")
    assert missing(str(tmp_path)) == []


def test_the_command_says_what_is_missing_and_ends_in_status_1(machine, monkeypatch, tmp_path, capsys):
    no_driver(machine, monkeypatch)
    monkeypatch.setattr(preflight, "make_record", lambda name, **fields: fields)
    with pytest.raises(SystemExit) as end:
        preflight.main(["--out", str(tmp_path / "preflight.json")])
    assert end.value.code == 1
    assert "driver: MISSING: no NVIDIA driver" in capsys.readouterr().out
    record = json.loads((tmp_path / "preflight.json").read_text())
    assert not record["is_ready"] and record["findings"][0]["is_fatal"]
