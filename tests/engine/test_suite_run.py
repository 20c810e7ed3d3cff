# SPDX-License-Identifier: Apache-2.0
"""benchmarks/suite.py: a short run with two real servers."""

import json
import subprocess
import sys

import engines
import pytest
from short_runs import PLOTS, REQUESTS, TOKENS

sys.path.insert(0, str(engines.HERE.parent / "benchmarks"))
import suite
import suite_plots

DRAFTS = 3
PNG = b"\x89PNG"

pytestmark = pytest.mark.extended


def test_every_load_runs_on_every_method(tmp_path):
    out = tmp_path / "out"
    command = [
        *(sys.executable, suite.__file__, "--quick", "--out", str(out)),
        *("--requests", str(REQUESTS), "--tokens", str(TOKENS), "--drafts", str(DRAFTS)),
        *("--context", "600", "200", "--concurrency", "1", "2"),
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=engines.environment(), **pipes) as child:
        try:
            printed, errors = child.communicate(timeout=engines.TIME_LIMIT_S)
        except BaseException:
            child.terminate()  # so that its servers end with it
            raise
    assert child.returncode == 0, printed[-4000:] + errors[-4000:]
    record = json.loads((out / "suite.json").read_text())
    assert list(record["methods"]) == ["plain", "magicdec-streamingllm"]
    cells = [(run["method"], run["context"], run["concurrency"]) for run in record["runs"]]
    fixed = [(context, concurrency) for context in (200, 600) for concurrency in (1, 2)]
    assert cells == [(m, *cell) for m in record["methods"] for cell in [*fixed, (600, None)]]
    for run in record["runs"]:
        assert run["completed"] == REQUESTS and run["total_output_tokens"] == REQUESTS * TOKENS
        assert run["total_input_tokens"] == pytest.approx(REQUESTS * run["context"], rel=0.02)
    for context in (200, 600):
        assert suite_plots.pooled_acceptance(record["runs"], "plain", context) == []
        rates = suite_plots.pooled_acceptance(record["runs"], "magicdec-streamingllm", context)
        assert len(rates) == DRAFTS
        # A budget of 512 tokens holds all of the short context.
        assert 0.2 < rates[-1] <= rates[0] <= 1
    assert all((out / name).read_bytes().startswith(PNG) for name in PLOTS)
    assert "magicdec-streamingllm" in printed and str(out) in printed.replace("\n", "")
