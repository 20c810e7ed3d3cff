# SPDX-License-Identifier: Apache-2.0
"""What a record of `soak.py` has to show. Everything here is arithmetic on what was written down."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from .asking import Answer, Outcome, compare, why_incomplete
from .bad_input import Rejection
from .faults import COUNTED, FAULTS, FIRST_SHARE, PAUSED, SHORT_MINUTES, Window
from .requests import Request
from .watching import GAUGES_OF_PASSES, Sample

MOST_MB_PER_1000 = 1.0  # that a process may grow after the warm-up
# Of a run. It is over before the first fault comes: what a fault leaves in memory is growth as well.
WARM_UP_SHARE = FIRST_SHARE / 2
# With fewer after the warm-up, what an allocator happens to keep looks like growth.
LEAST_REQUESTS_FOR_A_SLOPE = 3000
MOST_ROUNDED_SHARE = 0.01
REQUESTS_OF_AN_HOUR = 10_000
MOST_MISSED_SAMPLES = 5  # a virtual machine may stand still for a minute
LEAST_PREEMPTIONS_PER_1000 = 20.0  # requests
LEAST_REQUESTS_FOR_PREEMPTIONS = 300  # in fewer, bursts may happen to fit
MOST_MORE_FDS = 4  # at the end, of a process, than when nothing had been asked yet
# Six answers go on to their end, which took 8 and 12 s. A machine may be three times slower, and stand
# still for a minute.
_MOST_TO_END_S = {"SIGTERM in mid-stream": 100.0}
_MOST_TO_EXIT_S = 60.0
_SETTLE_S = 2.0  # after a fault, until what it brought has been verified


@dataclass(frozen=True)
class Check:
    """One bound and whether it holds."""

    name: str
    bound: str
    value: str
    holds: bool | None  # None: this run is too short, or of too little, to say


def judge_answers(
    requests: Sequence[Request], plain: Sequence[Answer | None], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """Counts of what became of requests, with the first reasons of each kind."""
    counts = Counter(sent=len(outcomes), hung_up=0, lost=0, incomplete=0, same=0, rounding=0, differs=0)
    reasons: list[str] = []
    for outcome in outcomes:
        request, expected = requests[outcome.request], plain[outcome.request]
        if outcome.hung_up:
            counts["hung_up"] += 1
        elif outcome.answer is None:
            counts["lost"] += 1
            reasons.append(f"request {outcome.request} ({request.kind}) lost: {outcome.error}")
        elif reason := why_incomplete(request, outcome.answer):
            counts["incomplete"] += 1
            reasons.append(f"request {outcome.request} ({request.kind}) incomplete: {reason}")
        elif expected is not None:
            how = compare(expected, outcome.answer)
            counts[how] += 1
            if how == "differs":
                reasons.append(f"request {outcome.request} ({request.kind}) differs from plain decoding")
    kinds = Counter(requests[outcome.request].kind for outcome in outcomes)
    return {**counts, "by_kind": dict(kinds), "reasons": reasons[:20]}


def latencies(outcomes: Sequence[Outcome], windows: Sequence[Window]) -> list[dict[str, Any]]:
    """Of answers before the first fault, during each, in the quiet while after them, with times in ms.

    An answer belongs to a fault that was on at any time of it.
    """
    begin = min((window.begin_s for window in windows), default=float("inf"))
    faults = [window for window in windows if window.name != "controller"]
    end = max((window.end_s for window in faults), default=float("inf"))
    last = max((window.begin_s for window in windows if window.name == "controller"), default=float("inf"))
    phases: dict[str, list[Outcome]] = {"before": [o for o in outcomes if o.ended_s < begin]}
    for window in windows:
        phases[window.name] = [
            o for o in outcomes if o.sent_s < window.end_s and o.ended_s >= window.begin_s
        ]
    phases["after"] = [o for o in outcomes if o.sent_s >= end and o.ended_s < last]
    rows = []
    for name, chosen in phases.items():
        answered = [o for o in chosen if o.answer is not None]
        whole = [1000 * (o.ended_s - o.sent_s) for o in answered]
        first = [1000 * (o.first_s - o.sent_s) for o in answered if o.first_s is not None]
        lost = sum(o.is_lost for o in chosen)
        rows.append({"phase": name, "answers": len(answered), "lost": lost, **_percentiles(first, whole)})
    return rows


def _percentiles(first_ms: Sequence[float], whole_ms: Sequence[float]) -> dict[str, float | None]:
    named: dict[str, float | None] = {}
    for name, values in (("first_token_ms", first_ms), ("answer_ms", whole_ms)):
        cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [None] * 99
        for percent in (50, 95, 99):
            cut = cuts[percent - 1]
            named[f"p{percent}_{name}"] = cut if cut is None else round(cut, 1)
    return named


def slopes(samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """MB that each process's resident memory grows per 1,000 answers, after the warm-up (least squares).

    Not its share of what is resident (PSS): that moves with whatever else on the machine has mapped the
    same libraries.
    """
    warm = [sample for sample in samples if sample.at_s >= WARM_UP_SHARE * seconds]
    names = {name for sample in warm for name in sample.rss_mb}
    return {
        name: round(
            1000
            * _slope(
                [(float(sample.answered), sample.rss_mb[name]) for sample in warm if name in sample.rss_mb]
            ),
            3,
        )
        for name in sorted(names)
    }


def _slope(points: Sequence[tuple[float, float]]) -> float:
    count = len(points)
    mean_x, mean_y = (sum(column) / count for column in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def own_passes(samples: Sequence[Sample], windows: Sequence[Window]) -> dict[str, dict[str, float]]:
    """Passes, and drafts of theirs that stood, before the first fault and after those that force some."""
    faults = [window for window in windows if window.name != "controller"]
    begins = {"before": 0.0, "after": max((window.end_s for window in faults), default=0.0) + _SETTLE_S}
    ends = {
        "before": min((window.begin_s for window in faults), default=0.0),
        "after": min(
            (window.begin_s for window in windows if window.name == "controller"), default=math.inf
        ),
    }
    found = {}
    for when, begin_s in begins.items():
        quiet = [one.gauges for one in samples if begin_s <= one.at_s < ends[when]]
        found[when] = {
            name: quiet[-1][name] - quiet[0][name] if quiet else 0.0 for name in GAUGES_OF_PASSES
        }
    return found


def judge_bad_input(rejections: Sequence[Rejection]) -> dict[str, Any]:
    """How bad input was answered, by kind."""
    answers: dict[str, Counter[str]] = {}
    for rejection in rejections:
        answers.setdefault(rejection.kind, Counter())[rejection.answer] += 1
    improper = sorted({f"{one.kind}: {one.answer}" for one in rejections if not one.is_proper})
    slowest = max(rejections, key=lambda one: one.seconds, default=None)
    return {
        "sent": len(rejections),
        "answers": {kind: dict(counts) for kind, counts in sorted(answers.items())},
        "improper": improper,
        "slowest": slowest and f"{slowest.kind}, {slowest.seconds:.1f} s",
    }


def checks_of_traffic(record: Mapping[str, Any], instruction_sets: str) -> list[Check]:
    """The bounds of the server that was asked all the while, on a machine with these instruction sets."""
    answers, end = record["answers"], record["end"]
    compared = answers["same"] + answers["rounding"] + answers["differs"]
    warm = record["answered_after_warm_up"]
    steepest = max(record["slopes"].items(), key=lambda item: item[1])
    windows = record["faults"]
    by_phase = [row for row in record["latencies"] if row["phase"] not in ("before", "after")]
    uncounted = [
        window["name"]
        for window in windows
        if (counter := COUNTED.get(window["name"])) and not window["failures"].get(counter, 0)
    ]
    pausing = [window for window in windows if window["name"] in PAUSED]
    tireless = [one["name"] for one in pausing if not one["failures"].get(PAUSED[one["name"]], 0)]
    silent = [window["name"] for window in windows if not window["happened"]]
    # One whose library is not installed, and in older records those that have come since.
    untried = [name for name in FAULTS if name not in {window["name"] for window in windows}]
    all_happened = not silent and bool(windows)
    missed, own = record.get("samples_missed", 0), record.get("own_passes", {})  # older records
    is_capped = record.get("rate", 0) < record.get("asked_rate", 0)  # older records have neither
    preemptions_per_1000 = 1000 * end["preemptions"] / max(1, answers["sent"])
    is_fast_hour = record["minutes"] >= 60 and "avx512f" in instruction_sets
    return [
        _none("requests lost", answers["lost"]),
        _none("answers that lack something", answers["incomplete"]),
        _none("greedy answers that differ from plain decoding", answers["differs"]),
        Check(
            "greedy answers that differ by rounding",
            f"at most {MOST_ROUNDED_SHARE:.0%}",
            f"{answers['rounding']} of {compared}",
            answers["rounding"] <= MOST_ROUNDED_SHARE * compared if compared else False,
        ),
        _none("answers lost during faults", sum(row["lost"] for row in by_phase)),
        Check(
            "faults that never happened",
            "none",
            _names([*silent, *(f"{name} (not tried)" for name in untried)]),
            None if all_happened and untried else all_happened,
        ),
        Check("faults that were not counted by name", "none", _names(uncounted), not uncounted),
        Check(
            "faults without a pause of drafting or lookups",
            "none",
            _names(tireless),
            not tireless if pausing and record["minutes"] >= SHORT_MINUTES else None,
        ),
        Check(
            "drafts of auto's own passes that stood, before and after the faults",
            "some each",
            " and ".join(f"{one['stood']:,.0f} of {one['passes']:,.0f} passes" for one in own.values())
            or "not counted",
            all(one["stood"] > 0 for one in own.values())
            if own and record["minutes"] >= SHORT_MINUTES  # else plain decoding may be best all the while
            else None,
        ),
        Check(
            "bad input with another answer than 4xx",
            "none",
            _names(record["bad_input"]["improper"]),
            not record["bad_input"]["improper"] and record["bad_input"]["sent"] > 0,
        ),
        Check(
            "preemptions per 1,000 requests",
            f"at least {LEAST_PREEMPTIONS_PER_1000:g}",
            f"{preemptions_per_1000:.1f}",
            preemptions_per_1000 >= LEAST_PREEMPTIONS_PER_1000
            # In older records prompts waited for room.
            if "rate" in record and not is_capped and answers["sent"] >= LEAST_REQUESTS_FOR_PREEMPTIONS
            else None,
        ),
        Check(
            "growth of memory per 1,000 requests",
            f"below {MOST_MB_PER_1000:g} MB",
            f"{steepest[1]:.2f} MB ({steepest[0]})",
            steepest[1] < MOST_MB_PER_1000 if warm >= LEAST_REQUESTS_FOR_A_SLOPE else None,
        ),
        Check(
            "samples of the server that did not come",
            f"at most {MOST_MISSED_SAMPLES}",
            f"{missed}",
            missed <= MOST_MISSED_SAMPLES,
        ),
        Check("KV blocks in use at the end", "none", f"{end['kv_usage']:.2%}", end["kv_usage"] == 0),
        _none("requests running or waiting at the end", round(end["running"] + end["waiting"])),
        Check(
            "more file descriptors at the end",
            f"at most {MOST_MORE_FDS}",
            f"{end['more_fds']}",
            end["more_fds"] <= MOST_MORE_FDS,
        ),
        _left("left behind by the server", end["left"]),
        Check(
            "requests",
            f"at least {REQUESTS_OF_AN_HOUR:,} in an hour with AVX-512",
            f"{answers['sent']:,} in {record['minutes']:g} minutes",
            answers["sent"] >= REQUESTS_OF_AN_HOUR if is_fast_hour else None,
        ),
    ]


def checks_of_kill(kill: Mapping[str, Any]) -> list[Check]:
    """The bounds of one server that was ended, by what was done to it."""
    name = kill["name"]
    limit_s = _MOST_TO_END_S.get(name, _MOST_TO_EXIT_S)
    return [
        Check(
            f"{name}: the server has ended",
            f"in {limit_s:g} s",
            f"{kill['exit_s']:.1f} s" if kill["exit_s"] is not None else "no",
            kill["exit_s"] is not None and kill["exit_s"] <= limit_s,
        ),
        Check(
            f"{name}: every stream came to a proper end",
            f"{kill['streams']} of {kill['streams']}",
            ", ".join(
                [
                    f"{kill['streams_ended']} of {kill['streams']}",
                    *(f"{count} {end}" for end, count in kill.get("improper_ends", {}).items()),
                ]
            ),
            kill["streams_ended"] == kill["streams"] > 0,
        ),
        Check(
            f"{name}: its log says why",
            "a sentence",
            kill["sentence"] or "nothing",
            bool(kill["sentence"]),
        ),
        _left(f"{name}: left behind", kill["left"]),
        Check(
            f"{name}: the next server answers as before",
            "yes",
            str(kill.get("restarted", "not tried")),
            kill.get("restarted"),  # in older records not after every one
        ),
    ]


def checks_of(record: Mapping[str, Any]) -> list[Check]:
    """All bounds of a record."""
    sets = record["machine"]["instruction_sets"]
    of_traffic = checks_of_traffic(record["traffic"], sets) if "traffic" in record else []
    return [*of_traffic, *(check for kill in record.get("kills", []) for check in checks_of_kill(kill))]


def _none(name: str, number: int) -> Check:
    return Check(name, "0", str(number), number == 0)


def _left(name: str, left: Collection[str]) -> Check:
    return Check(name, "nothing", _names(left), not left)


def _names(names: Collection[str]) -> str:
    return ", ".join(names) or "none"
