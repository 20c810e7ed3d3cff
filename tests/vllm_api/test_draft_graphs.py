# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of draft steps; tests/engine/ replays them in real engines."""

import subprocess
import sys
from types import SimpleNamespace

import engines
import pytest
from vllm.config import CUDAGraphMode

from vllm_magicdec.vllm_api import runner_v2
from vllm_magicdec.vllm_api.runner_v2 import MagicDecSpeculator


def test_a_graph_serves_every_step_of_no_more_requests_than_it_was_captured_for():
    program = engines.HERE / "recorded_graphs.py"
    ended = subprocess.run(
        [sys.executable, program], env=engines.environment(), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


def warnings_of(monkeypatch, mode: CUDAGraphMode, backend: str, enforce_eager: bool = False) -> list[str]:
    """What is logged when vLLM tells a speculator on a GPU what the target's attention supports."""
    logged: list[str] = []
    monkeypatch.setattr(runner_v2.logger, "warning_once", lambda line, *args: logged.append(line % args))
    monkeypatch.setattr(runner_v2, "DraftGraphs", lambda *args: None)
    speculator = MagicDecSpeculator.__new__(MagicDecSpeculator)
    speculator.device = SimpleNamespace(type="cuda")
    speculator.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=enforce_eager))
    group = SimpleNamespace(backend=SimpleNamespace(get_name=lambda: backend))
    speculator.target_attn_groups = [[group]]
    speculator._drafter = SimpleNamespace(common_lens=(None,))
    speculator.init_cudagraph_manager(mode)
    return logged


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE])
def test_a_backend_that_leaves_draft_steps_without_graphs_is_named_with_the_way_out(monkeypatch, mode):
    """FLASHINFER without its cubins has full graphs of single tokens only, so vLLM takes these modes."""
    (line,) = warnings_of(monkeypatch, mode, "FLASHINFER")
    assert "draft steps run without CUDA graphs" in line and mode.name in line
    assert "--attention-backend FLASH_ATTN" in line and "flashinfer-cubin" in line
    (line,) = warnings_of(monkeypatch, mode, "TRITON_ATTN")
    assert "TRITON_ATTN" in line and "flashinfer-cubin" not in line


def test_where_draft_steps_have_graphs_or_none_were_wanted_nothing_is_said(monkeypatch):
    assert not warnings_of(monkeypatch, CUDAGraphMode.FULL_AND_PIECEWISE, "FLASHINFER")
    assert not warnings_of(monkeypatch, CUDAGraphMode.NONE, "FLASHINFER", enforce_eager=True)
