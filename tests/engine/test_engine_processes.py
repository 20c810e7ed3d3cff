# SPDX-License-Identifier: Apache-2.0
"""The tests' own engines: one that meets its time limit leaves nothing behind."""

import os
import threading
import time

import engines
import psutil
import pytest
from greedy import GREEDY

pytestmark = pytest.mark.extended

ENDING_S = 120
LIMITS_S = (40, 160, 640)  # a busy machine may not have started all processes within the first


def processes_of(session: int) -> set[int]:
    found = set()
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def test_an_engine_ends_at_its_time_limit_with_all_its_children(monkeypatch, prompts):
    started = []
    most = 0

    class Watched(engines.EngineProcess):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            started.append(self._process.pid)

    def watch() -> None:
        nonlocal most
        while is_running:
            if started:
                most = max(most, len(processes_of(started[-1])))
            time.sleep(1)

    is_running = True
    watcher = threading.Thread(target=watch)
    watcher.start()
    monkeypatch.setattr(engines, "EngineProcess", Watched)
    endless = {"prompts": prompts[:1] * 1000, "sampling": {**GREEDY, "max_tokens": 6000}}
    try:
        for limit_s in LIMITS_S:
            with pytest.raises(RuntimeError, match=f"nothing in {limit_s} s"):
                engines.run([("generate", {"batches": [endless]})], own_process=True, time_limit_s=limit_s)
            if most >= 3:
                break
    finally:
        is_running = False
        watcher.join()
    assert most >= 3, "engine core and worker"
    # A killed process frees its memory before it is gone, which takes a while on a busy machine.
    until = time.monotonic() + ENDING_S
    while processes_of(started[-1]) and time.monotonic() < until:
        time.sleep(0.5)
    assert not processes_of(started[-1])
