# SPDX-License-Identifier: Apache-2.0
"""Policies of other packages: found by entry point, refused in one sentence when they are none."""

import os
import tomllib
from pathlib import Path

import engines
import pytest
import texts
from conftest import GREEDY
from engines import magicdec
from greedy import assert_same_tokens

from vllm_magicdec.policies import TokenPolicy, find_policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom-policy"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The example package as pip would install it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "magicdec_strided_policy-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = ["[vllm_magicdec.policies]", "broken = pathlib:Path"]
    lines += [f"{k} = {v}" for k, v in project["entry-points"]["vllm_magicdec.policies"].items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    path = [str(EXAMPLE), str(tmp_path)]
    for entry in path:
        monkeypatch.syspath_prepend(entry)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]))


def test_an_entry_point_is_a_policy(installed):
    assert issubclass(find_policy("strided"), TokenPolicy)


def test_what_is_no_policy_is_refused(installed):
    with pytest.raises(ValueError, match="no subclass of PagePolicy or TokenPolicy"):
        find_policy("broken")
    with pytest.raises(ValueError, match="use one of streamingllm, snapkv, verify-topk, broken, strided"):
        find_policy("stridden")


def test_the_example_drafts_losslessly(installed):
    prompts = texts.prompts(6, 200, 2000, seed=9)
    truth = engines.generate(prompts, GREEDY, max_num_seqs=4)
    spec = magicdec(3, draft_kv_policy="strided", draft_kv_budget=128)
    run = engines.generate(prompts, GREEDY, max_num_seqs=4, speculative_config=spec)
    assert_same_tokens(truth.results[0][0], run.results[0][0], "strided policy")
    assert run.accepted > 0
    assert run.draft_failures == 0
