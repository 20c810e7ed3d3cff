# SPDX-License-Identifier: Apache-2.0
"""Options of `magicdec` that say which model, draft and devices, and what is drafted and stands."""

import argparse
import json
import math
from dataclasses import fields, replace

from vllm_magicdec.planner.console import UserError
from vllm_magicdec.planner.hardware import HARDWARE, THIS_MACHINE, find_hardware
from vllm_magicdec.planner.models import MODELS, SELF, SPIRE_OF_MODEL, find_draft, find_model
from vllm_magicdec.planner.performance import Costs, Deployment, acceptance_rate
from vllm_magicdec.planner.shapes import ModelShape

DEFAULT_BUDGET = 512
# MagicDec's Tables 1 and 2 at a budget of 512: self-speculation has 2.40 to 2.57 tokens per round of 2, so
# alpha 0.79 to 0.85; TinyLlama as the draft 0.69 to 0.70. SPIRe's Table 1 has 3.40 of 4: 0.81.
DEFAULT_ACCEPTANCE, MODEL_ACCEPTANCE, SPIRE_ACCEPTANCE = 0.8, 0.7, 0.8


def add_deployment(parser: argparse.ArgumentParser) -> None:
    """Options that say which model, draft and devices; see `find_deployment`."""
    parser.add_argument(
        "--model",
        required=True,
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
        required=True,
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
