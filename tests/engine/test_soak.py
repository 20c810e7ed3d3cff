# SPDX-License-Identifier: Apache-2.0
"""A bad day in short: the bounds of `make soak` (benchmarks/soak.py) hold for minutes, too."""

import json
import subprocess
import sys

import engines

SOAK = engines.HERE.parent / "benchmarks" / "soak.py"
MINUTES = 1.5


def run_soak(out, *options):
    command = [sys.executable, str(SOAK), "--out", str(out), *options]
    command.append("--short")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=engines.environment(), **pipes) as child:
        try:
            output, errors = child.communicate(timeout=900)
        except BaseException:
            child.terminate()  # so that its servers end with it
            raise
    assert child.returncode == 0, output[-8000:] + errors[-12000:]
    return json.loads(out.read_text())


def test_a_bad_day_loses_and_changes_no_answer(tmp_path):
    record = run_soak(tmp_path / "soak.json", "--only", "traffic", "--minutes", str(MINUTES))
    traffic = record["traffic"]
    assert traffic["answers"]["sent"] > 40 * MINUTES and len(traffic["answers"]["by_kind"]) == 7
    assert traffic["tokens"]["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


def test_servers_that_are_killed_leave_nothing_and_can_be_started_again(tmp_path):
    record = run_soak(tmp_path / "soak.json", "--only", "kills")
    assert [kill["name"] for kill in record["kills"]] == [
        "SIGKILL of the engine core",
        "SIGTERM in mid-stream",
    ]
    # The second server came after the first, which was killed.
    assert ["restarted" in kill for kill in record["kills"]] == [True, False]
