# SPDX-License-Identifier: Apache-2.0
"""What the kernel layer finds on a cell, the goals, and the table of it all."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

# Share of the floor's bandwidth that a draft kernel should reach ...
GOALS = {"page": 0.85, "token": 0.60}
GOAL_BATCH, GOAL_BUDGET = 32, 512  # ... from here on


@dataclass(frozen=True)
class Result:
    """One kernel on one cell."""

    shape: str
    batch: int
    context: int  # tokens per request
    budget: int  # tokens of the view; the context for the full-context baseline
    granularity: str  # "full", "page", "token"
    kernel: str
    runs_on: str
    status: str  # "ok", "wrong", "failed", "skipped"
    reason: str = ""
    error: float | None = None  # largest, as a share of the largest result
    time_us: float | None = None
    full_us: float | None = None  # the full-context baseline of the cell
    bytes_read: int | None = None
    floor_us: float | None = None  # bytes_read at the measured copy bandwidth
    share: float | None = None  # floor_us / time_us
    plan_us: float | None = None  # of the host, once for all layers of a step; not in time_us
    goal: float | None = None

    @property
    def name(self) -> str:
        return f"{self.granularity} {self.kernel}"


def make_table(results: list[Result], device: str) -> str:
    """At each shape's longest context with results: the share of the floor's bandwidth, and the speedup."""
    is_cpu = device != "cuda"
    lines = ["ON A CPU, with stand-ins for the GPU's kernels: no time says anything"] if is_cpu else []
    for shape in dict.fromkeys(result.shape for result in results):
        timed = [r for r in results if r.shape == shape and r.status == "ok"]
        if not timed:
            continue
        batches = sorted({r.batch for r in timed})
        longest = {batch: max(r.context for r in timed if r.batch == batch) for batch in batches}
        header = "".join(f"batch {batch:>3} @ {longest[batch]:>6} ".rjust(21) for batch in batches)
        lines += [f"{shape}: share of the floor's bandwidth, speedup over full context", " " * 44 + header]
        rows = dict.fromkeys((r.name, r.budget) for r in timed if r.granularity != "full")
        for kernel, budget in [("full flashinfer", 0), *rows]:
            name = f"{kernel}, {budget or 'all'} tokens"
            found = {
                r.batch: r
                for r in timed
                if r.name == kernel and r.context == longest[r.batch] and budget in (0, r.budget)
            }
            lines.append(name.ljust(44) + "".join(_entry(found.get(batch)).rjust(21) for batch in batches))
        lines.append("")
    counts = Counter(r.status for r in results)
    lines.append(", ".join(f"{counts[status]} {status}" for status in ("ok", "wrong", "failed", "skipped")))
    skipped = Counter(r.reason for r in results if r.status == "skipped")
    lines += [f"skipped {affected}: {reason}" for reason, affected in skipped.items()]
    for r in results:
        if r.status in ("wrong", "failed"):
            cell = f"{r.shape}, batch {r.batch}, context {r.context}, budget {r.budget}"
            lines.append(f"{r.status.upper()}: {r.name} ({cell}): {r.reason}")
    return "\n".join(lines + _plans(results) + _goals(results))


def _entry(result: Result | None) -> str:
    if result is None or result.share is None or result.time_us is None:
        return "-"
    speedup = "" if result.full_us is None else f" {result.full_us / result.time_us:7.2f} x"
    return f"{100 * result.share:6.1f} %{speedup}"


def _plans(results: list[Result]) -> list[str]:
    lines = []
    for shape, kernel in dict.fromkeys((r.shape, r.name) for r in results if r.plan_us):
        slowest: dict[int, float] = {}
        for r in results:
            if (r.shape, r.name) == (shape, kernel) and r.plan_us:
                slowest[r.batch] = max(r.plan_us, slowest.get(r.batch, 0))
        times = ", ".join(f"{us / 1000:.2f} ms at batch {batch}" for batch, us in sorted(slowest.items()))
        lines.append(f"host time of a plan, at most: {kernel} ({shape}): {times}")
    return lines


def judge(results: list[Result]) -> list[dict[str, Any]]:
    """The goals, each on all cells that it is for; none where there is no such cell."""
    goals = []
    for name in dict.fromkeys(r.name for r in results if r.goal is not None):
        judged = [r for r in results if r.name == name and r.goal is not None]
        shares = [r.share or 0.0 for r in judged]
        least = judged[0].goal or 0.0
        goals.append(
            {
                "goal": f"{name}, share of the floor's bandwidth from batch {GOAL_BATCH} and budget "
                f"{GOAL_BUDGET} on, lowest of {len(judged)} cells",
                "at_least": least,
                "measured": min(shares),
                "reached": min(shares) >= least,
                "cells_reached": sum(share >= least for share in shares),
                "cells": len(shares),
            }
        )
    return goals


def _goals(results: list[Result]) -> list[str]:
    lines = [
        f"goal {goal['goal']} >= {goal['at_least']:.2f}: {goal['measured']:.3f}; reached in "
        f"{goal['cells_reached']} of {goal['cells']} cells"
        for goal in judge(results)
    ]
    return lines or [
        f"the goals are for GPUs, batch {GOAL_BATCH} and budget {GOAL_BUDGET} or more: not judged"
    ]
