# SPDX-License-Identifier: Apache-2.0
"""`magicdec simulate`: what a trace of requests would meet, plain against magicdec, without a server."""

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_magicdec.planner import traces
from vllm_magicdec.planner.arguments import (
    DEFAULT_BUDGET,
    add_deployment,
    find_deployment,
    positive,
    usual_acceptance,
)
from vllm_magicdec.planner.console import UserError, require, screen, write_json
from vllm_magicdec.planner.engine_times import EngineTimes, PredictedTimes, ProfiledTimes
from vllm_magicdec.planner.simulation import PLAIN, Limits, Outcome, Speculation, simulate
from vllm_magicdec.planner.traces import Arrival, Lengths

PERCENTILES = (50, 90, 99)
_LATENCIES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}


def summary(outcome: Outcome, replicas: int) -> dict[str, float]:
    """Throughput, and percentiles of latencies in ms, by names like those of `vllm bench serve`."""
    finished = outcome.finished
    first = min(request.arrival.arrival_s for request in finished)
    duration_s = max(request.end_s for request in finished) - first
    result = {
        "requests": len(finished),
        "duration_s": duration_s,
        "request_throughput": len(finished) / duration_s,
        "output_throughput": sum(request.arrival.output_tokens for request in finished) / duration_s,
        "acceptance_length": 1 + outcome.accepted / max(1, outcome.rounds),
        "in_flight": sum(request.e2e_s for request in finished) / duration_s / replicas,
        "busy": outcome.busy_s / duration_s / replicas,
        "preemptions": outcome.preemptions,
        "steps": outcome.steps,
        "events_per_s": outcome.events / outcome.wall_s,
        "wall_s": outcome.wall_s,
    }
    for name, field in _LATENCIES.items():
        values = sorted(ms for r in finished if not math.isnan(ms := 1e3 * getattr(r, field)))
        result |= {f"p{percent}_{name}_ms": percentile(values, percent) for percent in PERCENTILES}
        result[f"mean_{name}_ms"] = statistics.fmean(values) if values else math.nan
    return result | {f"p{percent}_itl_ms": 1e3 * outcome.gap_s(percent) for percent in PERCENTILES}


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values, as numpy has it; nan of nothing."""
    if not ascending:
        return math.nan
    place = percent / 100 * (len(ascending) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (place - low) * (ascending[high] - ascending[low])


def lengths(text: str) -> Lengths:
    """For argparse."""
    try:
        return Lengths(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of requests per second above 0")
    return rate


def _milliseconds(text: str) -> float:
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 <= milliseconds < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of milliseconds, 0 or more")
    return milliseconds


def _chances(text: str) -> tuple[float, ...]:
    try:
        return Speculation(tuple(float(part) for part in text.split(","))).standing
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"'{text}' are no chances of the first, second, ... draft to stand; write them as 0.9,0.8,0.7"
        ) from None


def add_command(subparsers: Any) -> None:
    """Add `simulate` to the subcommands of `magicdec`."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate servers under a load: throughput and latencies, plain against magicdec",
        description="Serve a trace of requests in simulated time, with the step times of a profile of this "
        "machine or of a roofline. Needs no GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--trace", type=Path, help="JSON lines with arrival_s, prompt_tokens and output_tokens"
    )
    load.add_argument(
        "--rate", type=_rate, nargs="+", help="requests per second, Poisson; inf: all at once"
    )
    load.add_argument("--requests", type=positive, default=1000, help="with --rate: how many")
    drawn = "512, uniform:100:900 or lognormal:MEDIAN:SIGMA"
    load.add_argument("--prompt", type=lengths, default=Lengths("1000"), help=f"tokens: {drawn}")
    load.add_argument("--output", type=lengths, default=Lengths("128"), help=f"tokens: {drawn}")
    load.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and acceptance")

    engine = parser.add_argument_group("engines")
    engine.add_argument("--profile", type=Path, help="what 'magicdec profile' wrote, for its times")
    add_deployment(engine, is_required=False)
    engine.add_argument("--replicas", type=positive, default=1, help="engines, all alike")
    engine.add_argument("--kv-tokens", type=positive, help="K/V that an engine holds, if not the GPU's")
    engine.add_argument("--max-num-seqs", type=positive, default=256, help="as of 'vllm serve'")
    engine.add_argument("--max-num-batched-tokens", type=positive, default=2048, help="as of 'vllm serve'")
    engine.add_argument("--block-size", type=positive, default=16, help="as of 'vllm serve'")
    engine.add_argument(
        "--frontend-ms",
        type=_milliseconds,
        default=0.0,
        help="that a request takes outside of the engine: HTTP, tokenisation",
    )

    drafting = parser.add_argument_group("drafts")
    drafting.add_argument("--gamma", type=positive, default=4, help="per round")
    drafting.add_argument("--budget", type=positive, help="tokens that a draft step reads")
    drafting.add_argument(
        "--standing",
        type=_chances,
        metavar="P1,P2,...",
        help="chances that at least the first 1, 2, ... drafts stand, as vLLM logs them ('Per-position "
        "acceptance rate'), in place of --gamma and --acceptance",
    )
    drafting.add_argument(
        "--acceptance", type=float, help="chance that a draft stands if those before it do"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file")
    parser.set_defaults(run=run)


def speculation_of(options: argparse.Namespace, usual: float) -> Speculation:
    """What is drafted.

    Raises:
        UserError: the acceptance is none.
    """
    if options.standing:
        return Speculation(options.standing)
    acceptance = usual if options.acceptance is None else options.acceptance
    if not 0 <= acceptance <= 1:
        raise UserError(f"--acceptance {acceptance:g} is not a probability between 0 and 1")
    return Speculation.of(options.gamma, acceptance)


def engines_of(options: argparse.Namespace) -> tuple[str, EngineTimes, int, int, float]:
    """A title, step times without and with drafts, what K/V memory holds then, and a usual acceptance.

    Raises:
        UserError: options are missing or do not fit together.
    """
    if options.profile:
        if options.model or options.gpu:
            raise UserError(
                "a profile has its own model's and machine's times; leave out --model and --gpu"
            )
        if options.kv_tokens is None:
            raise UserError("a profile does not say how much K/V memory there is; say --kv-tokens")
        profiled = ProfiledTimes.load(options.profile, options.budget)
        return str(options.profile), profiled, options.kv_tokens, options.kv_tokens, usual_acceptance(None)
    if not options.model or not options.gpu:
        raise UserError("say --profile FILE, or --model and --gpu")
    deployment = find_deployment(options)
    times = PredictedTimes(deployment, options.budget or DEFAULT_BUDGET)
    drafting = options.kv_tokens or deployment.kv_capacity_tokens()
    plain = options.kv_tokens or deployment.without_draft.kv_capacity_tokens()
    return deployment.title, times, plain, drafting, usual_acceptance(deployment.draft)


def loads_of(options: argparse.Namespace) -> Iterable[tuple[str, list[Arrival]]]:
    """Every load by its name.

    Raises:
        UserError: there is none, or two.
    """
    if bool(options.trace) == bool(options.rate):
        raise UserError("say either --trace FILE or --rate REQUESTS_PER_S")
    if options.trace:
        yield options.trace.name, traces.load(options.trace)
        return
    for rate in options.rate:
        drawn = traces.poisson(rate, options.requests, options.prompt, options.output, options.seed)
        yield f"{rate:g} per second", drawn


def run(options: argparse.Namespace) -> None:
    """Simulate, write what was asked for, print the table.

    Raises:
        UserError: an option cannot work.
    """
    title, times, *kv_tokens, usual = engines_of(options)
    speculation = speculation_of(options, usual)
    runs = []
    for load, arrivals in loads_of(options):
        for method, drafts, tokens in zip(
            ("plain", "magicdec"), (PLAIN, speculation), kv_tokens, strict=True
        ):
            limits = Limits(
                tokens, options.max_num_seqs, options.max_num_batched_tokens, options.block_size
            )
            frontend_s = options.frontend_ms / 1e3
            outcome = simulate(arrivals, times, limits, drafts, options.replicas, options.seed, frontend_s)
            runs.append({"load": load, "method": method, **summary(outcome, options.replicas)})
    if options.json is not None:
        record = {
            "engines": title,
            "replicas": options.replicas,
            "standing": speculation.standing,
            "kv_tokens": kv_tokens,
            "frontend_ms": options.frontend_ms,
            "seed": options.seed,
            "runs": runs,
        }
        write_json(record, options.json)
    print_table(f"{options.replicas} x {title}", speculation, runs)


def print_table(title: str, speculation: Speculation, runs: list[dict[str, Any]]) -> None:
    """Print the runs to standard output.

    Raises:
        UserError: rich is not installed.
    """
    console = screen(width=160)
    table = require("rich.table").Table(title=title)
    for heading in ("load", "method", "requests/s", "tokens/s", "in flight", "busy", "preempted"):
        table.add_column(heading, justify="left" if heading in ("load", "method") else "right")
    for heading in ("TTFT", "TPOT", "ITL", "end to end"):
        table.add_column(f"{heading} ms\n50 / 90 / 99 %", justify="right")
    for run in runs:
        latencies = (
            " / ".join(f"{run[f'p{percent}_{name}_ms']:.4g}" for percent in PERCENTILES)
            for name in ("ttft", "tpot", "itl", "e2e")
        )
        table.add_row(
            run["load"],
            run["method"],
            f"{run['request_throughput']:.3g}",
            f"{run['output_throughput']:,.0f}",
            f"{run['in_flight']:.1f}",
            f"{run['busy']:.0%}",
            str(run["preemptions"]),
            *latencies,
        )
    console.print(table)
    steps, wall_s = (sum(run[name] for run in runs) for name in ("steps", "wall_s"))
    console.print(
        f"{speculation.drafts} drafts per round, {speculation.acceptance_length:.2f} tokens. "
        f"{steps:,} steps simulated in {wall_s:.1f} s. in flight, busy: of each engine. "
        "What is assumed: docs/performance.md."
    )
