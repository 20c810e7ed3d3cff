# SPDX-License-Identifier: Apache-2.0
"""benchmarks/soak.py on machines that are slow or stand still, in an imagined time."""

import asyncio
import sys
from types import SimpleNamespace

import engines
import pytest
from test_soak_faults import Unhurried

sys.path.insert(0, str(engines.HERE.parent / "benchmarks"))
from bad_day import bad_input, faults, judging, kills, traffic
from bad_day.clock import Clock
from bad_day.requests import Request

MINUTE_S = 60.0


class Machine(Unhurried):
    """Seconds pass as well while nothing runs on it."""

    def stand_still(self, seconds):
        self._seconds += seconds


def run(scene):
    """What `scene(machine, clock)` returns, beside a clock that ticks."""

    async def play():
        machine = asyncio.get_running_loop()
        clock = Clock(machine.time)
        ticking = asyncio.create_task(clock.tick())
        try:
            return await scene(machine, clock)
        finally:
            ticking.cancel()

    with asyncio.Runner(loop_factory=Machine) as runner:
        return runner.run(play())


def test_a_clock_stands_still_with_its_machine():
    async def scene(machine, clock):
        await asyncio.sleep(10)
        machine.stand_still(MINUTE_S)
        at_once = clock.now_s()
        await asyncio.sleep(10)
        return at_once, clock.now_s(), machine.time()

    at_once, later, passed = run(scene)
    assert 10 <= at_once < 11.5 and 20 <= later < 21.5
    assert passed == pytest.approx(20 + MINUTE_S)


def test_a_server_that_hangs_does_not_stop_the_clock():
    async def scene(machine, clock):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 300)
        return clock.now_s()

    assert run(scene) == pytest.approx(300)


def test_waiting_for_a_turn_is_counted():
    """Less than a second is what slow machines take, not what those that stand still do."""

    async def scene(machine, clock):
        for _ in range(100):
            await asyncio.sleep(0.2)
            machine.stand_still(0.7)
        return clock.now_s()

    assert run(scene) == pytest.approx(90)


def test_every_fault_happens_on_a_machine_that_stands_still_before(tmp_path, monkeypatch):
    log, file = tmp_path / "log", tmp_path / "fault"
    log.write_text("")
    seen = []

    async def serve(machine):
        while True:
            await asyncio.sleep(0.1)
            name = file.read_text().partition(":")[0] if file.exists() else ""
            if name and name not in seen:
                machine.stand_still(MINUTE_S)
                await asyncio.sleep(1)
                seen.append(name)
                log.write_text(f"{log.read_text()}The fault {name} happens, on purpose.\n")

    def read():
        return dict.fromkeys(faults.COUNTED.values(), float(len(seen)))

    async def here(read):  # a thread would take time that nobody counts
        return read()

    async def scene(machine, clock):
        serving = asyncio.create_task(serve(machine))
        await conductor.conduct(clock.now_s)
        serving.cancel()

    monkeypatch.setattr(asyncio, "to_thread", here)
    conductor = faults.Conductor(file, log, None, read, 4)
    plan = conductor._plan
    run(scene)
    assert [one.name for one in conductor.windows if one.happened] == seen
    assert seen == [name for name in faults.FAULTS if name != "datastore"]
    assert all(one.end_s - one.begin_s > plan.window_s - 0.01 for one in conductor.windows)
    assert conductor.windows[-1].begin_s == pytest.approx(plan.controller_s, abs=1.5)


def test_as_much_is_sent_where_the_machine_stands_still(monkeypatch):
    sent = []

    async def ask(*_, now_s, **more):
        sent.append(now_s())
        await asyncio.sleep(1)
        return None, now_s()

    async def send_bad(url, kind):
        return kind

    async def scene(machine, clock):
        async def disturb():
            for _ in range(3):
                await asyncio.sleep(45)
                machine.stand_still(MINUTE_S)

        clients = traffic.Traffic("", [Request("greedy", [5], 1)], clock.now_s)
        disturbing = asyncio.create_task(disturb())
        _, rejections = await asyncio.gather(
            clients.send(239.0, 3.0), bad_input.send_bad_until("", 1.5, 239.0, clock.now_s)
        )
        await disturbing
        return clients.outcomes, rejections

    monkeypatch.setattr(traffic, "client_of", lambda url: SimpleNamespace())
    monkeypatch.setattr(traffic, "ask", ask)
    monkeypatch.setattr(bad_input, "send_bad", send_bad)
    outcomes, rejections = run(scene)
    assert len(outcomes) == len(sent) == pytest.approx(720, abs=20)
    assert len(rejections) == pytest.approx(160, abs=4)
    assert all(one.sent_s < one.first_s <= one.ended_s < one.sent_s + 3 for one in outcomes)


def test_a_server_whose_answers_do_not_end_is_found():
    """It gives them up later than it may, and before nobody waits for it any more."""
    options = list(kills._ONE_RANK)
    gives_up_s = float(options[options.index("--shutdown-timeout") + 1])
    assert max(judging._MOST_TO_END_S.values()) < gives_up_s < kills._MOST_S


def test_make_test_kills_a_worker_and_an_hour_the_engine_core_as_well():
    def names(**chosen):
        return [kill.name for kill in kills.chosen_kills(**chosen)]

    few = ["SIGKILL of the worker", "SIGTERM in mid-stream"]
    of_one_rank = ["SIGKILL of the engine core", *few]
    of_two = ["SIGKILL of one of two ranks", "fault on one of two ranks"]
    assert names(with_two_ranks=False, few=True) == few
    assert names(with_two_ranks=False, few=False) == of_one_rank
    assert names(with_two_ranks=True, few=False) == of_one_rank + of_two
