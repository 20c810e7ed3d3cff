# SPDX-License-Identifier: Apache-2.0
"""`magicdec plan --load`: what a load needs, as a table."""

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vllm_magicdec.planner.arguments import above_0, gammas_of, positive, share
from vllm_magicdec.planner.console import UserError, require, screen, write_json
from vllm_magicdec.planner.load import Served, plan_load
from vllm_magicdec.planner.performance import Deployment

# Of options that mean something with --load alone.
_DEFAULTS: dict[str, Any] = {"output": 256, "max_num_seqs": 256, "utilization": 0.8, "max_tpot": None}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of a load."""
    load = parser.add_argument_group("a load", "what it needs; --context is then the tokens of a prompt")
    load.add_argument("--load", type=above_0, metavar="REQUESTS_PER_S", help="requests per second")
    load.add_argument("--output", type=positive, default=_DEFAULTS["output"], help="tokens of an answer")
    load.add_argument(
        "--max-num-seqs",
        type=positive,
        default=_DEFAULTS["max_num_seqs"],
        help="requests in flight in an engine, at most",
    )
    load.add_argument(
        "--utilization",
        type=share,
        default=_DEFAULTS["utilization"],
        help="share of what an engine can serve that is planned for",
    )
    load.add_argument("--max-tpot", type=above_0, metavar="MS", help="per output token, at most")


def refuse_options(options: argparse.Namespace) -> None:
    """Where no load is given.

    Raises:
        UserError: an option is of a load.
    """
    for name, default in _DEFAULTS.items():
        if getattr(options, name) != default:
            raise UserError(f"--{name.replace('_', '-')} is of a load; say --load REQUESTS_PER_S, too")


def run(options: argparse.Namespace, deployment: Deployment, alphas: Mapping[int, float]) -> None:
    """What a load needs, as JSON where that was asked for, and as a table.

    Raises:
        UserError: an option cannot work.
    """
    if options.png:
        raise UserError("--png draws speedups; leave out --load, or use --json FILE")
    rows = plan_load(
        deployment,
        alphas,
        gammas_of(options),
        options.load,
        options.context,
        options.output,
        max_num_seqs=options.max_num_seqs,
        utilization=options.utilization,
        max_tpot_ms=options.max_tpot or math.inf,
    )
    if options.json:
        record = {
            **deployment.to_json(),
            "acceptance": {str(budget): alpha for budget, alpha in alphas.items()},
            "load": options.load,
            "utilization": options.utilization,
            "needs": [asdict(row) for row in rows],
        }
        write_json(record, options.json)
    _print_table(f"{options.load:g} requests per second: {deployment.title}", rows, options, alphas)


def _print_table(
    title: str, rows: list[Served], options: argparse.Namespace, alphas: Mapping[int, float]
) -> None:
    """Print what a load needs to standard output.

    Raises:
        UserError: rich is not installed.
    """
    console = screen(width=120)
    table = require("rich.table").Table(title=title)
    headings = ("prompt", "method", "gamma", "replicas", "GPUs", "in flight", "of a replica", "most/s")
    for heading in (*headings, "TTFT ms", "TPOT ms", "answer s"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in rows:
        numbers = (
            str(row.gamma),
            f"{row.replicas:,}",
            f"{row.devices:,}",
            f"{row.in_flight:,.0f}",
            f"{row.most_in_flight:,}",
            f"{row.most_per_s:.3g}",
            f"{row.ttft_ms:.0f}",
            f"{row.tpot_ms:.1f}",
            f"{row.e2e_ms / 1e3:.1f}",
        )
        table.add_row(
            f"{row.prompt:,}",
            row.method,
            *(numbers if row.fits else ("-", "none fits", *["-"] * 7)),
            end_section=row.method != "plain",
        )
    console.print(table)
    budgets = ", ".join(f"{alpha:g} at a budget of {budget:,}" for budget, alpha in alphas.items())
    console.print(f"Acceptance rate assumed: {budgets}. Answers of {options.output:,} tokens.")
    console.print("of a replica: requests that it holds at most; most/s: requests that it then serves.")
    console.print(
        f"Planned for {options.utilization:.0%} of that. Times are means without queueing: 'magicdec "
        "simulate' has the rest. What is assumed: docs/performance.md."
    )
