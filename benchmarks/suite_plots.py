# SPDX-License-Identifier: Apache-2.0
"""Summaries and plots of a record of suite.py."""

import itertools
import statistics
from pathlib import Path
from typing import Any

from common.machine import device_of
from common.plots import draw_heat_map, norm_of, plt, save
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

PLAIN = "plain"
AGAIN = "plain-again"
PER_POSITION = "spec_decode_per_position_acceptance_rates"
Run = dict[str, Any]  # one run of `vllm bench serve`


def title_of(record: dict[str, Any]) -> str:
    """Return a title with model, machine and workload."""
    machine, settings = record["machine"], record["settings"]
    prompts = "read in every run" if settings["cold"] else "in the prefix cache"
    return (
        f"{record['model']} ({settings['dtype']}), {device_of(machine)}, vLLM {machine['vllm']}\n"
        f"{settings['requests']} requests per run, {settings['tokens']} tokens generated for each, greedy; "
        f"prompts: real text, {prompts}"
    )


def latency(run: Run, statistic: str) -> float:
    """Return milliseconds per output token of a request, `median` or `p99` over the requests.

    The time between tokens is unsuitable, because a server that lacks cores sends several tokens at once.
    """
    return run[f"{statistic}_e2el_ms"] * run["completed"] / run["total_output_tokens"]


def cells_of(runs: list[Run]) -> list[tuple[int, int]]:
    """Return (context, concurrency) of the runs with a fixed number of requests in flight."""
    return sorted({(run["context"], run["concurrency"]) for run in runs if run["concurrency"]})


def speedups(runs: list[Run]) -> dict[str, dict[tuple[int, int], tuple[float, float]]]:
    """Return output tokens/s and the speedup, by method and (context, concurrency).

    The baseline is the mean of plain decoding's servers, so that noise appears on both sides of 1.
    """
    speeds: dict[str, dict[tuple[int, int], float]] = {}
    for run in runs:
        if run["concurrency"]:
            cell = run["context"], run["concurrency"]
            speeds.setdefault(run["method"], {})[cell] = run["output_throughput"]
    plain = [speed for method, speed in speeds.items() if method in (PLAIN, AGAIN)]
    return {
        method: {
            cell: (speed[cell], speed[cell] / statistics.mean(p[cell] for p in plain))
            for cell in sorted(speed)
        }
        for method, speed in speeds.items()
    }


def pooled_acceptance(runs: list[Run], method: str, context: int) -> list[float]:
    """Return the acceptance rate at each position, over all runs' rounds with drafts."""
    own = [
        run
        for run in runs
        if run["method"] == method and run["context"] == context and run.get(PER_POSITION)
    ]
    rounds = sum(run["spec_decode_num_drafts"] for run in own)
    positions = max((len(run[PER_POSITION]) for run in own), default=0)
    return [
        sum(run["spec_decode_num_drafts"] * rate for run in own for rate in run[PER_POSITION][i : i + 1])
        / rounds
        for i in range(positions)
    ]


def styles(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return line styles by method: dotted for plain, solid for magicdec, dashed for others."""
    families = {PLAIN: (":", "x"), "magicdec": ("-", "o")}
    grays = iter(("black", "gray"))
    own = [f"C{index}" for index in range(10) if index != 7]  # C7 is gray
    colors = itertools.cycle([*own, "navy", "gold"])
    lines = {}
    for method in dict.fromkeys(run["method"] for run in record["runs"]):
        linestyle, marker = families.get(method.split("-")[0], ("--", "s"))
        color = next(grays if method in (PLAIN, AGAIN) else colors)
        label = f"{method} (shows the noise)" if method == AGAIN else method
        lines[method] = {"label": label, "color": color, "linestyle": linestyle, "marker": marker}
    return lines


def draw(record: dict[str, Any], folder: Path) -> None:
    """Draw all plots of a record."""
    draw_throughput_against_latency(record, folder / "throughput-latency.png")
    draw_speedup(record, folder / "speedup.png")
    draw_acceptance(record, folder / "acceptance.png")


def draw_throughput_against_latency(record: dict[str, Any], path: Path) -> None:
    """Draw a row per context and one for request rates: median left, 99th percentile right."""
    runs, contexts = record["runs"], record["settings"]["context"]
    groups = [(context, "concurrency", "requests in flight") for context in contexts]
    groups.append((max(contexts), "rate", "requests per second"))
    figure, rows = plt.subplots(
        len(groups), 2, figsize=(13, 3.8 * len(groups)), squeeze=False, layout="constrained"
    )
    for (context, load, unit), row in zip(groups, rows, strict=True):
        loads = sorted({run[load] for run in runs if run["context"] == context and run[load]})
        title = f"{context:,} tokens of context; {', '.join(f'{n:g}' for n in loads)} {unit}"
        for axes, statistic, kind in zip(
            row, ("median", "p99"), ("median", "99th percentile"), strict=True
        ):
            for method, style in styles(record).items():
                own = [r for r in runs if r["method"] == method and r["context"] == context and r[load]]
                own.sort(key=lambda run: run[load])
                points = [(latency(run, statistic), run["output_throughput"]) for run in own]
                axes.plot(*zip(*points, strict=True), ms=0, **style)
                for run, point in zip(own, points, strict=True):
                    size = 12 * (2 + 3 * loads.index(run[load]))
                    axes.scatter(*point, size, color=style["color"], marker=style["marker"])
            axes.set(
                title=title,
                xlabel=f"time of a request / its output tokens (ms), {kind} (left is better)",
                ylabel="output tokens/s (up is better)",
            )
            axes.margins(y=0.1)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
    lines = [Line2D([], [], **style) for style in styles(record).values()]
    figure.legend(handles=lines, loc="outside lower center", ncols=min(5, len(lines)))
    _save(figure, "Throughput against latency; the larger the marker, the higher the load", record, path)


def draw_speedup(record: dict[str, Any], path: Path) -> None:
    """Draw a heat map per method."""
    runs = record["runs"]
    ratios = speedups(runs)
    contexts = sorted({context for context, _ in cells_of(runs)})
    numbers = sorted({concurrency for _, concurrency in cells_of(runs)})
    values = [ratio for cells in ratios.values() for _, ratio in cells.values()]
    norm = norm_of(values)
    columns = min(3, len(ratios))
    height = -(-len(ratios) // columns)
    size = (2.2 + columns * max(2.4, 0.9 * len(contexts)), 1.6 + height * max(1.8, 0.55 * len(numbers)))
    figure, grid = plt.subplots(height, columns, figsize=size, squeeze=False, layout="constrained")
    for axes in grid.flat[len(ratios) :]:
        axes.set_axis_off()
    for axes, (method, cells) in zip(grid.flat, ratios.items(), strict=False):
        table = [[cells[context, number][1] for context in contexts] for number in numbers]
        labels = [[f"{ratio:.2f} x" for ratio in line] for line in table]
        image = draw_heat_map(axes, table, norm, rows=numbers, contexts=contexts, labels=labels)
        axes.set_title(method, fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("context (tokens)")
    for axes in grid[:, 0]:
        axes.set_ylabel("requests in flight")
    figure.colorbar(image, ax=grid, label="output tokens/s over plain decoding's, the mean of its servers")
    _save(figure, "Speedup over plain decoding", record, path)


def draw_acceptance(record: dict[str, Any], path: Path) -> None:
    """Draw a panel per context."""
    runs, contexts = record["runs"], record["settings"]["context"]
    figure, panels = plt.subplots(
        1, len(contexts), figsize=(6 * len(contexts), 5.5), squeeze=False, layout="constrained"
    )
    for axes, context in zip(panels[0], contexts, strict=True):
        for method, style in styles(record).items():
            rates = pooled_acceptance(runs, method, context)
            if rates:
                label = f"{method}: {1 + sum(rates):.2f} tokens per round"
                while len(rates) > 1 and not rates[-1]:  # never drafted, or never accepted
                    rates.pop()
                axes.plot(range(1, len(rates) + 1), rates, **{**style, "label": label, "ms": 4})
        axes.set(
            title=f"{context:,} tokens of context",
            xlabel="drafted position",
            ylabel="accepted (share of rounds with drafts)",
            ylim=(0, 1.02),
        )
        last = max((line.get_xdata()[-1] for line in axes.lines), default=1)
        ticks = [tick for tick in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128) if tick <= last]
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=8)
    title = "Acceptance by position; suffix and magicdec-auto draft fewer tokens in some rounds"
    _save(figure, title, record, path)


def _save(figure: Figure, title: str, record: dict[str, Any], path: Path) -> None:
    figure.suptitle(f"{title}\n{title_of(record)}", fontsize=10)
    save(figure, path)
