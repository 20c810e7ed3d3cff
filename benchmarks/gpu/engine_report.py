# SPDX-License-Identifier: Apache-2.0
"""What is made of the engine layer's results: Eq. 2 and the roofline beside them, the goals, the table.

A result is a dictionary, as in the JSON file, for one cell (shape, batch, context) of one engine. Its
`status` is "ok", "wrong", "failed" or "skipped"; of results that are not "ok" only `reason` counts.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.eq2 import MAX_DIFFERENCE, CellTimes, beside_roofline, speedups
from vllm_magicdec.planner.performance import Deployment, tokens_per_round

BASE = "streamingllm"  # the policy whose speed is measured and judged

GOAL_GPU, GOAL_SHAPE, GOAL_BUDGET, GOAL_GAMMA = "H200", "llama-3.1-8b", 512, 4
GOAL_CELL = (24, 32768)
MAX_DRAFT_SHARE = 0.20  # T_D / T_T
MAX_VERIFY_RATIO = 1.15  # T_V(4) / T_T
# By Eq. 2: gamma, tokens per round, speedup. The first is of the paper's Table 1, the second alpha 0.95.
MIN_SPEEDUPS = ((3, 2.8, 2.0), (6, tokens_per_round(6, 0.95), 2.8))

Result = dict[str, Any]


def ok(results: Iterable[Result]) -> list[Result]:
    return [result for result in results if result["status"] == "ok"]


def cell_of(result: Result) -> tuple[str, int, int]:
    return result["shape"], result["batch"], result["context"]


# ---- numbers


def add_predictions(result: Result, deployment: Deployment, alphas: Sequence[float]) -> None:
    """Put the times of Eq. 2, its speedups, the roofline and the paper beside a cell's kinds of steps."""
    times = CellTimes.of(result["kinds"])
    place = {name: result[name] for name in ("batch", "context", "budget")}
    result |= asdict(times) | {"draft_ms": times.draft_ms, "select_ms": times.select_ms}
    result["is_steady"] = times.is_steady
    result |= beside_roofline(times, deployment, **place)
    result["hardware"] = asdict(deployment.hardware)
    result["speedups"] = []
    if times.is_steady:
        result["speedups"] = speedups(
            times,
            deployment,
            alphas=alphas,
            # As served, snapkv selects once per prompt.
            selects_every_round=not result["policy"].startswith("snapkv"),
            **place,
        )


def add_speedups(speed: list[Result], times: list[Result]) -> None:
    """Put the speedup over plain decoding, and what Eq. 2 makes of the step times, beside tokens/s."""
    plain = {cell_of(r): r["tokens_per_s"] for r in ok(speed) if r["synthetic_acceptance_rate"] is None}
    steps = {cell_of(r): CellTimes.of(r["kinds"]) for r in reversed(ok(times)) if r["policy"] == BASE}
    for result in ok(speed):
        cell, rate = cell_of(result), result["synthetic_acceptance_rate"]
        if rate is None:
            continue
        if cell in plain:
            result["speedup"] = result["tokens_per_s"] / plain[cell]
        if cell in steps and steps[cell].is_steady:
            gamma = result["gamma"]
            omega = tokens_per_round(gamma, rate)
            result["eq2"] = steps[cell].speedup(gamma, omega, selects_every_round=True)


def judge(times: list[Result], speed: list[Result], gpu: str) -> list[Result]:
    """The goals, if their cell was measured on their GPU.

    The steps that are timed one by one carry the host's work, which serving hides behind the device's, and
    a longer T_T would make the goals easier. So T_T is the step of the plain engine as served where that
    was measured and is shorter; differences of two steps hold no work that both have.

    Args:
        times: of every cell, with predictions.
        speed: of every cell.
        gpu: its name; empty without one.
    """
    wanted = (GOAL_SHAPE, *GOAL_CELL)
    found = [
        result
        for result in ok(times)
        if cell_of(result) == wanted
        and (result["policy"], result["budget"], result["is_steady"]) == (BASE, GOAL_BUDGET, True)
    ]
    if GOAL_GPU not in gpu or not found or GOAL_GAMMA not in found[0]["verify_ms"]:
        return []
    cell = found[0]
    served_ms = [
        r["step_ms"] for r in ok(speed) if cell_of(r) == wanted and r["synthetic_acceptance_rate"] is None
    ]
    plain_ms = min([cell["plain_ms"], *served_ms])

    def drafting(gamma: int) -> float:
        """In plain steps."""
        return cell["drafting_ms"][gamma] / plain_ms

    def verifying(gamma: int) -> float:
        return 1 + (cell["verify_ms"][gamma] - cell["plain_ms"]) / plain_ms

    costs = (
        ("T_D / T_T", drafting(GOAL_GAMMA) / GOAL_GAMMA, MAX_DRAFT_SHARE),
        (f"T_V({GOAL_GAMMA}) / T_T", verifying(GOAL_GAMMA), MAX_VERIFY_RATIO),
    )
    gains = (
        (
            f"speedup by Eq. 2 at gamma {gamma} and {omega:.2f} tokens per round",
            omega / (drafting(gamma) + verifying(gamma)),
            least,
        )
        for gamma, omega, least in MIN_SPEEDUPS
        if gamma in cell["verify_ms"]
    )
    goals = [
        {"goal": name, "at_most": most, "measured": value, "reached": value <= most}
        for name, value, most in costs
    ]
    goals += [
        {"goal": name, "at_least": least, "measured": value, "reached": value >= least}
        for name, value, least in gains
    ]
    return [{**goal, "plain_ms": plain_ms} for goal in goals]


# ---- what is printed


def make_table(record: Result) -> str:
    """The command's output for what is in its JSON file."""
    gamma = record["settings"]["gamma"]
    times, speed, checks = record["times"], record["speed"], record["lossless"]
    lines = []
    if record["device"] != "cuda":
        lines.append("ON A CPU, with a tiny model: no time says anything")
    engines = dict.fromkeys((r["shape"], r["policy"], r["asked_backend"]) for r in ok(times))
    for engine in engines:
        own = [r for r in ok(times) if (r["shape"], r["policy"], r["asked_backend"]) == engine]
        lines += _times(own, gamma)
    lines += [*_backends(times, gamma), *_speed(speed), *_checks(checks)]
    if checks and not record["budgets_differ"]:
        lines.append("LOSSLESS PROVED NOTHING: no draft was ever rejected")
    lines += _problems([*times, *speed, *checks])
    for goal in record["goals"]:
        verdict = "reached" if goal["reached"] else "MISSED"
        bound = f"<= {goal['at_most']:.2f}" if "at_most" in goal else f">= {goal['at_least']:.2f}"
        lines.append(f"goal {goal['goal']} {bound}: {goal['measured']:.3f}, {verdict}")
    if not record["goals"]:
        batch, context = GOAL_CELL
        where = f"one {GOAL_GPU}, {GOAL_SHAPE}, batch {batch}, context {context}, budget {GOAL_BUDGET}"
        lines.append(f"the goals are for {where}: not judged")
    return "\n".join(lines)


def _times(results: list[Result], gamma: int) -> list[str]:
    """The times of one engine's cells and the speedups that follow from them."""
    first = results[0]
    backends = ", ".join(first["attention_backends"])
    columns = ("T_T", "T_D", f"T_V({gamma})", "T_select", "T_D/T_T", "T_V/T_T")
    lines = [
        f"{first['shape']}, {first['policy']}, budget {first['budget']}: times in ms "
        f"({backends}, {first['runner']} runner)",
        " batch context" + "".join(column.rjust(9) for column in columns),
    ]
    for r in results:
        plain, draft, verify = r["plain_ms"], r["draft_ms"], r["verify_ms"][gamma]
        numbers = (plain, draft, verify, r["select_ms"], draft / plain, verify / plain)
        lines.append(f"{r['batch']:6} {r['context']:7}" + "".join(f"{number:9.3f}" for number in numbers))
        if r["differs"]:
            predicted = ", ".join(f"{name} {r['roofline_ms'][name]:.3f}" for name in r["differs"])
            lines.append(f"       ! the roofline differs by more than {MAX_DIFFERENCE:.0%}: {predicted}")
        if not r["is_steady"]:
            lines.append("       ! no speedup: drafting took no time, so the times are not steady")
        lines += [f"       {_speedup(entry)}" for entry in r["speedups"]]
    return [*lines, ""]


def _speedup(entry: Result) -> str:
    paper, flag = entry["paper"], " !" if entry["differs"] else ""
    beside = (
        f", Table {paper['table']} {paper['speedup']:.2f} x on {paper['gpus']} at budget {paper['budget']}"
        if paper
        else ""
    )
    return (
        f"Eq. 2 at gamma {entry['gamma']}, acceptance {entry['acceptance_rate']:.2f}: "
        f"{entry['speedup']:.2f} x, roofline {entry['roofline']:.2f} x{flag}{beside}"
    )


def _backends(times: list[Result], gamma: int) -> list[str]:
    """Which attention backend verifies best, cell by cell."""
    asked = [r for r in ok(times) if r["policy"] == BASE and r["asked_backend"] is not None]
    lines = []
    for cell in dict.fromkeys(map(cell_of, asked)):
        own = sorted((r for r in asked if cell_of(r) == cell), key=lambda r: r["verify_ms"][gamma])
        entries = []
        for r in own:
            plain, verify = r["plain_ms"], r["verify_ms"][gamma]
            name = ", ".join(r["attention_backends"])
            if r["asked_backend"] not in r["attention_backends"]:
                name += f" (instead of {r['asked_backend']})"
            entries.append(f"{name} {verify:.3f} / {plain:.3f} ms = {verify / plain:.3f}")
        shape, batch, context = cell
        lines.append(f"{shape}, batch {batch}, context {context}: {'; '.join(entries)}")
    title = f"T_V({gamma}) / T_T by attention backend, fastest verification first"
    return [title, *lines, ""] if lines else []


def _speed(speed: list[Result]) -> list[str]:
    served = ok(speed)
    lines = []
    for cell in dict.fromkeys(map(cell_of, served)):
        entries = []
        for r in (r for r in served if cell_of(r) == cell):
            rate = r["synthetic_acceptance_rate"]
            name = "plain" if rate is None else f"gamma {r['gamma']}, synthetic acceptance {rate:g}"
            over = f" = {r['speedup']:.2f} x" if "speedup" in r else ""
            expected = f" (Eq. 2: {r['eq2']:.2f} x)" if "eq2" in r else ""
            entries.append(f"{name} {r['tokens_per_s']:.1f}{over}{expected}")
        shape, batch, context = cell
        lines.append(f"{shape}, batch {batch}, context {context}: {'; '.join(entries)}")
    return ["decode tokens/s, as served; acceptance is SYNTHETIC", *lines, ""] if lines else []


def _checks(checks: list[Result]) -> list[str]:
    lines = []
    for r in ok(checks):
        lines.append(
            f"{check_name(r)}: {sameness(r)}, {r['accepted']} of {r['drafted']} drafts accepted{_steps(r)}"
        )
    return ["greedy output against plain decoding, the shipped model", *lines, ""] if lines else []


def check_name(check: Result) -> str:
    """Of a result of `lossless.check`."""
    lookups = ", lookups" if check.get("draft_lookup", "off") == "on" else ""
    return f"{check['mode']} ({check['dtype']}), {check['policy']}, budget {check['budget']}{lookups}"


def sameness(check: Result) -> str:
    """What such a result has shown."""
    if "rounding" not in check:
        return "same tokens"
    tokens = check["requests"] * check["tokens"]
    return (
        f"{check['near_ties']} of {tokens} tokens behind the target's best one, by at most "
        f"{check['largest_margin']:.4f} where rounding explains {2 * check['rounding']:.4f}"
    )


def _steps(check: Result) -> str:
    steps = check.get("draft_steps")
    if steps is None:
        return ""
    return (
        f", {steps['graph']} draft steps from CUDA graphs ({steps['flashinfer']} of them with FlashInfer), "
        f"{steps['eager']} eager"
    )


def _problems(results: list[Result]) -> list[str]:
    """What was not measured or is wrong, each reason once per cell."""
    lines = []
    for r in results:
        if r["status"] != "ok":
            where = (
                f"{r['shape']}, batch {r['batch']}, context {r['context']}"
                if "shape" in r
                else f"greedy output, {check_name(r)}"
            )
            lines.append(f"{r['status'].upper()}: {where}: {telling_line(r['reason'])}")
    return list(dict.fromkeys(lines))


def telling_line(reason: str) -> str:
    """Of a reason that is an engine's log: the last error in it."""
    lines = reason.strip().splitlines()
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception): ", line)]
    return textwrap.shorten((errors or lines)[-1], 200)
