# SPDX-License-Identifier: Apache-2.0
"""Command line: aliases, help pages, and errors in one sentence."""

import subprocess
import sys
from pathlib import Path

import engines
import pytest
from extended import extended_except
from test_config import model_dir  # noqa: F401

VLLM = Path(sys.executable).with_name("vllm")


def vllm(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(VLLM), *arguments],
        env=engines.environment(),
        capture_output=True,
        text=True,
        timeout=engines.TIME_LIMIT_S,
        check=False,
    )


def test_help_names_every_field():
    result = vllm("serve", "--help=magicdec")
    assert result.returncode == 0, result.stderr[-2000:]
    for name in ("--speculative-model", "--num-speculative-tokens", "draft_kv_budget", "draft_kv_sink"):
        assert name in result.stdout


WRONG_COMMANDS = {
    "misspelt field": (
        ("--speculative-config", '{"method": "magicdec-self", "draft_kv_bugdet": 1}'),
        "did you mean 'draft_kv_budget'?",
    ),
    "invalid number": (
        ("--speculative-model", "magicdec-self", "--num-speculative-tokens", "four"),
        "'four' is neither a number nor 'auto'",
    ),
    "pipeline parallel": (
        ("--spec-method", "magicdec-self", "--pipeline-parallel-size", "2"),
        "use --tensor-parallel-size instead",
    ),
}


@pytest.mark.parametrize("case", extended_except("misspelt field", WRONG_COMMANDS))
def test_wrong_command_gets_one_sentence_before_loading(model_dir, case):  # noqa: F811
    arguments, sentence = WRONG_COMMANDS[case]
    result = vllm("serve", model_dir, "--max-model-len", "4096", "--skip-tokenizer-init", *arguments)
    assert result.returncode != 0
    assert sentence in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert "EngineCore" not in result.stdout + result.stderr
