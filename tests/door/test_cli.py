# SPDX-License-Identifier: Apache-2.0
"""Options of `vllm serve`: help pages, and errors in one sentence that names the option."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import engines
import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.plugin import register

register()

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


def test_wrong_command_gets_one_sentence_before_loading(model_dir):
    config = '{"method": "magicdec-self", "draft_kv_bugdet": 1}'
    result = vllm("serve", model_dir, "--skip-tokenizer-init", "--speculative-config", config)
    assert result.returncode != 0
    assert "did you mean 'draft_kv_budget'?" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert "EngineCore" not in result.stdout + result.stderr


@pytest.fixture(scope="module")
def parser():
    return EngineArgs.add_cli_args(FlexibleArgumentParser())


def refusal(parser, arguments: list[str]) -> str:
    """Return the sentence of argparse or of the configuration; "" if the command is accepted."""
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            args = parser.parse_args(["--max-model-len", "4096", "--skip-tokenizer-init", *arguments])
    except SystemExit as end:
        assert end.code == 2 and "Traceback" not in stderr.getvalue()
        return stderr.getvalue().splitlines()[-1]
    try:
        EngineArgs.from_cli_args(args).create_engine_config()
    except MagicDecConfigError as error:
        return str(error)
    return ""


SELF = ["--speculative-model", METHOD]
CONFIG = "argument --speculative-config/-sc: "
NO_NUMBER = "is neither a number nor 'auto'"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--speculative-config", f'"{METHOD}"'], f"{CONFIG}'{METHOD}' is not a JSON object"),
        (["--speculative-config", f'["{METHOD}"]'], f"{CONFIG}['{METHOD}'] is not a JSON object"),
        (["--speculative-config", f'{{"method": "{METHOD}"'], 'is not JSON; write it as \'{"method":'),
        (["--speculative-config", f'{{"method": "{METHOD}", "x": {"9" * 5000}}}'], "is not JSON; write it"),
        (["--speculative-config", f'{{"method": "{METHOD}", "": 1}}'], "does not know the field ''"),
        ([*SELF, "--speculative-config.", "1"], "does not know the field ''"),
        ([*SELF, "--speculative-config.draft_kv_bugdet", "1"], "did you mean 'draft_kv_budget'"),
        ([*SELF, "--speculative-config.draft_kv_budget", "-0.5"], "draft_kv_budget=-0.5 is not possible"),
        ([*SELF, "--speculative-config.draft-kv-sink", "é\ud800"], r"='é\ud800' is not possible"),
        ([*SELF, "--speculative-config.model", "null"], "model is given twice"),
        (["--speculative-config.draft_kv_budget", "0.5"], "belongs to method='magicdec-self'"),
        ([*SELF, "--num-speculative-tokens=-0.5"], f"--num-speculative-tokens: '-0.5' {NO_NUMBER}"),
        ([*SELF, "--num-speculative-tokens", "four"], f"--num-speculative-tokens: 'four' {NO_NUMBER}"),
        ([*SELF, "--num-speculative-tokens", "0"], "num_speculative_tokens=0 is not possible"),
        ([*SELF, "--spec-tokens", ""], f"--spec-tokens: '' {NO_NUMBER}"),
        (["--spec-method", METHOD, "--pipeline-parallel-size", "2"], "use --tensor-parallel-size instead"),
        (["--spec-method", MODEL_METHOD], "name one in 'model'"),
        ([*SELF, "--num-speculative-tokens", "auto", "--speculative-config.draft_kv_budget", "0.5"], ""),
        (["--spec-model", METHOD, "--spec-tokens", "5"], ""),
    ],
)
def test_wrong_options_get_one_sentence(parser, model_dir, arguments, sentence):
    line = refusal(parser, ["--model", model_dir, "--block-size", "32", *arguments])
    assert sentence in line and line.isprintable() and bool(line) == bool(sentence)
