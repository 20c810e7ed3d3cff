# SPDX-License-Identifier: Apache-2.0
"""`magicdec plan`: whether speculation will pay on a device, for a model, before either is there.

Needs no GPU: a model's `config.json` and a data sheet, put into performance.py.
"""

import argparse
import difflib
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from vllm_magicdec.planner.console import UserError, require
from vllm_magicdec.planner.hardware import HARDWARE, measure_this_machine
from vllm_magicdec.planner.performance import Costs, Deployment, Hardware, ModelShape

T = TypeVar("T")

THIS_MACHINE = "this"
# MagicDec's Table 1: gamma 2, budget 512, Omega 2.40 to 2.57 in self-speculation, so alpha 0.79 to 0.85.
DEFAULT_BUDGET = 512
DEFAULT_ACCEPTANCE = 0.8


def _gemma_3(
    name: str,
    num_layers: int,
    *,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    intermediate_size: int,
) -> ModelShape:
    """Every sixth layer sees the whole context."""
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        intermediate_size=intermediate_size,
        vocab_size=262208,
        tied_embeddings=True,
        num_window_layers=num_layers - num_layers // 6,
        window=1024,
    )


def _gpt_oss(name: str, num_layers: int, *, num_experts: int, weight_bytes: float) -> ModelShape:
    """Every second layer sees the whole context; experts are in MXFP4, the rest in bfloat16."""
    return ModelShape(
        *(name, num_layers, 2880, 64, 8, 64, 2880, 201088),
        weight_bytes=weight_bytes,  # size of the checkpoint by its parameters
        num_experts=num_experts,
        num_active_experts=4,
        num_window_layers=num_layers // 2,
        window=128,
    )


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        ModelShape("llama-2-7b-32k", 32, 4096, 32, 32, 128, 11008, 32000),
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
        ModelShape(
            "qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936, num_experts=128, num_active_experts=8
        ),
        ModelShape("tinyllama-1.1b", 22, 2048, 32, 4, 64, 5632, 32000),
        _gemma_3(
            "gemma-3-12b",
            48,
            hidden_size=3840,
            num_heads=16,
            num_kv_heads=8,
            head_size=256,
            intermediate_size=15360,
        ),
        _gemma_3(
            "gemma-3-27b",
            62,
            hidden_size=5376,
            num_heads=32,
            num_kv_heads=16,
            head_size=128,
            intermediate_size=21504,
        ),
        _gpt_oss("gpt-oss-20b", 24, num_experts=32, weight_bytes=0.66),
        _gpt_oss("gpt-oss-120b", 36, num_experts=128, weight_bytes=0.56),
    )
}


@dataclass(frozen=True)
class Cell:
    """What is predicted for one batch and context. Times in milliseconds."""

    batch: int
    context: int  # tokens per request
    plain_step_ms: float  # T_T
    draft_step_ms: float  # T_D
    verify_ms: float  # T_V(gamma)
    speedup: float  # at `gamma` and `budget`, the best there are
    gamma: int
    budget: int  # tokens
    free_queries: int
    fits: bool  # its K/V are within the capacity


@dataclass(frozen=True)
class Plan:
    """A deployment's predictions over a grid of batches and contexts."""

    deployment: Deployment
    alphas: Mapping[int, float]  # acceptance rate of every budget
    max_gamma: int
    kv_capacity_tokens: int  # of requests with the longest context
    inflection_contexts: Mapping[int, int | None]  # batch -> least context at which speculation pays
    cells: tuple[Cell, ...]

    @property
    def title(self) -> str:
        """Model and devices, for a table's head."""
        deployment = self.deployment
        return f"{deployment.shape.name} on {deployment.tensor_parallel} x {deployment.hardware.name}"

    def to_json(self) -> dict[str, Any]:
        """Everything that went in and came out."""
        return {
            "model": asdict(self.deployment.shape),
            "hardware": asdict(self.deployment.hardware),
            "tensor_parallel": self.deployment.tensor_parallel,
            "costs": asdict(self.deployment.costs),
            "acceptance": {str(budget): alpha for budget, alpha in self.alphas.items()},
            "max_gamma": self.max_gamma,
            "kv_capacity_tokens": self.kv_capacity_tokens,
            "inflection_contexts": {str(batch): at for batch, at in self.inflection_contexts.items()},
            "cells": [asdict(cell) for cell in self.cells],
        }


def make_plan(
    deployment: Deployment,
    alphas: Mapping[int, float],
    max_gamma: int,
    batches: Iterable[int],
    contexts: Iterable[int],
) -> Plan:
    """Predict every batch and context.

    Args:
        alphas: acceptance rate of every budget (tokens) to consider.
    """
    batches, contexts = sorted(set(batches)), sorted(set(contexts))
    capacity = deployment.kv_capacity_tokens(contexts[-1])
    cells = []
    for batch in batches:
        for context in contexts:
            choice = deployment.best(alphas, max_gamma, batch, context)
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
    inflections = {b: deployment.inflection_context(alphas, max_gamma, b) for b in batches}
    return Plan(deployment, alphas, max_gamma, capacity, inflections, tuple(cells))


def find_model(name: str) -> ModelShape:
    """The shape behind a directory with a `config.json`, such a file, or a built-in name.

    Raises:
        UserError: there is none.
    """
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        try:
            config = json.loads(file.read_text())
        except ValueError:
            raise UserError(f"{file}: it is not JSON; name a model's config.json") from None
        try:
            return ModelShape.from_config(config, name=file.resolve().parent.name)
        except ValueError as error:
            raise UserError(f"{file}: {error}") from None
    if path.is_dir():
        raise UserError(f"there is no config.json in {name}")
    return _look_up(name, MODELS, "model", [*MODELS, "a directory with a config.json"])


def find_hardware(name: str) -> Hardware:
    """The device of that name, or this machine measured.

    Raises:
        UserError: there is none.
    """
    if name.lower() == THIS_MACHINE:
        return measure_this_machine()
    return _look_up(name, HARDWARE, "GPU", [*HARDWARE, f"'{THIS_MACHINE}' for this machine"])


def _look_up(name: str, table: Mapping[str, T], what: str, choices: list[str]) -> T:
    names = {known.lower(): known for known in table}
    if name.lower() in names:
        return table[names[name.lower()]]
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean '{names[close[0]]}'? " if close else ""
    raise UserError(f"there is no {what} '{name}'; {hint}There are {', '.join(choices)}")


def pair_acceptance(budgets: list[int], acceptance: list[float]) -> dict[int, float]:
    """The acceptance rate of every budget.

    Raises:
        UserError: the lists do not fit together.
    """
    if len(budgets) != len(acceptance):
        raise UserError(
            f"{len(budgets)} budgets need {len(budgets)} acceptance rates and there are {len(acceptance)}; "
            "say one for each, because at equal acceptance the smallest budget always wins"
        )
    for budget in budgets:
        if budgets.count(budget) > 1:
            raise UserError(f"budget {budget} is named twice; name every budget once")
    return dict(zip(budgets, acceptance, strict=True))


def add_command(subparsers: Any) -> None:
    """Add `plan` to the subcommands of `magicdec`."""
    parser = subparsers.add_parser(
        "plan",
        help="predict whether speculation pays for a model on a device",
        description="Predict whether speculation over a sparse view pays. Needs no GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model",
        required=True,
        help=f"a directory with a config.json, or one of {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--gpu",
        required=True,
        help=f"one of {', '.join(HARDWARE)}, or '{THIS_MACHINE}' to measure this machine",
    )
    parser.add_argument("--tp", type=_positive, default=1, help="devices, tensor parallel")
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
        default=[DEFAULT_ACCEPTANCE],
        help="probability that a drafted token is accepted, one per budget; MagicDec's Table 1 has 0.79 to "
        "0.85 at a budget of 512",
    )
    parser.add_argument("--max-gamma", type=_positive, default=8, help="most drafted tokens per round")
    parser.add_argument("--weight-bytes", type=_size, help="bytes per weight, if not the model's own")
    parser.add_argument("--kv-bytes", type=_size, help="bytes per K/V element, if not 2 (1: fp8)")
    parser.add_argument(
        "--costs",
        type=_costs,
        default={},
        metavar="JSON",
        help="measured efficiencies and overheads, by their names in docs/performance.md",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the speedups to this file")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return value


def _rate(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a probability between 0 and 1")
    return value


def _size(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 8:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of bytes between 0 and 8")
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


def run(options: argparse.Namespace) -> None:
    """Plan, write what was asked for, print the table.

    Raises:
        UserError: an option cannot work.
    """
    alphas = pair_acceptance(options.budget, options.acceptance)
    shape = find_model(options.model)
    own = {"weight_bytes": options.weight_bytes, "kv_bytes": options.kv_bytes}
    shape = replace(shape, **{name: value for name, value in own.items() if value is not None})
    hardware = find_hardware(options.gpu)
    costs = Costs()
    if options.gpu.lower() == THIS_MACHINE:
        costs = replace(costs, memory_efficiency=1.0, compute_efficiency=1.0)
    try:
        deployment = Deployment(shape, hardware, options.tp, replace(costs, **options.costs))
    except ValueError as error:
        raise UserError(str(error)) from None
    plan = make_plan(deployment, alphas, options.max_gamma, options.batch, options.context)
    for file, write in ((options.json, write_json), (options.png, draw)):
        if file is not None:
            try:
                write(plan, file)
            except OSError as error:
                raise UserError(f"cannot write {file}: {error.strerror}") from None
    print_table(plan)


def write_json(plan: Plan, file: Path) -> None:
    """Write `plan.to_json()`."""
    file.write_text(json.dumps(plan.to_json(), indent=1) + "\n")


def print_table(plan: Plan) -> None:
    """Print the plan to standard output.

    Raises:
        UserError: rich is not installed.
    """
    console = require("rich.console").Console(
        highlight=False, width=None if sys.stdout.isatty() else 120, soft_wrap=True
    )
    table = require("rich.table").Table(title=plan.title)
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


def draw(plan: Plan, file: Path) -> None:
    """Draw the speedups over batch and context as a heat map; grey: beyond the K/V capacity.

    Raises:
        UserError: matplotlib is not installed.
    """
    require("matplotlib").use("Agg")
    pyplot, colors = require("matplotlib.pyplot"), require("matplotlib.colors")
    batches = sorted({cell.batch for cell in plan.cells})
    contexts = sorted({cell.context for cell in plan.cells})
    cells = {(cell.batch, cell.context): cell for cell in plan.cells}
    speedups = [
        [cells[batch, c].speedup if cells[batch, c].fits else float("nan") for c in contexts]
        for batch in batches
    ]
    figure, axes = pyplot.subplots(figsize=(2 + 0.9 * len(contexts), 1.8 + 0.6 * len(batches)))
    axes.set_facecolor("lightgrey")
    image = axes.imshow(
        speedups,
        cmap="RdBu",
        norm=colors.TwoSlopeNorm(1, vmin=0.5, vmax=2.5),
        origin="lower",
        aspect="auto",
    )
    for row, batch in enumerate(batches):
        for column, context in enumerate(contexts):
            cell = cells[batch, context]
            text = f"{cell.speedup:.2f}\ngamma {cell.gamma}" if cell.fits else "no\nmemory"
            axes.text(column, row, text, ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axes.set_yticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set(xlabel="context (tokens per request)", ylabel="batch", title=plan.title)
    figure.colorbar(image, label="predicted speedup")
    figure.tight_layout()
    try:
        figure.savefig(file, format="png", dpi=150)
    finally:
        pyplot.close(figure)
