# SPDX-License-Identifier: Apache-2.0
"""`auto` in real engines: what it chooses and reports; test_random_schedules.py changes its choices."""

import itertools
import json
import re
import subprocess
import sys

import engines
import pytest
from draft_engines import TINY_DRAFT
from greedy import GREEDY, assert_same_tokens

pytestmark = pytest.mark.extended


def test_the_controller_chooses_and_reports_its_choices(prompts, plain):
    spec = engines.magicdec("auto")
    auto_run = engines.generate(prompts, GREEDY, own_process=True, max_num_seqs=16, speculative_config=spec)
    assert_same_tokens(plain, auto_run.results[0][0], "auto")
    assert auto_run.draft_failures == 0
    assert auto_run.drafted > 0, "the first steps try some drafts"
    assert "will try several choices" in auto_run.log
    assert "choose 0 to 16 drafts for every step" in auto_run.log
    metrics = auto_run.metrics
    assert 0 <= metrics["vllm:magicdec_num_speculative_tokens"] <= 16
    assert metrics["vllm:magicdec_draft_kv_budget"] == 512
    assert metrics["vllm:magicdec_achieved_speedup"] > 0
    dashboard = json.loads((engines.MODEL.parent / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for text in expressions for name in re.findall(r"vllm:[a-z_]+", text)}
    assert {re.sub("_(total|bucket)$", "", name) for name in named} <= set(metrics)


@pytest.mark.parametrize(
    "draft", [{}, {"method": "magicdec", "model": str(TINY_DRAFT)}], ids=["the target", "a draft model"]
)
def test_the_machine_is_profiled(tmp_path, draft):
    speculation = {"draft_kv_budget": 128, "max_num_speculative_tokens": 2, **draft}
    profile = tmp_path / "profile.json"
    engine = {"dtype": "float32", "block_size": engines.PAGE, "enforce_eager": True}
    command = [
        *(sys.executable, "-m", "vllm_magicdec", "profile", "--model", str(engines.MODEL)),
        *("--batch", "1", "2", "--context", "100", "300", "--out", str(profile)),
        *("--engine", json.dumps({**engine, "max_num_batched_tokens": 256})),
        *("--speculative-config", json.dumps(speculation)),
    ]
    options = {"env": engines.environment(), "capture_output": True, "text": True}
    child = subprocess.run(command, timeout=engines.TIME_LIMIT_S, **options)
    assert child.returncode == 0, child.stdout + child.stderr
    steps = json.loads(profile.read_text())["steps"]
    measured = {(step["num_reqs"], step["drafted"]) for step in steps}
    assert measured == set(itertools.product((1, 2), range(3)))
    assert all(step["seconds"] > 0 for step in steps)
