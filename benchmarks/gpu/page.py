# SPDX-License-Identifier: Apache-2.0
"""The page of results that `make bench-gpu` ends in: Markdown, its plots, and the goals as JSON."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.machine import device_of
from benchmarks.common.plots import plt, save
from benchmarks.gpu.engine_report import cell_of, check_name, ok, sameness, telling_line
from benchmarks.gpu.parts import Part

NAME = "results.md"
Record = dict[str, Any]  # the JSON of a part


def write(folder: Path, parts: Sequence[Part], entries: dict[str, Any], device: str) -> None:
    """Write results.md, goals.json and the plots from what the parts have written so far.

    Args:
        folder: of all results.
        parts: in their order.
        entries: how each ended, by name.
        device: "cuda" or "cpu".
    """
    # What has been left out now may have a result of an earlier call.
    paths = {part.name: part.result(folder) for part in parts if part.result(folder).exists()}
    records = {name: json.loads(path.read_text()) for name, path in paths.items() if path.suffix == ".json"}
    preflight = json.loads((folder / "preflight.json").read_text())
    goals = all_goals(records.values())
    (folder / "goals.json").write_text(json.dumps(goals, indent=1) + "\n")
    lines = ["# What the GPU showed", "", *_machine(preflight, device), "", *_missing(preflight)]
    lines += _section("Goals", _goals(goals))
    lines += _section("Parts", _parts(parts, entries))
    lines += _section("Greedy output", _lossless(_results(records, "lossless")))
    tests = [path for path in paths.values() if path.suffix == ".xml"]
    lines += _section("Tests", [line for path in tests for line in _tests(path)])
    lines += _section("Beside the strongest peer", _peer(folder, _of(records, "gpu peer")))
    lines += _section("Steps and speed", _steps(_of(records, "gpu engine")))
    lines += _section("Draft attention", _kernels(folder, _of(records, "gpu kernels")))
    lines += _section("What was not measured or is wrong", _problems(records, parts, entries))
    (folder / NAME).write_text("\n".join(lines).rstrip() + "\n")


def all_goals(records: Iterable[Record]) -> list[Record]:
    """Goals of all parts, that of sameness first."""
    goals, checks = [], []
    for record in records:
        goals += record.get("goals", [])
        checks += record.get("lossless", [])
        if record["benchmark"] == "gpu peer":
            goals += _peer_goals(record)
    if checks:
        same = sum(check["status"] == "ok" for check in checks)
        first = {"goal": "cases whose greedy output is plain decoding's", "at_least": len(checks)}
        goals.insert(0, {**first, "measured": same, "reached": same == len(checks)})
    return goals


def _peer_goals(record: Record) -> list[Record]:
    return [
        {
            "goal": f"{r['policy']} over plain, {r['context']:,} tokens, {record['acceptance']}",
            "at_least": r["peer"]["speedup"],
            "measured": r["speedup"],
            "reached": r["speedup"] >= r["peer"]["speedup"],
        }
        for r in ok(record["results"])
        if "speedup" in r and "peer" in r
    ]


def _of(records: dict[str, Record], benchmark: str) -> list[Record]:
    return [record for record in records.values() if record["benchmark"] == benchmark]


def _results(records: dict[str, Record], key: str) -> list[Record]:
    return [result for record in records.values() for result in record.get(key, [])]


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "", *(lines or ["Not measured."]), ""]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}", *lines] if lines else []


def _machine(preflight: Record, device: str) -> list[str]:
    machine = preflight["machine"]
    words = [device_of(machine)]
    words += [f"{machine[name]} GiB" for name in ("gpu_memory_gib",) if name in machine]
    for name in ("driver", "cuda", "torch", "vllm", "vllm_magicdec", "flashinfer_python"):
        words += [f"{name.replace('_', '-')} {machine[name]}"] if name in machine else []
    lines = [f"{', '.join(words)}; {preflight['date']}."]
    if device != "cuda":
        lines += ["", "**On a CPU, with tiny models and stand-ins: no time says anything.**"]
    return lines


def _missing(preflight: Record) -> list[str]:
    missing = [f"- {finding['missing']}" for finding in preflight["findings"] if finding["missing"]]
    return ["**Missing here:**", "", *missing, ""] if missing else []


def _goals(goals: list[Record]) -> list[str]:
    rows = []
    for goal in goals:
        bound = f"≥ {goal['at_least']:.3g}" if "at_least" in goal else f"≤ {goal['at_most']:.3g}"
        verdict = "met" if goal["reached"] else "**missed**"
        rows.append((goal["goal"], bound, f"{goal['measured']:.3g}", verdict))
    return _table(("goal", "bound", "measured", ""), rows)


def _parts(parts: Sequence[Part], entries: dict[str, Any]) -> list[str]:
    rows = []
    for part in parts:
        entry = entries.get(part.name, {"status": "not run"})
        took = f"{entry['minutes']:.1f}" if "minutes" in entry else ""
        log = f"[log]({part.name}.log)" if took else ""
        rows.append((part.name, part.shows, str(part.minutes), took, entry["status"], log))
    return _table(("part", "shows", "planned min", "took min", "", ""), rows)


def _lossless(checks: list[Record]) -> list[str]:
    lines = []
    for check in ok(checks):
        steps = check.get("draft_steps")
        seen = (
            f"; {steps['graph']} draft steps from graphs, {steps['flashinfer']} of them with FlashInfer, "
            f"{steps['eager']} eager"
            if steps
            else ""
        )
        drafts = f"{check['accepted']} of {check['drafted']} drafts accepted"
        lines.append(f"- {check_name(check)}: {sameness(check)}; {drafts}{seen}")
    return lines


def _tests(path: Path) -> list[str]:
    lines = []
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        bad = count["failures"] + count["errors"]
        passed = count["tests"] - bad - count["skipped"]
        lines.append(f"{passed} passed, {bad} failed, {count['skipped']} skipped.")
        for case in suite.iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                lines += ["", f"- failed: {case.get('classname')}: {case.get('name')}"]
    return lines


def _peer(folder: Path, records: list[Record]) -> list[str]:
    rows, bars = [], []
    for record in records:
        for r in ok(record["results"]):
            peer = r.get("peer")
            beside = f"{peer['tokens_per_s']} ({peer['speedup']:.2f} x), {peer['gpus']}" if peer else ""
            speedup = f" ({r['speedup']:.2f} x)" if "speedup" in r else ""
            rows.append(
                (
                    f"{r['context']:,}",
                    r["policy"],
                    f"{r['batch']} of {r['requests']}",
                    str(r["budget"] or ""),
                    f"{r['acceptance_length']:.2f}{' (synthetic)' * _is_synthetic(r)}",
                    f"{r['tokens_per_s']:.0f}{speedup}",
                    beside,
                )
            )
            if "speedup" in r:
                name = f"{r['policy']}\n{r['context']:,}{'' if _is_synthetic(r) else ', real weights'}"
                bars.append((name, r["speedup"], peer and peer["speedup"]))
    if not rows:
        return []
    notes = (
        f"Of the requests, those that fit decode together. The peer: {records[0]['peer']['source']}. "
        "Synthetic tokens per round are its own, so that such a row compares time alone."
    )
    columns = ("context", "policy", "requests", "budget", "tokens per round", "tokens/s", "the peer's")
    return [*_table(columns, rows), "", notes, *_plot(folder, "peer.png", bars, _draw_bars)]


def _is_synthetic(result: Record) -> bool:
    """Whether drafts of the peer's cells were accepted at a stated rate."""
    return result["synthetic_tokens_per_round"] is not None


def _draw_bars(bars: list[tuple[str, float, float | None]]) -> Any:
    figure, axes = plt.subplots(figsize=(1.6 + 1.4 * len(bars), 4), layout="constrained")
    places = range(len(bars))
    axes.bar([place - 0.2 for place in places], [ours for _, ours, _ in bars], 0.4, label="here")
    axes.bar([place + 0.2 for place in places], [peer or 0 for *_, peer in bars], 0.4, label="the peer's")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(list(places), [name for name, *_ in bars])
    axes.set_ylabel("speedup over plain decoding")
    axes.legend()
    return figure


def _steps(records: list[Record]) -> list[str]:
    rows, speeds = [], []
    for record in records:
        gamma = str(record["settings"]["gamma"])
        for r in ok(record["times"]):
            plain, draft, verify = r["plain_ms"], r["draft_ms"], r["verify_ms"][gamma]
            best = max((s["speedup"] for s in r["speedups"]), default=None)
            rows.append(
                (
                    *(r["shape"], r["policy"], f"{r['batch']} x {r['context']:,}", str(r["budget"])),
                    *(f"{plain:.2f}", f"{draft:.2f} ({draft / plain:.2f})"),
                    f"{verify:.2f} ({verify / plain:.2f})",
                    f"{best:.2f}" if best is not None else "not steady",
                )
            )
        for r in ok(record["speed"]):
            rate = r["synthetic_acceptance_rate"]
            shape, batch, context = cell_of(r)
            speeds.append(
                (
                    *(shape, f"{batch} x {context:,}", "plain" if rate is None else f"synthetic {rate:g}"),
                    f"{r['tokens_per_s']:.0f}",
                    f"{r['speedup']:.2f}" if "speedup" in r else "",
                    f"{r['eq2']:.2f}" if "eq2" in r else "",
                )
            )
    columns = ("shape", "policy", "cell", "budget", "T_T ms", "T_D ms", "T_V ms", "best by Eq. 2")
    lines = _table(columns, rows)
    if speeds:
        columns = ("shape", "cell", "acceptance", "tokens/s", "over plain", "by Eq. 2")
        lines += ["", "As served; in brackets above, in plain steps:", "", *_table(columns, speeds)]
    return lines


def _kernels(folder: Path, records: list[Record]) -> list[str]:
    lines: list[str] = []
    for record in records:
        results = ok(record["results"])
        drafts = [r for r in results if r["granularity"] != "full"]
        rate = record["copy_bytes_per_s"] / 1e12
        lines.append(f"{len(results)} kernels right and timed; the memory copies {rate:.2f} TB/s.")
        points = [
            (f"{r['granularity']} {r['kernel']}, {r['shape']}", r["batch"] * r["budget"], r["share"])
            for r in drafts
        ]
        lines += _plot(folder, "kernels.png", points, _draw_shares)
    return lines


def _draw_shares(points: list[tuple[str, int, float]]) -> Any:
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for name in dict.fromkeys(name for name, *_ in points):
        own = sorted((tokens, share) for found, tokens, share in points if found == name)
        axes.plot([t for t, _ in own], [100 * s for _, s in own], ".", label=name, alpha=0.6)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens read: batch x budget")
    axes.set_ylabel("% of the bandwidth of a copy")
    axes.legend(fontsize=7)
    return figure


def _plot(folder: Path, name: str, points: list[Any], draw: Callable[[list[Any]], Any]) -> list[str]:
    if not points:
        return []
    save(draw(points), folder / name)
    return ["", f"![{name}]({name})"]


def _problems(records: dict[str, Record], parts: Sequence[Part], entries: dict[str, Any]) -> list[str]:
    ended = {part.name: entries.get(part.name, {"status": "not run"})["status"] for part in parts}
    lines = [f"- {status}: {name}" for name, status in ended.items() if status != "done"]
    for name, record in records.items():
        for key in ("times", "speed", "lossless", "results"):
            for r in record.get(key, []):
                if r["status"] != "ok":
                    where = ", ".join(
                        str(r[k]) for k in ("shape", "mode", "policy", "granularity", "kernel") if k in r
                    )
                    cell = f"{r['batch']} x {r['context']:,}" if "batch" in r else f"budget {r['budget']}"
                    lines.append(f"- {r['status']}: {name}: {where}, {cell}: {telling_line(r['reason'])}")
    return list(dict.fromkeys(lines)) or ["Nothing."]
