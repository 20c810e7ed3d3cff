# SPDX-License-Identifier: Apache-2.0
"""A bad day of minutes: the bounds of `make soak` (benchmarks/soak.py) hold for them, too."""

import importlib.util
import json
import subprocess
import sys

import engines
import pytest

sys.path.insert(0, str(engines.HERE.parent / "benchmarks"))
import soak
from bad_day.faults import FAULTS

pytestmark = pytest.mark.extended

MINUTES = 4


def run_soak(out, *options):
    command = [sys.executable, soak.__file__, "--out", str(out), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=engines.environment(), **pipes) as child:
        try:
            output, errors = child.communicate(timeout=1500)
        except BaseException:
            child.terminate()  # so that its servers end with it
            raise
    assert child.returncode == 0, output[-8000:] + errors[-12000:]
    return json.loads(out.read_text())


def test_a_bad_day_loses_and_changes_no_answer(tmp_path):
    record = run_soak(tmp_path / "soak.json", "--only", "traffic", "--minutes", str(MINUTES))
    traffic = record["traffic"]
    # Three times slower than when plain decoding was timed, a machine answers 0.48 of what is asked.
    assert traffic["answers"]["sent"] > 0.3 * traffic["rate"] * 60 * MINUTES
    assert len(traffic["answers"]["by_kind"]) == 7
    assert traffic["tokens"]["vllm:spec_decode_num_accepted_tokens_total"] > 0
    has_datastore = importlib.util.find_spec("pydivsufsort") is not None  # the extra 'index'
    expected = [name for name in FAULTS if has_datastore or name != "datastore"]
    assert [fault["name"] for fault in traffic["faults"]] == expected
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


def test_servers_that_are_killed_leave_nothing_and_can_be_started_again(tmp_path):
    record = run_soak(tmp_path / "soak.json", "--only", "kills", "--one-rank")
    assert [kill["name"] for kill in record["kills"]] == [
        "SIGKILL of the worker",
        "SIGTERM in mid-stream",
    ]
    assert [kill["restarted"] for kill in record["kills"]] == [True, True]
