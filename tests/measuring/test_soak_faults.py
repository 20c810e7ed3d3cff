# SPDX-License-Identifier: Apache-2.0
"""benchmarks/bad_day/faults.py: faults come and go, in an imagined time."""

import asyncio
import itertools
import os
import sys

import engines
import pytest

sys.path.insert(0, str(engines.HERE.parent / "benchmarks"))
from bad_day import faults

from vllm_magicdec.drafting.pauses import FAILURES_BEFORE_A_PAUSE
from vllm_magicdec.faults import Fault


class Unhurried(asyncio.SelectorEventLoop):
    """Its seconds pass where there is nothing to do but to wait, and at once: no machine is too slow."""

    def __init__(self):
        super().__init__()
        self._seconds = 0.0
        poll = self._selector.select
        self._selector.select = lambda timeout: self._pass(timeout) or poll(0)

    def _pass(self, seconds):
        self._seconds += seconds or 0.0

    def time(self):
        return self._seconds


def conduct(conductor, monkeypatch, *others):
    """Have faults come while `others` run, all in a time of their own."""

    async def here(read):  # a thread would take time that nobody counts
        return read()

    async def run():
        beside = [asyncio.create_task(other()) for other in others]
        await conductor.conduct(asyncio.get_running_loop().time)
        for task in beside:
            task.cancel()

    monkeypatch.setattr(asyncio, "to_thread", here)
    with asyncio.Runner(loop_factory=Unhurried) as runner:
        runner.run(run())


def test_faults_come_one_after_the_other_and_wait_until_they_have_happened(tmp_path, monkeypatch):
    log, file, store = tmp_path / "log", tmp_path / "fault", tmp_path / "store"
    store.mkdir()
    (store / "tokens.npy").write_bytes(bytes(100))
    log.write_text("")
    seen = []

    async def serve():
        """A server in which every fault happens, NaN late and the third step never."""
        now_s = asyncio.get_running_loop().time
        since = now_s()
        while True:
            await asyncio.sleep(0.02)
            is_cut = (store / "tokens.npy").stat().st_size < 100
            name = "datastore" if is_cut else file.read_text().partition(":")[0] if file.exists() else ""
            if name and name not in seen:
                seen.append(name)
                since = now_s()
            if name == "third_step" or (name == "nan" and now_s() < since + 0.6) or not name:
                continue
            line = "A lookup in '/store' failed" if is_cut else f"The fault {name} happens, on purpose."
            log.write_text(f"{log.read_text()}{line}\n")

    def read():
        return dict.fromkeys(faults.COUNTED.values(), float(len(seen)))

    conductor = faults.Conductor(file, log, store, read, 0.1)
    conductor._plan = faults.Plan(0.1, 0.3, 0.05, 5.5, 6.0, 6.5)
    conductor._last = 0
    conduct(conductor, monkeypatch, serve)
    windows = {window.name: window for window in conductor.windows}
    assert list(windows) == seen == list(faults.FAULTS)
    for earlier, later in itertools.pairwise(conductor.windows):
        assert earlier.end_s < later.begin_s
    assert [name for name, window in windows.items() if not window.happened] == ["third_step"]
    assert windows["controller"].begin_s == pytest.approx(6.0)
    assert (store / "tokens.npy").stat().st_size == 100 and file.read_text() == ""


def test_waiting_for_a_fault_takes_no_other_ones_time(tmp_path, monkeypatch):
    log = tmp_path / "log"
    log.write_text("")  # nothing ever happens
    conductor = faults.Conductor(tmp_path / "fault", log, None, dict, 0.1)
    conductor._plan = plan = faults.Plan(0.0, 0.2, 0.05, 2.0, 2.1, 2.6)
    conduct(conductor, monkeypatch)
    *others, last = conductor.windows
    assert [window.name for window in others] == [
        name for name in faults.FAULTS if name not in ("datastore", "controller")
    ]
    assert all(window.end_s - window.begin_s > plan.window_s - 1e-6 for window in others)
    assert last.name == "controller" and last.begin_s < plan.controller_s + 0.4 < last.end_s


@pytest.mark.parametrize(("late_s", "is_counted"), [(0.0, True), (8.0, True), (20.0, False)])
def test_failures_are_counted_after_the_line_of_the_log(late_s, is_counted, tmp_path, monkeypatch):
    log, file = tmp_path / "log", tmp_path / "fault"
    log.write_text("")
    begun_s = []

    async def serve():
        while not (file.exists() and file.read_text().startswith("batch")):
            await asyncio.sleep(0.02)
        log.write_text("The fault batch happens, on purpose.")
        begun_s.append(asyncio.get_running_loop().time())

    def read():
        is_late = not begun_s or asyncio.get_running_loop().time() < begun_s[0] + late_s
        return {"failures:batch": 0.0 if is_late else 1.0}

    conductor = faults.Conductor(file, log, None, read, 4)
    conduct(conductor, monkeypatch, serve)
    window = next(window for window in conductor.windows if window.name == "batch")
    assert window.happened and window.failures == ({"failures:batch": 1} if is_counted else {})
    assert window.end_s - window.begin_s == pytest.approx(conductor._plan.window_s, abs=0.3)


@pytest.mark.parametrize("name", ["batch", "selection", "third_step", "lookup"])
def test_no_fault_of_minutes_makes_drafting_pause(name, tmp_path):
    conductor = faults.Conductor(tmp_path / "fault", tmp_path / "log", None, dict, 4)
    conductor._switch_on(name)
    fault = Fault((tmp_path / "fault").read_text(), rank=0)
    assert [fault.happens(name) for _ in range(FAILURES_BEFORE_A_PAUSE)] == [True, False, False]


def test_a_fault_file_is_never_half_written(tmp_path):
    """Its time of change has ticks of milliseconds: what was read too early would not be read again."""
    file = tmp_path / "fault"
    file.write_text("")
    conductor = faults.Conductor(file, tmp_path / "log", None, dict, 1.0)
    with file.open() as before:
        conductor._switch_on("nan")
        assert before.read() == ""  # another file
    assert file.read_text() == "nan:drafts=4" and os.listdir(tmp_path) == ["fault"]
