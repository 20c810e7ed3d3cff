# SPDX-License-Identifier: Apache-2.0
"""The bounds of a soak: arithmetic on its record."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import inf
from statistics import linear_regression
from typing import Any, NamedTuple

from . import bad_input, requests
from .client import Answer, Outcome, compare, missing_part
from .faults import FAULTS, FIRST
from .kills import ANSWER, ERROR_EVENT, NUM_STREAMS
from .requests import Request

MAX_MB_PER_1000 = 1.0  # requests, per process, after the warm-up
# Ends before the first fault, so that memory leaked by faults counts as growth.
WARM_UP = FIRST / 2
MIN_REQUESTS_FOR_A_SLOPE = 3000  # allocators look like growth in fewer
MIN_REQUESTS_FOR_PREEMPTIONS = 300
MIN_SHARE_SENT = 0.3  # of the rate: a slow machine still is under load
MAX_ROUNDED_SHARE = 0.01
MAX_MORE_FDS = 4


class Check(NamedTuple):
    bound: str
    value: str
    holds: bool | None  # None if the run is too short to judge


def judge_answers(
    sent: Sequence[Request], plain: Sequence[Answer | None], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    names = ("hung_up", "lost", "incomplete", "same", "rounding", "differs", "sampled")
    counts, reasons = Counter(dict.fromkeys(names, 0)), []
    for outcome in outcomes:
        request, expected, reason = sent[outcome.request], plain[outcome.request], ""
        if outcome.hung_up:
            result = "hung_up"
        elif outcome.answer is None:
            result, reason = "lost", outcome.error
        elif reason := missing_part(request, outcome.answer):
            result = "incomplete"
        else:
            result = "sampled" if expected is None else compare(expected, outcome.answer)
        counts[result] += 1
        if result in ("lost", "incomplete", "differs"):
            reasons.append(f"request {outcome.request} ({request.type}) {result}: {reason}")
    types = Counter(sent[outcome.request].type for outcome in outcomes)
    return {"sent": len(outcomes), **counts, "types": dict(types), "reasons": reasons[:20]}


def memory_growth(samples: Sequence[Mapping[str, Any]], minutes: float) -> dict[str, float]:
    """Return MB of resident memory per 1,000 answers after the warm-up, by process (least squares)."""
    warm = [sample for sample in samples if sample["at_s"] >= WARM_UP * 60 * minutes]
    growth = {}
    for role in {role for sample in warm for role in sample["rss_mb"]}:
        known = [sample for sample in warm if role in sample["rss_mb"]]
        answered = [sample["answered"] for sample in known]
        if len(set(answered)) > 1:
            memory = [sample["rss_mb"][role] for sample in known]
            growth[role] = 1000 * linear_regression(answered, memory).slope
    return growth


def checks_of_traffic(record: Mapping[str, Any]) -> list[Check]:
    answers, windows, samples = record["answers"], record["windows"], record["samples"]
    minutes, first, last = record["minutes"], samples[0], samples[-1]
    num_sent, rounding = answers["sent"], answers["rounding"]
    compared = answers["same"] + rounding + answers["differs"]
    warm = [sample["answered"] for sample in samples if sample["at_s"] >= WARM_UP * 60 * minutes]
    is_slope = bool(warm) and warm[-1] - warm[0] >= MIN_REQUESTS_FOR_A_SLOPE
    growth = memory_growth(samples, minutes)
    fastest = max(growth.values(), default=inf)
    happened = {window["name"] for window in windows if window["happened"]}
    improper = {f"{one}: {got}" for one, got in record["bad_input"] if not bad_input.is_proper(got)}
    fds = max(number - first["num_fds"].get(role, number) for role, number in last["num_fds"].items())
    types = set(requests.TYPES if num_sent >= 100 else ())
    least = round(MIN_SHARE_SENT * record["rate"] * 60 * minutes)
    is_preempted = last["preemptions"] > 0 if num_sent >= MIN_REQUESTS_FOR_PREEMPTIONS else None
    return [
        Check(f"requests sent, at least {least:,}", f"{num_sent:,}", num_sent >= least > 0),
        none("types of requests not sent", types - set(answers["types"])),
        zero("requests lost", answers["lost"]),
        zero("incomplete answers", answers["incomplete"]),
        zero("greedy answers that differ from plain decoding", answers["differs"]),
        Check(
            f"greedy answers that differ by rounding, at most {MAX_ROUNDED_SHARE:.0%}",
            f"{rounding} of {compared}",
            rounding <= MAX_ROUNDED_SHARE * compared and compared > 0,
        ),
        none("faults that never happened", FAULTS.keys() - happened),
        none("failures and pauses not counted", {name for one in windows for name in one["uncounted"]}),
        none("bad input with another answer than 4xx", improper),
        Check("preemptions, some", f"{last['preemptions']:,.0f}", is_preempted),
        Check(
            f"growth of memory per 1,000 requests, below {MAX_MB_PER_1000:g} MB",
            ", ".join(f"{role} {number:.2f} MB" for role, number in growth.items()),
            fastest < MAX_MB_PER_1000 if is_slope else None,
        ),
        Check("KV cache in use at the end, 0%", f"{last['kv_usage']:.2%}", last["kv_usage"] == 0),
        zero("requests running or waiting at the end", round(last["running"] + last["waiting"])),
        Check(f"more file descriptors at the end, at most {MAX_MORE_FDS}", f"{fds}", fds <= MAX_MORE_FDS),
        none("leftovers of the server", record["left"]),
    ]


def checks_of_kill(kill: Mapping[str, Any]) -> list[Check]:
    name, exit_s, max_s, ends = kill["name"], kill["exit_s"], kill["max_s"], kill["stream_ends"]
    is_proper = sum(ends.get(end, 0) for end in (ANSWER, ERROR_EVENT)) == NUM_STREAMS
    values = ", ".join(f"{number} {end}" for end, number in ends.items())
    running, next_ = kill["streams_running"], kill["next_is_same"]
    return [
        Check(f"{name}: ended in {max_s:g} s", f"{exit_s} s", exit_s is not None and exit_s <= max_s),
        Check(f"{name}: running streams, {NUM_STREAMS}", f"{running}", running == NUM_STREAMS),
        Check(f"{name}: all streams ended by an answer or an error event", values, is_proper),
        Check(f"{name}: reason in the log", kill["reason"] or "none", bool(kill["reason"])),
        none(f"{name}: leftovers", kill["left"]),
        Check(f"{name}: the next server answers as before", "yes" if next_ else "no", next_),
    ]


def checks_of(record: Mapping[str, Any]) -> list[Check]:
    traffic = checks_of_traffic(record["traffic"]) if "traffic" in record else []
    return [*traffic, *(check for kill in record.get("kills", []) for check in checks_of_kill(kill))]


def zero(name: str, number: int) -> Check:
    return Check(f"{name}, 0", f"{number:,}", number == 0)


def none(name: str, found: Collection[str]) -> Check:
    return Check(f"{name}, none", ", ".join(sorted(found)) or "none", not found)
