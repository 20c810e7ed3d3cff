# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of draft steps; tests/engine/ replays them in real engines."""

import subprocess
import sys

import engines


def test_a_graph_serves_every_step_of_no_more_requests_than_it_was_captured_for():
    program = engines.HERE / "recorded_graphs.py"
    ended = subprocess.run(
        [sys.executable, program], env=engines.environment(), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
