# SPDX-License-Identifier: Apache-2.0
"""The soak's judge detects the violation of every bound."""

import asyncio
import copy
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import pytest
from fault_plugin.injected_faults import Fault
from soak import bad_input, faults, judge, requests
from soak.client import Answer, Outcome, compare, missing_part
from soak.requests import Request
from soak.server import Footprint

PLAIN = Answer([[5, 6, 7]], ["abc"], ["length"], [[-0.1, -3.0], [-0.7, -0.70005], [-0.2, -2.0]])


def answer(*tokens, text="abc", reason="length", logprobs=()):
    return Answer([list(tokens)], [text], [reason], list(logprobs))


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (answer(5, 6, 7), "same"),
        (answer(5, 6, 7, text="abd"), "differs"),
        (answer(5, 6, 7, reason="stop"), "differs"),
        (answer(5, 9, 7, text="a"), "rounding"),  # a near-tie
        (answer(5, 6, 9, text="a"), "differs"),
        (answer(5, 6, text="ab"), "differs"),
        (answer(5, 6, 7, logprobs=[[-0.1009], [-0.7], [-0.1991]]), "same"),
        (answer(5, 6, 7, logprobs=[[-0.1], [-0.7], [-0.198]]), "differs"),
        (answer(5, 6, 7, logprobs=[[-0.1, -3.0], [-0.7, -0.71], [-0.2, -2.0]]), "differs"),
        (answer(5, 9, 7, text="a", logprobs=[[-0.1], [-0.70002], [-7.0]]), "rounding"),
        (answer(5, 9, 7, text="a", logprobs=[[-0.102], [-0.7], [-0.2]]), "differs"),
    ],
)
def test_greedy_answers_are_compared_token_by_token(got, expected):
    assert compare(PLAIN, got) == expected


@pytest.mark.parametrize(
    ("options", "got", "missing"),
    [
        ({}, answer(5, 6, 7), ""),
        ({}, answer(5, 6, reason="stop"), ""),
        ({}, answer(5, 6), "tokens"),
        ({}, answer(5, 6, 7, 8, reason="stop"), "tokens"),
        ({}, answer(reason="stop"), "tokens"),
        ({}, answer(5, 6, 7, reason=None), "a finish reason"),
        ({"logprobs": 1}, answer(5, 6, 7), "logprobs"),
        ({"logprobs": 2}, answer(5, 6, 7, logprobs=[[-1.0, -2.0]] * 2 + [[-1.0]]), "logprobs of a token"),
        ({"n": 2}, Answer([[5, 6, 7], []], ["abc", ""], ["length", None]), "a finish reason"),
    ],
)
def test_incomplete_answers_are_found(options, got, missing):
    found = missing_part(Request("greedy", [1], 3, options), got)
    assert found.startswith(missing) and bool(found) == bool(missing)


def test_every_outcome_is_counted_once():
    sent = [Request("greedy", [1], 3), Request("sampled", [1], 3, {"temperature": 1.0})]
    greedy = [answer(5, 6, 7), answer(5, 6, 8), answer(5, 9, 7)]
    outcomes = [
        *(Outcome(0, one) for one in greedy),
        Outcome(0, hung_up=True),
        Outcome(1, answer(9, 9, 9)),
        Outcome(1, answer(9, 9, 9, reason=None)),
        Outcome(1, error="APIError: 500"),
    ]
    counts = judge.judge_answers(sent, [PLAIN, None], outcomes)
    names = ("hung_up", "lost", "incomplete", "same", "rounding", "differs", "sampled")
    assert [counts[name] for name in names] == [1] * len(names)
    assert counts["sent"] == 7 and len(counts["reasons"]) == 3 and "500" in counts["reasons"][2]


def sample(at_s, **more):
    """Of an hour in which 10,800 requests are answered and every process stays at 500 MB."""
    gauges = {"kv_usage": 0, "running": 0, "waiting": 0, "preemptions": at_s, "accepted": 10 * at_s}
    memory = {"rss_mb": {"worker": 500.0}, "num_fds": {"worker": 30}}
    return {"at_s": at_s, "answered": 3 * at_s, **gauges, **memory, **more}


GOOD = {
    "minutes": 60,
    "rate": 3.5,
    "answers": {"sent": 10_800, "lost": 0, "incomplete": 0, "same": 5000, "rounding": 2, "differs": 0}
    | {"types": dict.fromkeys(requests.TYPES, 9)},
    "windows": [
        {"name": name, "happened": True, "uncounted": [], "begin_s": begin_s, "end_s": begin_s + 77}
        for name, begin_s in zip(faults.FAULTS, [*range(720, 2500, 257), 3312], strict=True)
    ],
    "bad_input": [(type_, "400") for type_ in bad_input.TYPES],
    "samples": [sample(at_s) for at_s in range(0, 3601, 10)],
    "left": [],
}
BROKEN = [
    ("requests sent", ("answers", "sent"), 3000),
    ("types of requests not sent", ("answers", "types"), {"greedy": 9}),
    ("requests lost", ("answers", "lost"), 1),
    ("incomplete answers", ("answers", "incomplete"), 1),
    ("greedy answers that differ from plain decoding", ("answers", "differs"), 1),
    ("greedy answers that differ by rounding", ("answers", "rounding"), 60),
    ("faults that never happened", ("windows", 0, "happened"), False),
    ("faults that never happened", ("windows",), [GOOD["windows"][-1]]),
    ("failures and pauses not counted", ("windows", 1, "uncounted"), ["draft_pauses_total"]),
    ("accepted drafts", ("samples", slice(0, 300)), [sample(10 * i, accepted=9) for i in range(300)]),
    ("types of bad input not sent", ("bad_input",), [("broken JSON", "400")]),
    ("bad input with another answer", ("bad_input", 0), (bad_input.TYPES[0], "500")),
    ("preemptions", ("samples", -1, "preemptions"), 0),
    ("KV cache in use", ("samples", -1, "kv_usage"), 0.01),
    ("requests running or waiting", ("samples", -1, "waiting"), 1),
    ("more file descriptors", ("samples", -1, "num_fds"), {"worker": 35}),
    ("leftovers", ("left",), ["process 7"]),
]
GOOD_KILL = {"name": "SIGKILL", "exit_s": 3.0, "max_s": 60.0, "streams_running": 6, "reason": "died"} | {
    "stream_ends": {"error event": 6},
    "left": [],
    "next_is_same": True,
}
BROKEN_KILL = [
    ("ended in", "exit_s", None),
    ("ended in", "exit_s", 61.0),
    ("running streams", "streams_running", 5),
    ("all streams", "stream_ends", {"error event": 5, "left open": 1}),
    ("reason", "reason", ""),
    ("leftovers", "left", ["/dev/shm/psm_1"]),
    ("the next server", "next_is_same", False),
]


def broken(record):
    return [check.bound for check in judge.checks_of(record) if check.holds is False]


def test_a_good_record_holds_and_a_short_one_is_not_judged_by_its_memory():
    checks = judge.checks_of({"traffic": GOOD, "kills": [GOOD_KILL]})
    assert all(check.holds for check in checks)
    bounds = {check.bound for check in checks}
    untried = {bound for bound in bounds if not any(name in bound for name, *_ in BROKEN + BROKEN_KILL)}
    assert untried == {"growth of memory per 1,000 requests, below 1 MB"}  # see below
    short = GOOD | {"minutes": 2, "samples": [sample(at_s) for at_s in range(121)]}
    unjudged = [check.bound for check in judge.checks_of({"traffic": short}) if check.holds is None]
    assert [bound.split(",")[0] for bound in unjudged] == [
        "accepted drafts before and after the faults",
        "growth of memory per 1",
    ]


@pytest.mark.parametrize(("bound", "path", "value"), BROKEN)
def test_every_bound_can_be_broken(bound, path, value):
    record = copy.deepcopy(GOOD)
    *folders, last = path
    part = record
    for folder in folders:
        part = part[folder]
    part[last] = value
    assert any(name.startswith(bound) for name in broken({"traffic": record}))


@pytest.mark.parametrize(("bound", "name", "value"), BROKEN_KILL)
def test_every_bound_of_a_kill_can_be_broken(bound, name, value):
    (found,) = broken({"kills": [{**GOOD_KILL, name: value}]})
    assert found.startswith(f"SIGKILL: {bound}")


@pytest.mark.parametrize("window", GOOD["windows"][:-1], ids=list(faults.FAULTS)[:-1])
def test_memory_that_a_fault_leaks_is_found(window):
    """40 MB while one is on, in an hour that is level otherwise."""

    def leaked(at_s):
        return 40 * min(max(at_s - window["begin_s"], 0), 77) / 77

    samples = [sample(at_s, rss_mb={"worker": 500 + leaked(at_s)}) for at_s in range(0, 3601, 10)]
    (bound,) = broken({"traffic": GOOD | {"samples": samples}})
    assert bound.startswith("growth of memory")


def test_bad_input_gets_4xx_and_only_half_requests_may_be_closed():
    assert all(bad_input.is_proper("broken JSON", status) for status in ("400", "413"))
    answers = ("500", "200", "nothing in 9 s", bad_input.CLOSED)
    assert not any(bad_input.is_proper("broken JSON", one) for one in answers)
    assert bad_input.is_proper(bad_input.NO_BODY, bad_input.CLOSED)


@pytest.mark.parametrize(
    ("others_get", "lets_go", "expected"),
    [(b"200", True, "closed"), (b"503", True, "others got 503"), (b"200", False, "nothing in 1 s")],
)
def test_a_missing_body_must_keep_nobody_waiting(others_get, lets_go, expected, monkeypatch):
    monkeypatch.setattr(bad_input, "SLOW_S", 0.1)
    monkeypatch.setattr(bad_input, "TIMEOUT_S", 60 if lets_go else 1)

    async def serve(reader, writer):
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /health"):
            writer.write(b"HTTP/1.1 " + others_get + b" It\r\nContent-Length: 0\r\n\r\n")
            return
        await reader.read()
        if lets_go:
            writer.close()

    async def send():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            return await bad_input.send_bad(f"http://127.0.0.1:{port}", bad_input.NO_BODY)

    assert asyncio.run(send()) == (bad_input.NO_BODY, expected)


def test_faults_that_do_not_happen_or_are_not_counted_are_named(tmp_path, monkeypatch):
    """`nan` never happens, and nobody counts failures of lookups."""
    file, log = tmp_path / "fault", tmp_path / "log"
    log.write_text("")
    file.write_text("")
    counted = Counter()

    async def serve():
        while True:
            name = Fault(file.read_text())._name
            if name not in ("", "nan"):
                log.write_text(f"{log.read_text()}The fault {name} happens, on purpose.")
            if name not in ("", "lookup"):
                for counter in faults.FAULTS[name][1]:
                    counted[f"vllm:magicdec_{counter}"] += 1
            await asyncio.sleep(0.001)

    async def run():
        serving = asyncio.create_task(serve())
        await injected.run()
        serving.cancel()

    monkeypatch.setattr(faults, "POLL_S", 0.02)
    monkeypatch.setattr(faults, "PATIENCE_S", 0.2)
    monkeypatch.setattr(faults, "COUNTED_S", 0.1)
    injected = faults.Faults(file, log, counted.copy, lambda: 0.0, minutes=0.02)
    asyncio.run(run())
    windows = {window.name: window for window in injected.windows}
    assert list(windows) == list(faults.FAULTS) and file.read_text() == ""
    assert [name for name, window in windows.items() if not window.happened] == ["nan"]
    assert [name for name, window in windows.items() if window.uncounted] == ["lookup"]


def test_leftovers_of_a_server_are_found(tmp_path):
    """A process of its session that outlives it, its shared memory, and a file that is not plain vLLM's."""
    code = (
        "import os, time; from multiprocessing import shared_memory as s;"
        "one = s.SharedMemory(create=True, size=99); one.buf[0] = 1;"
        "os.fork() and print(one.name, flush=True); time.sleep(60)"
    )
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", code], stdout=pipe, text=True, start_new_session=True)
    footprint = Footprint(tmp_path)
    for name in ("vllm_dist_1", "a-file"):
        (tmp_path / name).write_text("")
    name = child.stdout.readline().strip()
    try:
        footprint.note(SimpleNamespace(process=child))
        child.kill()
        child.wait()
        process, segment, file = footprint.left()[-3:]
        assert process.startswith("process ") and process != f"process {child.pid}"
        assert (segment, file) == (f"/dev/shm/{name}", "a-file")
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.stdout.close()
        with suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{name}")
    (tmp_path / "a-file").unlink()
    assert footprint.wait_until_gone(10) == []
