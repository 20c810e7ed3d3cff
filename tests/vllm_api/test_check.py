# SPDX-License-Identifier: Apache-2.0
"""`magicdec check`: its lines and its exit status."""

from types import SimpleNamespace

import pytest
from test_hooks import unhooked  # noqa: F401
from vllm import platforms
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_magicdec import TESTED_VLLM_VERSIONS, check
from vllm_magicdec.planner.console import main
from vllm_magicdec.vllm_api import hooks
from vllm_magicdec.vllm_api.requirements import REQUIRED


@pytest.fixture
def report(unhooked, capsys, monkeypatch):  # noqa: F811
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)

    def run() -> tuple[int, dict[str, tuple[str, str]]]:
        status = main(["check"])
        lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
        return status, {name: (own, text) for own, name, text in lines if own in ("ok", "PROBLEM")}

    return run


def test_installed_environment_has_no_problem(report):
    status, lines = report()
    assert status == 0, lines
    assert list(lines) == ["vLLM", "plugin", "hooks", "modules", "runner", "kernel"]
    assert {verdict for verdict, _ in lines.values()} == {"ok"}
    assert "CPU build, runs on cpu" in lines["vLLM"][1]
    assert f"{len(hooks.HOOKS)} hooks and {len(REQUIRED)} other names of vLLM fit" in lines["hooks"][1]
    assert "runner, CPU_ATTN for heads of 128" in lines["runner"][1]


def test_missing_vllm_names_install_command(report, monkeypatch):
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    status, lines = report()
    assert (status, list(lines)) == (1, ["vLLM"])
    assert f"pip install vllm=={TESTED_VLLM_VERSIONS[-1]}" in lines["vLLM"][1]


def test_incompatible_hook_is_named(report, monkeypatch):
    monkeypatch.delattr(Scheduler, "update_from_output")
    status, lines = report()
    verdict, text = lines["hooks"]
    assert (status, verdict) == (1, "PROBLEM")
    assert "Scheduler has no update_from_output" in text
    assert f"install vLLM {' or '.join(TESTED_VLLM_VERSIONS)}" in text


def test_failing_import_is_named(report, monkeypatch):
    def import_all_but_one(name):
        if name.endswith("runner_v2"):
            raise ImportError("it was moved")
        return SimpleNamespace()

    monkeypatch.setattr(check, "import_module", import_all_but_one)
    with pytest.raises(check.CheckError, match=r"runner_v2 cannot be imported \(it was moved\)"):
        check.find_modules()


def test_plugin_that_vllm_does_not_load_is_a_problem(report, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    status, lines = report()
    sentence = "VLLM_PLUGINS excludes it; type export VLLM_PLUGINS=other,magicdec"
    assert (status, lines["plugin"]) == (1, ("PROBLEM", sentence))
    monkeypatch.setattr(check, "entry_points", lambda group: [])
    with pytest.raises(check.CheckError, match=r"vLLM cannot find it; type .*pip install vllm-magicdec"):
        check.find_plugin()


def test_cuda_checks_gpu_libraries(report, monkeypatch):
    gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True, device_type="cuda")
    monkeypatch.setattr(platforms, "current_platform", gpu, raising=False)
    for found in ("hooks", "modules", "runner"):
        monkeypatch.setattr(check, f"find_{found}", lambda: "fits")
    monkeypatch.setattr(check.shutil, "which", lambda name: None)
    status, lines = report()
    assert status == 1
    assert list(lines) == "vLLM plugin hooks modules runner CUDA Triton FlashInfer ninja".split()
    assert "is built without CUDA; type" in lines["CUDA"][1]
    assert lines["ninja"][1].startswith("not on the PATH, so FlashInfer cannot compile; type export PATH=")
