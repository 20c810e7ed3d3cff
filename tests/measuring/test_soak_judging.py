# SPDX-License-Identifier: Apache-2.0
"""benchmarks/soak.py: each of its bounds can be broken, on records that were made up."""

import asyncio
import copy
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import uuid
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import engines
import pytest

sys.path.insert(0, str(engines.HERE.parent / "benchmarks"))
import soak
from bad_day import bad_input, faults, judging, requests, servers, traffic, watching
from bad_day.asking import Answer, Outcome, compare, why_incomplete
from bad_day.bad_input import CLOSED, KINDS, Rejection
from bad_day.faults import Window
from bad_day.requests import Request
from bad_day.watching import Sample
from transformers import AutoTokenizer

from vllm_magicdec.faults import Fault

RESULTS = engines.HERE.parent / "benchmarks" / "results"
PLAIN = Answer([[5, 6, 7]], ["abc"], ["length"], [[-0.1, -3.0], [-0.7, -0.70005], [-0.2, -2.0]])


def answer(tokens, text="abc", reason="length", logprobs=()):
    return Answer([tokens], [text], [reason], list(logprobs))


@pytest.mark.parametrize(
    ("got", "how"),
    [
        (answer([5, 6, 7]), "same"),
        (answer([5, 6, 7], text="abd"), "differs"),
        (answer([5, 6, 7], reason="stop"), "differs"),
        (answer([5, 9, 7], text="a"), "rounding"),
        (answer([5, 6, 9], text="a"), "differs"),
        (answer([5, 6], text="ab"), "differs"),
        (answer([5, 6, 7, 8], text="abcd"), "differs"),
    ],
)
def test_greedy_answers_are_compared_token_by_token(got, how):
    assert compare(PLAIN, got) == how


@pytest.mark.parametrize(
    ("logprobs", "how"),
    [
        ([[-0.1], [-0.7], [-0.2]], "same"),
        ([[-0.1009], [-0.7], [-0.1991]], "same"),
        ([[-0.1, -3.0, -4.0], [-0.7, -0.7, -5.0], [-0.2, -2.0, -6.0]], "same"),
        ([[-0.102], [-0.7], [-0.2]], "differs"),
        ([[-0.1], [-0.7], [-0.198]], "differs"),
        ([[-0.1, -3.0], [-0.7, -0.71], [-0.2, -2.0]], "differs"),
        ([[-0.1], [-0.7], [-9999.0]], "differs"),
    ],
)
def test_logprobs_of_greedy_answers_are_plain_decodings(logprobs, how):
    """As many as were asked for of either; plain decoding is asked for two at least."""
    assert compare(PLAIN, answer([5, 6, 7], logprobs=logprobs)) == how


@pytest.mark.parametrize(
    ("logprobs", "how"),
    [
        ([[-0.1], [-0.70002], [-7.0]], "rounding"),
        ([[-0.1], [-0.702], [-0.2]], "differs"),
        ([[-0.102], [-0.7], [-0.2]], "differs"),
    ],
)
def test_logprobs_count_as_far_as_their_context_is_the_same(logprobs, how):
    assert compare(PLAIN, answer([5, 9, 7], text="a", logprobs=logprobs)) == how


@pytest.mark.parametrize(
    ("options", "got", "complete"),
    [
        ({}, answer([5, 6, 7]), True),
        ({}, answer([5, 6], reason="stop"), True),
        ({}, answer([5, 6]), False),
        ({}, answer([5, 6, 7], reason=None), False),
        ({}, answer([5, 6, 7, 8]), False),
        ({}, answer([], reason="stop"), False),
        ({"logprobs": 1}, answer([5, 6, 7]), False),
        ({"logprobs": 1}, Answer([[5, 6, 7]], ["abc"], ["length"], [[-1.0]] * 3), True),
        ({"logprobs": 2}, Answer([[5, 6, 7]], ["abc"], ["length"], [[-1.0, -2.0]] * 2 + [[-1.0]]), False),
        ({"n": 2}, Answer([[5, 6, 7], [5]], ["abc", "a"], ["length", "stop"]), True),
        ({"n": 2}, Answer([[5, 6, 7], []], ["abc", ""], ["length", None]), False),
    ],
)
def test_an_answer_has_all_that_was_asked_for(options, got, complete):
    assert (why_incomplete(Request("greedy", [1], 3, options), got) == "") == complete


def outcome(request, sent_s, ended_s, got=None, **more):
    return Outcome(request, sent_s, ended_s, first_s=sent_s + 0.1 if got else None, answer=got, **more)


REQUESTS = [Request("greedy", [1], 3), Request("sampled", [1], 3, {"temperature": 1.0})]


def test_every_request_is_counted_once():
    outcomes = [
        outcome(0, 0, 1, answer([5, 6, 7])),
        outcome(0, 0, 1, answer([5, 6, 8])),
        outcome(0, 0, 1, answer([5, 9, 7])),
        outcome(0, 0, 1, hung_up=True),
        outcome(1, 0, 1, answer([9, 9, 9])),
        outcome(1, 0, 1, answer([9, 9, 9], reason=None)),
        outcome(1, 0, 1, error="APIError: 500"),
    ]
    counts = judging.judge_answers(REQUESTS, [PLAIN, None], outcomes)
    expected = dict(sent=7, hung_up=1, lost=1, incomplete=1, same=1, rounding=1, differs=1)
    assert counts.items() >= expected.items()
    assert len(counts["reasons"]) == 3 and "APIError: 500" in counts["reasons"][2]


def test_latencies_belong_to_the_faults_that_were_on():
    windows = [Window("nan", 10, 20, True, {}), Window("controller", 30, 40, True, {})]
    outcomes = [
        outcome(0, 1, 2, answer([5])),
        outcome(0, 2, 4, answer([5])),
        outcome(0, 9, 11, answer([5])),
        outcome(0, 12, 13, error="lost"),
        outcome(0, 19, 21, answer([5])),
        outcome(0, 21, 25, answer([5])),
        outcome(0, 31, 32, answer([5])),
    ]
    rows = {row["phase"]: row for row in judging.latencies(outcomes, windows)}
    assert {name: row["answers"] for name, row in rows.items()} == {
        "before": 2,
        "nan": 2,
        "controller": 1,
        "after": 1,
    }
    assert rows["nan"]["lost"] == 1
    assert rows["before"]["p50_answer_ms"] == 1500 and rows["before"]["p50_first_token_ms"] == 100
    assert rows["after"]["p50_answer_ms"] is None  # of one answer there is no median


def sample(at_s, answered, **rss_mb):
    return Sample(at_s, answered, {}, rss_mb, {}, {})


def test_memory_is_judged_after_the_warm_up():
    samples = [
        sample(s, 10 * s, worker=500 + 0.02 * s + (100 if s < 10 else 200), core=50) for s in range(101)
    ]
    assert judging.slopes(samples, 100) == {"core": 0, "worker": 2.0}


@pytest.mark.parametrize("fault", range(len(faults.FAULTS) - 1))
def test_memory_that_any_fault_costs_is_judged(fault):
    """40 MB while one is on, in an hour that is level for the rest."""
    plan = faults.Plan.of(60)
    begin_s = plan.begin_s + fault * (plan.window_s + plan.gap_s)
    end_s = begin_s + plan.window_s

    def leaked(at_s):
        return 40 * (min(max(at_s, begin_s), end_s) - begin_s) / plan.window_s

    samples = [sample(s, 3 * s, worker=500 + leaked(s)) for s in range(0, 3601, 7)]
    assert judging.slopes(samples, 3600)["worker"] > judging.MOST_MB_PER_1000


def test_drafts_of_auto_s_own_took_a_pass_that_no_fault_asked_for():
    windows = [Window("nan", 10, 20, True, {}), Window("slow", 30, 40, True, {})]
    windows.append(Window("controller", 50, 60, True, {}))
    samples = [Sample(s, 0, {"passes": 1.0 * s, "stood": 3.0 * s}, {}, {}, {}) for s in range(61)]
    for given, seconds in ((windows, (9, 7)), (windows[:2], (9, 18))):
        found = judging.own_passes(samples, given)
        assert list(found) == ["before", "after"]
        assert list(found.values()) == [{"passes": one, "stood": 3 * one} for one in seconds]
    nothing = {"passes": 0, "stood": 0}
    assert judging.own_passes(samples[:1], windows) == {"before": nothing, "after": nothing}


def test_lookups_that_stood_are_no_drafts_of_a_pass():
    """vLLM counts them all as accepted, the plugin as unread those alone that another round follows."""
    leaked = [{"accepted": 9.0 * s, "unread_accepted": 8.0 * s} for s in range(60)]
    samples = [
        Sample(s, 0, one | {"passes": s > 4, "stood": 0}, {}, {}, {}) for s, one in enumerate(leaked)
    ]
    own = judging.own_passes(samples, [Window("nan", 20, 30, True, {})])
    assert own["before"] == {"passes": 1, "stood": 0}
    (name,) = broken(traffic=GOOD_TRAFFIC | {"own_passes": own})
    assert name.startswith("drafts of auto's own passes")


def test_servers_that_look_nothing_up_have_no_passes_to_count(monkeypatch):
    server = SimpleNamespace(metrics=lambda: dict.fromkeys(watching.GAUGES.values(), 7.0))
    monkeypatch.setattr(watching, "named_processes", lambda server: {})
    monkeypatch.setattr(watching, "failures_of", lambda server: {})
    footprint = SimpleNamespace(note=lambda server: None)
    taken = asyncio.run(watching.Watch(server, footprint, lambda: 0, lambda: 0.0).take())
    assert taken.gauges == dict.fromkeys(watching.GAUGES, 7) | {"passes": 0, "stood": 0}


@pytest.mark.parametrize("text", faults.FAULTS.values())
def test_a_server_understands_its_faults(text):
    assert Fault(text.format(last=2), rank=0).drafts == (0 if "controller" in text else 4)


GOOD_TRAFFIC = {
    "asked_rate": 3.5,
    "rate": 3.5,
    "minutes": 60,
    "answers": {"sent": 11_000, "hung_up": 5, "lost": 0, "incomplete": 0}
    | {"same": 5000, "rounding": 2, "differs": 0},
    "latencies": [{"phase": name, "lost": 0} for name in ("before", "nan", "lookup", "after")],
    "faults": [
        {
            "name": name,
            "happened": True,
            "failures": {of[name]: 3 for of in (faults.COUNTED, faults.PAUSED) if name in of},
        }
        for name in faults.FAULTS
    ],
    "own_passes": {"before": {"passes": 9, "stood": 30}, "after": {"passes": 4, "stood": 7}},
    "bad_input": {"sent": 9, "improper": []},
    "slopes": {"worker": 0.4, "server": -1.0},
    "answered_after_warm_up": 8000,
    "end": {"preemptions": 230, "kv_usage": 0, "running": 0, "waiting": 0, "more_fds": 1, "left": []},
}
GOOD_KILL = {
    "name": "SIGKILL of the engine core",
    "exit_s": 3.0,
    "streams": 6,
    "streams_ended": 6,
    "improper_ends": {},
    "sentence": "EngineDeadError",
    "left": [],
    "restarted": True,
}
BROKEN = [
    ("requests lost", ("answers", "lost"), 1),
    ("answers that lack something", ("answers", "incomplete"), 1),
    ("greedy answers that differ from plain decoding", ("answers", "differs"), 1),
    ("greedy answers that differ by rounding", ("answers", "rounding"), 60),
    ("answers lost during faults", ("latencies", 1, "lost"), 1),
    ("faults that never happened", ("faults", 0, "happened"), False),
    ("faults that never happened", ("faults",), []),
    (
        "faults that were not counted by name",
        ("faults", 0, "failures"),
        {"failures:selection": 3, "draft_pauses": 1},
    ),
    ("faults without a pause of drafting or lookups", ("faults", 0, "failures"), {"failures:batch": 5}),
    (
        "drafts of auto's own passes that stood, before and after the faults",
        ("own_passes", "after", "stood"),
        0,
    ),
    ("bad input with another answer than 4xx", ("bad_input", "improper"), ["broken JSON: 500"]),
    ("bad input with another answer than 4xx", ("bad_input", "sent"), 0),
    ("preemptions per 1,000 requests", ("end", "preemptions"), 219),
    ("growth of memory per 1,000 requests", ("slopes", "worker"), 1.1),
    ("samples of the server that did not come", ("samples_missed",), 6),
    ("KV blocks in use at the end", ("end", "kv_usage"), 0.01),
    ("requests running or waiting at the end", ("end", "waiting"), 1),
    ("more file descriptors at the end", ("end", "more_fds"), 5),
    ("left behind by the server", ("end", "left"), ["process 7"]),
    ("requests", ("answers", "sent"), 9_999),
]
BROKEN_KILLS = [
    ("the server has ended", "exit_s", None),
    ("the server has ended", "exit_s", 61.0),
    ("every stream came to a proper end", "streams_ended", 5),
    ("its log says why", "sentence", ""),
    ("left behind", "left", ["/dev/shm/psm_1"]),
    ("the next server answers as before", "restarted", False),
]


def record_of(sets="avx2 avx512f", **parts):
    return {"machine": {"instruction_sets": sets}, **parts}


def broken(**parts):
    return [check.name for check in judging.checks_of(record_of() | parts) if check.holds is False]


def unjudged(record):
    return [check.name for check in judging.checks_of(record) if check.holds is None]


def test_a_good_record_holds_and_is_shown():
    record = record_of(traffic=GOOD_TRAFFIC, kills=[GOOD_KILL])
    checks = judging.checks_of(record)
    assert all(check.holds for check in checks)
    assert soak.table_of(record).row_count == len(checks)
    assert {name for name, _, _ in BROKEN} == {
        check.name for check in judging.checks_of(record_of(traffic=GOOD_TRAFFIC))
    }
    assert len({name for name, _, _ in BROKEN_KILLS}) == len(judging.checks_of_kill(GOOD_KILL))


@pytest.mark.parametrize(("name", "path", "value"), BROKEN)
def test_every_bound_can_be_broken(name, path, value):
    record = copy.deepcopy(GOOD_TRAFFIC)
    *folders, last = path
    place = record
    for folder in folders:
        place = place[folder]
    place[last] = value
    assert broken(traffic=record) == [name]


@pytest.mark.parametrize(("name", "field", "value"), BROKEN_KILLS)
def test_every_bound_of_a_kill_can_be_broken(name, field, value):
    (found,) = broken(kills=[{**GOOD_KILL, field: value}])
    assert found.endswith(name)


@pytest.mark.parametrize("name", faults.PAUSED)
def test_a_fault_that_makes_nothing_pause_is_named(name):
    record = copy.deepcopy(GOOD_TRAFFIC)
    (window,) = (window for window in record["faults"] if window["name"] == name)
    # The other's pauses are not its own.
    window["failures"] = {faults.COUNTED[name]: 5, "draft_pauses": 1, "lookup_pauses": 1}
    assert broken(traffic=record) == []
    window["failures"][faults.PAUSED[name]] = 0
    (check,) = (check for check in judging.checks_of(record_of(traffic=record)) if check.holds is False)
    assert (check.name, check.value) == ("faults without a pause of drafting or lookups", name)


def short(sent, preemptions):
    """A record of four minutes."""
    few = {
        "answers": {**GOOD_TRAFFIC["answers"], "sent": sent},
        "end": {**GOOD_TRAFFIC["end"], "preemptions": preemptions},
    }
    return record_of(traffic=GOOD_TRAFFIC | {"minutes": 4, "answered_after_warm_up": 200, **few})


NOT_IN_MINUTES = {
    "faults without a pause of drafting or lookups",
    "drafts of auto's own passes that stood, before and after the faults",
    "growth of memory per 1,000 requests",
    "requests",
}


def test_a_fault_that_was_not_tried_is_named_and_not_judged():
    faults_tried = [one for one in GOOD_TRAFFIC["faults"] if one["name"] != "datastore"]
    record = record_of(traffic=GOOD_TRAFFIC | {"faults": faults_tried})
    (check,) = [check for check in judging.checks_of(record) if check.name == "faults that never happened"]
    assert check.holds is None and check.value == "datastore (not tried)"


def test_short_runs_say_nothing_of_memory_and_of_the_hour():
    assert set(unjudged(short(sent=800, preemptions=16))) == NOT_IN_MINUTES
    assert set(unjudged(short(sent=299, preemptions=0))) == {
        *NOT_IN_MINUTES,
        "preemptions per 1,000 requests",
    }


def test_short_runs_have_to_be_preempted_as_often_as_long_ones():
    assert broken(**short(sent=800, preemptions=16)) == []
    assert broken(**short(sent=800, preemptions=15)) == ["preemptions per 1,000 requests"]


def test_a_machine_that_is_asked_less_owes_no_preemptions():
    few = {"end": {**GOOD_TRAFFIC["end"], "preemptions": 9}}
    expected = ["preemptions per 1,000 requests"]
    assert broken(traffic=GOOD_TRAFFIC | few) == expected
    capped = record_of(traffic=GOOD_TRAFFIC | few | {"rate": 3.4})
    assert unjudged(capped) == expected and broken(**capped) == []


def test_prompts_of_older_records_waited_for_room():
    older = {name: one for name, one in GOOD_TRAFFIC.items() if name not in ("rate", "asked_rate")}
    assert unjudged(record_of(traffic=older)) == ["preemptions per 1,000 requests"]


@pytest.mark.parametrize(("plain", "rate"), [(9.0, 3.5), (4.0, 2.8), (1e-3, 0.0)])
def test_a_server_is_asked_for_less_than_plain_decoding_answers(plain, rate):
    assert soak.rate_of(3.5, plain) == rate


def test_the_slowest_server_is_asked_as_well():
    def give_up(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    try:
        sent_s = list(itertools.islice(traffic.arrivals(0.0, seed=0), 3))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert [int(at_s / traffic.CYCLE_S) for at_s in sent_s] == [0, 1, 2]


def test_ends_that_are_none_are_named():
    kill = {**GOOD_KILL, "streams_ended": 4, "improper_ends": {"connection lost": 2}}
    (check,) = (check for check in judging.checks_of_kill(kill) if check.holds is False)
    assert check.value == "4 of 6, 2 connection lost"


def test_kills_of_older_records_had_no_server_after_the_last():
    older = {name: value for name, value in GOOD_KILL.items() if name != "restarted"}
    record = record_of(kills=[older])
    assert broken(**record) == []
    assert unjudged(record) == ["SIGKILL of the engine core: the next server answers as before"]


def test_an_hour_asks_as_many_requests_of_fast_machines_alone():
    assert unjudged(record_of(traffic=GOOD_TRAFFIC)) == []
    assert unjudged(record_of("avx2", traffic=GOOD_TRAFFIC)) == ["requests"]


@pytest.mark.parametrize(
    ("answered", "proper"),
    [("400", True), ("413", True), ("500", False), ("200", False), ("nothing in 9 s", False)],
)
def test_bad_input_gets_4xx(answered, proper):
    judged = judging.judge_bad_input([Rejection("broken JSON", answered, 0.1)])
    assert (judged["improper"] == []) == proper


def test_only_what_is_no_request_may_be_closed():
    """A server that closes every connection answers nobody."""
    judged = judging.judge_bad_input([Rejection(kind, CLOSED, 0.1) for kind in KINDS])
    may_close = {"body that never comes", "not HTTP"}
    assert set(judged["improper"]) == {f"{kind}: {CLOSED}" for kind in KINDS if kind not in may_close}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/soak.json")), ids=lambda path: path.parent.name)
def test_what_committed_servers_answered_is_proper(path):
    record = json.loads(path.read_text())["traffic"]["bad_input"]
    for kind, answers in record["answers"].items():
        assert all(Rejection(kind, answered, 0.1).is_proper for answered in answers), kind


@pytest.mark.parametrize(
    ("behaviour", "answered"),
    [
        ("waits", CLOSED),
        ("refuses", "408"),
        ("serves nobody meanwhile", "others got 503"),
        ("answers nobody meanwhile", "nothing in 1 s"),
        ("does not let go", "nothing in 1 s"),
    ],
)
def test_a_body_that_never_comes_keeps_nobody_waiting(behaviour, answered, monkeypatch):
    monkeypatch.setattr(bad_input, "_SLOW_S", 0.1)
    monkeypatch.setattr(bad_input, "TIMEOUT_S", 1 if answered == "nothing in 1 s" else 60)

    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /health"):
            if behaviour != "answers nobody meanwhile":
                status = b"503 Busy" if behaviour == "serves nobody meanwhile" else b"200 OK"
                writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")
            return
        if behaviour == "refuses":
            writer.write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        await reader.read()
        if behaviour != "does not let go":
            writer.close()

    async def send():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            return await bad_input.send_bad(f"http://127.0.0.1:{port}", "body that never comes")

    rejection = asyncio.run(send())
    assert rejection.answer == answered
    assert rejection.is_proper == (behaviour in ("waits", "refuses"))


def test_a_connection_that_is_gone_is_closed(monkeypatch):
    """Nothing was read of its end, and what would end it fails."""
    monkeypatch.setattr(bad_input, "_SLOW_S", 0.01)

    async def answer(url, kind):
        return "200"

    def write_eof():
        raise OSError(errno.ENOTCONN, "not connected")

    async def give_up():
        writer = SimpleNamespace(write_eof=write_eof)
        return await bad_input._give_up("", asyncio.StreamReader(), writer)

    monkeypatch.setattr(bad_input, "_send", answer)
    assert asyncio.run(give_up()) == CLOSED


def test_samples_that_do_not_come_are_counted(monkeypatch):
    watch = watching.Watch(None, None, lambda: 0, lambda: 0.0)
    refusal = urllib.error.HTTPError("", 500, "no metrics", None, None)
    outcomes = iter([TimeoutError("timed out"), None, OSError("reset"), refusal])

    async def take():
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome

    monkeypatch.setattr(watch, "take", take)
    with pytest.raises(urllib.error.HTTPError):
        asyncio.run(watch.watch(0.0))
    assert watch.num_missed == 2


OF_VLLM = (
    str(uuid.uuid4()),
    f"vllm_dist_{uuid.uuid4().hex}",
    "torchinductor_somebody",
    ".libxsmm.0",
)


def test_what_a_server_leaves_is_found(tmp_path):
    """A process of its session that outlives it, its shared memory, and files that are not plain vLLM's."""
    code = (
        "import os, sys, time; from multiprocessing import shared_memory as s;"
        "one = s.SharedMemory(create=True, size=99); one.buf[0] = 1;"
        "os.fork() and print(one.name, flush=True); time.sleep(60)"
    )
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", code], stdout=pipe, text=True, start_new_session=True)
    server = SimpleNamespace(process=child)
    footprint = servers.Footprint(tmp_path)
    (tmp_path / "tmpmetrics" / "counter_7.db").parent.mkdir()
    (tmp_path / "tmpmetrics" / "counter_7.db").write_text("")
    (tmp_path / "a-file").write_text("")
    for name in OF_VLLM:
        (tmp_path / name).write_text("")
    name = child.stdout.readline().strip()
    try:
        footprint.note(server)
        child.kill()
        child.wait()
        assert footprint.num_shared >= 1
        left = footprint.left()
        assert any(one.startswith("process ") for one in left)
        assert f"process {child.pid}" not in left
        assert f"/dev/shm/{name}" in left and left[-2:] == ["a-file", "tmpmetrics"]
        assert not set(OF_VLLM) & set(left)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.stdout.close()
        with suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{name}")
    (tmp_path / "a-file").unlink()
    shutil.rmtree(tmp_path / "tmpmetrics")
    assert footprint.wait_until_gone(10) == []


def test_requests_are_of_every_kind_and_length():
    made = requests.make_requests(AutoTokenizer.from_pretrained(str(engines.MODEL)), 2000)
    lengths = sorted(len(request.prompt) for request in made)
    assert lengths[0] == 5 and lengths[-1] == 7000
    assert 150 < lengths[1000] < 300
    kinds = Counter(request.kind for request in made)
    assert set(kinds) == {*requests.GREEDY_KINDS, *requests.SAMPLED_KINDS} and min(kinds.values()) > 100
    assert all(len(one.prompt) + one.max_tokens <= requests.MAX_MODEL_LEN for one in made)
    firsts = Counter(tuple(one.prompt[:48]) for one in made if len(one.prompt) >= 48)
    assert sum(sorted(firsts.values())[-4:]) > 200  # shared prefixes
    again = requests.make_requests(AutoTokenizer.from_pretrained(str(engines.MODEL)), 2000)
    assert again == made


def test_bursts_and_lulls_have_the_rate_that_was_asked_for():
    sent = list(itertools.takewhile(lambda at: at < 600, traffic.arrivals(3.0, seed=1)))
    assert len(sent) == 1800 and sent == sorted(sent)
    assert Counter(sent).most_common(1)[0][1] >= 20
    assert max(later - earlier for earlier, later in itertools.pairwise(sent)) >= 5


def test_bad_input_is_of_many_kinds():
    assert len(set(KINDS)) == len(KINDS) > 25
