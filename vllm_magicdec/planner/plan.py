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
from vllm_magicdec.planner.load import Served, plan_load
from vllm_magicdec.planner.performance import Costs, Deployment, Hardware, ModelShape, acceptance_rate

T = TypeVar("T")

THIS_MACHINE = "this"
# Drafts that need no model of their own.
SELF, SPIRE_OF_MODEL = "self", "spire"
DEFAULT_BUDGET = 512
# MagicDec's Tables 1 and 2 at a budget of 512: self-speculation has 2.40 to 2.57 tokens per round of 2, so
# alpha 0.79 to 0.85; TinyLlama as the draft 0.69 to 0.70. SPIRe's Table 1 has 3.40 of 4: 0.81.
DEFAULT_ACCEPTANCE, MODEL_ACCEPTANCE, SPIRE_ACCEPTANCE = 0.8, 0.7, 0.8


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
        ModelShape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied_embeddings=True),
        ModelShape("tinyllama-1.1b", 22, 2048, 32, 4, 64, 5632, 32000),
        # SPIRe's target, whose embeddings that paper leaves out of all counts.
        ModelShape("spire-67m", 8, 512, 8, 8, 128, 4096, 0),
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
    min_gamma: int
    max_gamma: int
    kv_capacity_tokens: int  # of requests with the longest context
    inflection_contexts: Mapping[int, int | None]  # batch -> least context at which speculation pays
    cells: tuple[Cell, ...]

    @property
    def title(self) -> str:
        """Model and devices, for a table's head."""
        return title_of(self.deployment)

    def to_json(self) -> dict[str, Any]:
        """Everything that went in and came out."""
        return {
            "model": asdict(self.deployment.shape),
            "draft": self.deployment.draft and asdict(self.deployment.draft),
            "hardware": asdict(self.deployment.hardware),
            "tensor_parallel": self.deployment.tensor_parallel,
            "costs": asdict(self.deployment.costs),
            "acceptance": {str(budget): alpha for budget, alpha in self.alphas.items()},
            "min_gamma": self.min_gamma,
            "max_gamma": self.max_gamma,
            "kv_capacity_tokens": self.kv_capacity_tokens,
            "inflection_contexts": {str(batch): at for batch, at in self.inflection_contexts.items()},
            "cells": [asdict(cell) for cell in self.cells],
        }


def title_of(deployment: Deployment) -> str:
    """Model and devices, for a table's head."""
    draft = f", drafts by {deployment.draft.name}" if deployment.draft else ""
    return f"{deployment.shape.name} on {deployment.tensor_parallel} x {deployment.hardware.name}{draft}"


def make_plan(
    deployment: Deployment,
    alphas: Mapping[int, float],
    max_gamma: int,
    batches: Iterable[int],
    contexts: Iterable[int],
    min_gamma: int = 1,
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


def find_draft(name: str, target: ModelShape) -> ModelShape | None:
    """What drafts: a model found as `find_model` does, 'spire' for the draft that SPIRe would make of the
    target, 'self' (None) for the target.

    Raises:
        UserError: there is no such model.
    """
    if name.lower() == SELF:
        return None
    return target.spire_draft() if name.lower() == SPIRE_OF_MODEL else find_model(name)


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


def rates_of_lengths(gamma: int | None, lengths: list[float]) -> list[float]:
    """Acceptance rates at which rounds of `gamma` drafts bring so many tokens.

    Raises:
        UserError: they cannot, or nobody has said how many drafts those rounds had.
    """
    if gamma is None:
        raise UserError("--acceptance-length needs --gamma, the drafts of the rounds that had this length")
    try:
        return [acceptance_rate(gamma, length) for length in lengths]
    except ValueError as error:
        raise UserError(f"{error}; say an --acceptance-length from 1 to {gamma + 1}") from None


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


def add_deployment(parser: argparse._ActionsContainer, *, is_required: bool = True) -> None:
    """Options that say which model, draft and devices; see `find_deployment`."""
    parser.add_argument(
        "--model",
        required=is_required,
        help=f"a directory with a config.json, or one of {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--draft",
        default=SELF,
        metavar="MODEL",
        help=f"what drafts: '{SELF}', '{SPIRE_OF_MODEL}' for the draft that SPIRe would make of the "
        "model, or one as for --model",
    )
    parser.add_argument(
        "--gpu",
        required=is_required,
        help=f"one of {', '.join(HARDWARE)}, or '{THIS_MACHINE}' to measure this machine",
    )
    parser.add_argument("--tp", type=positive, default=1, help="devices, tensor parallel")
    parser.add_argument("--weight-bytes", type=_size, help="bytes per weight, if not the model's own")
    parser.add_argument("--kv-bytes", type=_size, help="bytes per K/V element, if not 2 (1: fp8)")
    parser.add_argument(
        "--costs",
        type=_costs,
        default={},
        metavar="JSON",
        help="measured efficiencies and overheads, by their names in docs/performance.md",
    )
    parser.add_argument(
        "--ideal",
        action="store_true",
        help="all that the data sheet promises, reading and computing at once, no overheads (SPIRe)",
    )


def find_deployment(options: argparse.Namespace) -> Deployment:
    """What the options of `add_deployment` say.

    Raises:
        UserError: an option cannot work.
    """
    shape = find_model(options.model)
    own = {"weight_bytes": options.weight_bytes, "kv_bytes": options.kv_bytes}
    own = {name: value for name, value in own.items() if value is not None}
    shape = replace(shape, **own)
    draft = find_draft(options.draft, shape)
    hardware = find_hardware(options.gpu)
    costs = Costs.ideal() if options.ideal else Costs()
    if options.gpu.lower() == THIS_MACHINE:
        costs = replace(costs, memory_efficiency=1.0, compute_efficiency=1.0)
    try:
        return Deployment(
            shape,
            hardware,
            options.tp,
            replace(costs, **options.costs),
            draft and replace(draft, **own),
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def add_acceptance(parser: argparse.ArgumentParser) -> None:
    """Options that say what is drafted and what stands of it; see `find_acceptance`."""
    parser.add_argument(
        "--budget",
        type=positive,
        nargs="+",
        default=[DEFAULT_BUDGET],
        help="tokens that a draft step reads",
    )
    parser.add_argument(
        "--acceptance",
        type=_rate,
        nargs="+",
        help="probability that a drafted token is accepted, one per budget. MagicDec's tables have 0.79 to "
        "0.85 at a budget of 512, 0.7 with TinyLlama as the draft; SPIRe 0.81 "
        f"(default: {DEFAULT_ACCEPTANCE}, {MODEL_ACCEPTANCE} with a draft model, {SPIRE_ACCEPTANCE} with "
        "SPIRe's)",
    )
    parser.add_argument(
        "--acceptance-length",
        type=_number,
        nargs="+",
        metavar="TOKENS",
        help="in place of --acceptance: tokens per round of --gamma drafts, as vLLM logs it ('Mean "
        "acceptance length')",
    )
    parser.add_argument("--gamma", type=positive, help="drafted tokens per round, if not the best number")
    parser.add_argument("--max-gamma", type=positive, default=8, help="most drafted tokens per round")


def find_acceptance(options: argparse.Namespace, draft: ModelShape | None) -> dict[int, float]:
    """The acceptance rate of every budget that the options of `add_acceptance` say.

    Raises:
        UserError: they do not fit together.
    """
    if options.acceptance_length:
        if options.acceptance:
            raise UserError("--acceptance and --acceptance-length say the same; use one of them")
        return pair_acceptance(options.budget, rates_of_lengths(options.gamma, options.acceptance_length))
    return pair_acceptance(options.budget, options.acceptance or [usual_acceptance(draft)])


def usual_acceptance(draft: ModelShape | None) -> float:
    """What papers have measured of a draft (None: the model itself)."""
    if draft is None:
        return DEFAULT_ACCEPTANCE
    return SPIRE_ACCEPTANCE if draft.is_spire else MODEL_ACCEPTANCE


def gammas_of(options: argparse.Namespace) -> tuple[int, int]:
    """The fewest and the most drafts per round."""
    return (options.gamma, options.gamma) if options.gamma else (1, options.max_gamma)


# Of options that mean something with --load alone.
_LOAD_DEFAULTS: dict[str, Any] = {"output": 256, "max_num_seqs": 256, "utilization": 0.8, "max_tpot": None}


def add_command(subparsers: Any) -> None:
    """Add `plan` to the subcommands of `magicdec`."""
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
    load = parser.add_argument_group("a load", "what it needs; --context is then the tokens of a prompt")
    load.add_argument("--load", type=_above_0, metavar="REQUESTS_PER_S", help="requests per second")
    defaults = _LOAD_DEFAULTS
    load.add_argument("--output", type=positive, default=defaults["output"], help="tokens of an answer")
    load.add_argument(
        "--max-num-seqs",
        type=positive,
        default=defaults["max_num_seqs"],
        help="requests in flight in an engine, at most",
    )
    load.add_argument(
        "--utilization",
        type=_share,
        default=defaults["utilization"],
        help="share of what an engine can serve that is planned for",
    )
    load.add_argument("--max-tpot", type=_above_0, metavar="MS", help="per output token, at most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the speedups to this file")
    parser.set_defaults(run=run)


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return value


def _rate(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a probability between 0 and 1")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a share above 0 and up to 1")
    return value


def _above_0(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return value


def _size(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 8:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of bytes between 0 and 8")
    return value


def _costs(text: str) -> dict[str, float]:
    names = [field.name for field in fields(Costs) if field.type is float]
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
    deployment = find_deployment(options)
    alphas = find_acceptance(options, deployment.draft)
    least, most = gammas_of(options)
    if options.load:
        run_load(options, deployment, alphas)
        return
    for name, default in _LOAD_DEFAULTS.items():
        if getattr(options, name) != default:
            raise UserError(f"--{name.replace('_', '-')} is of a load; say --load REQUESTS_PER_S, too")
    plan = make_plan(deployment, alphas, most, options.batch, options.context, least)
    for file, write in ((options.json, write_json), (options.png, draw)):
        if file is not None:
            try:
                write(plan, file)
            except OSError as error:
                raise UserError(f"cannot write {file}: {error.strerror}") from None
    print_table(plan)


def run_load(options: argparse.Namespace, deployment: Deployment, alphas: Mapping[int, float]) -> None:
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
            "model": asdict(deployment.shape),
            "draft": deployment.draft and asdict(deployment.draft),
            "hardware": asdict(deployment.hardware),
            "tensor_parallel": deployment.tensor_parallel,
            "costs": asdict(deployment.costs),
            "acceptance": {str(budget): alpha for budget, alpha in alphas.items()},
            "load": options.load,
            "utilization": options.utilization,
            "needs": [without_nan(asdict(row)) for row in rows],
        }
        try:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {options.json}: {error.strerror}") from None
    print_load(f"{options.load:g} requests per second: {title_of(deployment)}", rows, options, alphas)


def without_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    """With null for what is not known: JSON has no NaN."""
    return {name: None if value != value else value for name, value in row.items()}


def print_load(
    title: str, rows: list[Served], options: argparse.Namespace, alphas: Mapping[int, float]
) -> None:
    """Print what a load needs to standard output.

    Raises:
        UserError: rich is not installed.
    """
    console = require("rich.console").Console(
        highlight=False, width=None if sys.stdout.isatty() else 120, soft_wrap=True
    )
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
