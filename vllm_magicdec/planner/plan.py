# SPDX-License-Identifier: Apache-2.0
"""`magicdec plan`: predict whether speculation pays for a model on a device.

The prediction needs no GPU: it takes a model's `config.json` and a data sheet.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_magicdec.planner.arguments import (
    add_acceptance,
    add_deployment,
    find_acceptance,
    find_deployment,
    positive,
)
from vllm_magicdec.planner.console import UserError, require
from vllm_magicdec.planner.performance import Deployment


@dataclass(frozen=True)
class Cell:
    """The prediction for one batch and context. Times are in milliseconds."""

    batch: int
    context: int  # tokens per request
    plain_step_ms: float  # T_T
    draft_step_ms: float  # T_D
    verify_ms: float  # T_V(gamma)
    speedup: float  # at `gamma` and `budget`, the best ones
    gamma: int
    budget: int  # tokens
    free_queries: int
    fits: bool  # whether the K/V capacity suffices


@dataclass(frozen=True)
class Plan:
    """A deployment's predictions over a grid of batches and contexts."""

    deployment: Deployment
    alphas: Mapping[int, float]  # acceptance rate of every budget
    min_gamma: int
    max_gamma: int
    kv_capacity_tokens: int  # of requests with the longest context
    inflection_contexts: Mapping[int, int | None]  # batch -> shortest context at which speculation pays
    cells: tuple[Cell, ...]

    def to_json(self) -> dict[str, Any]:
        """Return inputs and predictions as a JSON object."""
        fields = asdict(self)
        deployment = fields.pop("deployment")
        return {
            "model": deployment.pop("shape"),
            **deployment,
            "acceptance": fields.pop("alphas"),
            **fields,
        }


def make_plan(
    deployment: Deployment,
    alphas: Mapping[int, float],
    max_gamma: int,
    batches: Iterable[int],
    contexts: Iterable[int],
    min_gamma: int = 1,
) -> Plan:
    """Predict every combination of batch and context; see `Plan` for the arguments."""
    batches, contexts = sorted(set(batches)), sorted(set(contexts))
    capacity = deployment.kv_capacity_tokens(contexts[-1])
    cells = []
    for batch in batches:
        for context in contexts:
            choice = deployment.best(alphas, max_gamma, batch, context, min_gamma)
            cells.append(
                Cell(
                    batch=batch,
                    context=context,
                    plain_step_ms=deployment.plain_step_ms(batch, context),
                    draft_step_ms=deployment.draft_step_ms(batch, context, choice.budget),
                    verify_ms=deployment.verify_ms(choice.gamma, batch, context),
                    speedup=choice.speedup,
                    gamma=choice.gamma,
                    budget=choice.budget,
                    free_queries=deployment.free_queries(batch, context),
                    fits=batch * (context + choice.gamma + 1) <= deployment.kv_capacity_tokens(context),
                )
            )
    inflections = {
        batch: deployment.inflection_context(alphas, max_gamma, batch, min_gamma=min_gamma)
        for batch in batches
    }
    return Plan(deployment, alphas, min_gamma, max_gamma, capacity, inflections, tuple(cells))


def add_command(subparsers: Any) -> None:
    """Add `plan` to the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="predict whether speculation pays for a model on a device",
        description="Predict whether speculation over a sparse view pays. Needs no GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_deployment(parser)
    parser.add_argument(
        "--batch", type=positive, nargs="+", default=[1, 8, 32, 128], help="requests that decode together"
    )
    parser.add_argument(
        "--context",
        type=positive,
        nargs="+",
        default=[2048, 4096, 8192, 16384, 32768, 65536, 131072],
        help="tokens per request",
    )
    add_acceptance(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run `magicdec plan`."""
    deployment = find_deployment(options)
    alphas = find_acceptance(options, deployment.draft)
    min_gamma, max_gamma = (options.gamma, options.gamma) if options.gamma else (1, options.max_gamma)
    plan = make_plan(deployment, alphas, max_gamma, options.batch, options.context, min_gamma)
    if options.json:
        try:
            options.json.write_text(json.dumps(plan.to_json(), indent=1) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {options.json}: {error.strerror}") from None
    print_table(plan)


def print_table(plan: Plan) -> None:
    """Print the plan as a table with notes."""
    width = None if sys.stdout.isatty() else 120
    console = require("rich.console").Console(highlight=False, width=width, soft_wrap=True)
    table = require("rich.table").Table(title=plan.deployment.title)
    for heading in ("batch", "context", "T_T ms", "T_D ms", "T_V ms", "speedup", "gamma", "budget", "free"):
        table.add_column(heading, justify="right")
    for index, cell in enumerate(plan.cells):
        colour = "dim" if not cell.fits else "green" if cell.speedup >= 1 else "red"
        table.add_row(
            str(cell.batch),
            f"{cell.context:,}{'' if cell.fits else ' *'}",
            f"{cell.plain_step_ms:.2f}",
            f"{cell.draft_step_ms:.2f}",
            f"{cell.verify_ms:.2f}",
            f"[{colour}]{cell.speedup:.2f}[/]",
            str(cell.gamma),
            str(cell.budget),
            str(cell.free_queries),
            end_section=index + 1 < len(plan.cells) and plan.cells[index + 1].batch != cell.batch,
        )
    console.print(table)
    budgets = ", ".join(f"{alpha:g} at a budget of {budget:,}" for budget, alpha in plan.alphas.items())
    console.print(f"Acceptance rate assumed: {budgets}. A speedup below 1: decode plainly.")
    console.print("free: query tokens per request that a pass carries before compute exceeds memory time.")
    beyond = "" if all(cell.fits for cell in plan.cells) else "; cells with * are beyond it"
    console.print(f"K/V capacity: {plan.kv_capacity_tokens:,} tokens{beyond}.")
    for batch, context in plan.inflection_contexts.items():
        at = "never pays" if context is None else f"pays from {context:,} tokens of context"
        console.print(f"S_inflection at batch {batch}: {at}.")
    hardware = plan.deployment.hardware
    console.print(
        f"{hardware.name}: {hardware.memory_gib:.0f} GiB, {hardware.memory_bytes_per_s / 1e12:.3g} TB/s, "
        f"{hardware.flops / 1e12:.4g} TFLOP/s, {hardware.source}\n"
        "These are predictions; docs/performance.md has their errors."
    )
