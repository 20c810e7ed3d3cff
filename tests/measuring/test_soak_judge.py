# SPDX-License-Identifier: Apache-2.0
"""The soak's judge detects the violation of every bound."""

import copy

import pytest
from soak import bad_input, faults, judge, requests
from soak.client import Answer, compare

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
    ("bad input with another answer", ("bad_input", 0), (bad_input.TYPES[0], "500")),
    ("preemptions", ("samples", -1, "preemptions"), 0),
    ("KV cache in use", ("samples", -1, "kv_usage"), 0.01),
    ("requests running or waiting", ("samples", -1, "waiting"), 1),
    ("more file descriptors", ("samples", -1, "num_fds"), {"worker": 35}),
    ("leftovers", ("left",), ["process 7"]),
    (
        "growth of memory",
        ("samples",),
        [sample(at_s, rss_mb={"worker": 500 + at_s / 90}) for at_s in range(0, 3601, 10)],
    ),
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
    tried = [name for name, *_ in BROKEN + BROKEN_KILL]
    assert all(any(name in check.bound for name in tried) for check in checks)
    short = GOOD | {"minutes": 2, "samples": [sample(at_s) for at_s in range(121)]}
    unjudged = [check.bound for check in judge.checks_of({"traffic": short}) if check.holds is None]
    assert [bound.split(",")[0] for bound in unjudged] == ["growth of memory per 1"]


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
