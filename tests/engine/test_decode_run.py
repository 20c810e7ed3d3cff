# SPDX-License-Identifier: Apache-2.0
"""benchmarks/decode.py in a small size, both engines; of its clock see `measuring/test_decoding.py`."""

import json
import os
import subprocess
import sys

import engines
import pytest

BATCH, GAMMA = 2, 2

pytestmark = pytest.mark.extended


def test_both_engines_decode_and_a_round_is_its_parts(tmp_path):
    out = tmp_path / "decode.json"
    sizes = f"--context 512 --batch {BATCH} --gamma {GAMMA} --budget 128 --tokens 64 --turns 1".split()
    command = [sys.executable, "benchmarks/decode.py", *sizes, "--out", str(out)]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    run = subprocess.run(command, cwd=engines.HERE.parent, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    record = json.loads(out.read_text())
    (turn,), (row,) = record["all_turns"], record["rows"]
    assert all(engine["tokens_per_s"] > 0 for engine in turn.values())
    assert turn["plain"]["acceptance_length"] == 1
    assert 1 < turn["magicdec"]["acceptance_length"] <= GAMMA + 1
    assert row["round_ms"] == pytest.approx(row["verification_ms"] + GAMMA * row["draft_step_ms"], rel=0.2)
    assert row["batch"] == BATCH
    assert record["machine"]["worker_threads"] >= 1
