# SPDX-License-Identifier: Apache-2.0
"""`magicdec plan`: predict whether speculation pays for a model on a device.

The prediction needs no GPU: it takes a model's `config.json` and a data sheet.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from vllm_magicdec.planner.console import UserError, require
from vllm_magicdec.planner.hardware import HARDWARE, THIS_MACHINE, find_hardware
from vllm_magicdec.planner.models import MODELS, SELF, SPIRE_OF_MODEL, find_draft, find_model
from vllm_magicdec.planner.performance import Costs, Deployment, acceptance_rate
from vllm_magicdec.planner.shapes import ModelShape

DEFAULT_BUDGET = 512
# Bytes per weight of the draft's linear layers, with their scales, by `draft_weights`.
DRAFT_WEIGHTS = {"target": None, "fp8": 1.0, "int8": 1.125, "mxfp4": 0.53125, "int4": 0.625}
# MagicDec's Tables 1 and 2 at a budget of 512: self-speculation has 2.40 to 2.57 tokens per round of 2, so
# alpha 0.79 to 0.85; TinyLlama as the draft 0.69 to 0.70. SPIRe's Table 1 has 3.40 of 4: 0.81.
DEFAULT_ACCEPTANCE, MODEL_ACCEPTANCE, SPIRE_ACCEPTANCE = 0.8, 0.7, 0.8


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
        model, acceptance = deployment.pop("shape"), fields.pop("alphas")
        return {"model": model, **deployment, "acceptance": acceptance, **fields}


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
        batch: deployment.inflection_context(alphas, max_gamma, batch, min_gamma) for batch in batches
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
    parser.add_argument(
        "--model", required=True, help=f"a directory with a config.json, or one of {', '.join(MODELS)}"
    )
    parser.add_argument(
        "--draft",
        default=SELF,
        metavar="MODEL",
        help=f"the draft model: '{SELF}', '{SPIRE_OF_MODEL}' for a SPIRe draft of the model, or one as for "
        "--model",
    )
    parser.add_argument(
        "--gpu",
        required=True,
        help=f"one of {', '.join(HARDWARE)}, or '{THIS_MACHINE}' to measure this machine",
    )
    parser.add_argument("--tp", type=_positive, default=1, help="devices, tensor parallel")
    parser.add_argument("--weight-bytes", type=_size, help="bytes per weight, instead of the model's")
    parser.add_argument(
        "--draft-weights",
        choices=DRAFT_WEIGHTS,
        default="target",
        help="weights that the draft reads, if the model itself drafts; quantised ones cost acceptance",
    )
    parser.add_argument("--kv-bytes", type=_size, help="bytes per K/V element, if not 2 (1: fp8)")
    parser.add_argument(
        "--costs",
        type=_costs,
        default={},
        metavar="JSON",
        help="measured efficiencies and overheads, by their names in docs/performance.md",
    )
    parser.add_argument(
        "--batch", type=_positive, nargs="+", default=[1, 8, 32, 128], help="requests that decode together"
    )
    parser.add_argument(
        "--context",
        type=_positive,
        nargs="+",
        default=[2048, 4096, 8192, 16384, 32768, 65536, 131072],
        help="tokens per request",
    )
    parser.add_argument(
        "--budget",
        type=_positive,
        nargs="+",
        default=[DEFAULT_BUDGET],
        help="tokens that a draft step reads",
    )
    parser.add_argument(
        "--acceptance",
        type=_rate,
        nargs="+",
        help="probability that a drafted token is accepted, one per budget "
        f"(default: {DEFAULT_ACCEPTANCE}, {MODEL_ACCEPTANCE} with a draft model, {SPIRE_ACCEPTANCE} with "
        "SPIRe's)",
    )
    parser.add_argument(
        "--acceptance-length",
        type=_number,
        nargs="+",
        metavar="TOKENS",
        help="instead of --acceptance: tokens per round of --gamma drafts, as vLLM logs it ('Mean "
        "acceptance length')",
    )
    parser.add_argument("--gamma", type=_positive, help="drafted tokens per round, instead of the best")
    parser.add_argument("--max-gamma", type=_positive, default=8, help="most drafted tokens per round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run `magicdec plan`."""
    deployment = _find_deployment(options)
    alphas = _find_acceptance(options, deployment.draft)
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


def _find_deployment(options: argparse.Namespace) -> Deployment:
    """Build the deployment that the options describe, or raise UserError."""
    shape = find_model(options.model)
    own = {"weight_bytes": options.weight_bytes, "kv_bytes": options.kv_bytes}
    own = {name: value for name, value in own.items() if value is not None}
    shape = replace(shape, **own)
    draft = find_draft(options.draft, shape)
    costs = Costs()
    if options.gpu.lower() == THIS_MACHINE:
        costs = replace(costs, memory_efficiency=1.0, compute_efficiency=1.0)
    try:
        return Deployment(
            shape,
            find_hardware(options.gpu),
            options.tp,
            replace(costs, **options.costs),
            draft and replace(draft, **own),
            DRAFT_WEIGHTS[options.draft_weights],
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def _find_acceptance(options: argparse.Namespace, draft: ModelShape | None) -> dict[int, float]:
    """Return the acceptance rate of every budget (tokens), or raise UserError."""
    budgets, rates = options.budget, options.acceptance
    if options.acceptance_length:
        if rates:
            raise UserError("--acceptance and --acceptance-length exclude each other; use one of them")
        if (gamma := options.gamma) is None:
            raise UserError(
                "--acceptance-length needs --gamma, the drafts of the rounds that had this length"
            )
        try:
            rates = [acceptance_rate(gamma, length) for length in options.acceptance_length]
        except ValueError as error:
            raise UserError(f"{error}; give an --acceptance-length from 1 to {gamma + 1}") from None
    elif not rates:
        model_rate = SPIRE_ACCEPTANCE if draft and draft.is_spire else MODEL_ACCEPTANCE
        rates = [model_rate if draft else DEFAULT_ACCEPTANCE]
    if len(budgets) != len(rates):
        raise UserError(
            f"{len(budgets)} budgets need {len(budgets)} acceptance rates and there are {len(rates)}; "
            "give one for each, because at equal acceptance the smallest budget always wins"
        )
    if repeated := [budget for budget in budgets if budgets.count(budget) > 1]:
        raise UserError(f"budget {repeated[0]} is given twice; give every budget once")
    return dict(zip(budgets, rates, strict=True))


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return value


def _costs(text: str) -> dict[str, float]:
    names = [field.name for field in fields(Costs)]
    try:
        costs = json.loads(text)
        if not all(name in names and 0 < value < math.inf for name, value in costs.items()):
            raise ValueError
    except (ValueError, TypeError, AttributeError):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a JSON object of numbers above 0 named {', '.join(names)}"
        ) from None
    return costs


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None


def _rate(text: str) -> float:
    if not 0 <= (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a probability between 0 and 1")
    return value


def _size(text: str) -> float:
    if not 0 < (value := _number(text)) <= 8:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of bytes between 0 and 8")
    return value
