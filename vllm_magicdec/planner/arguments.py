# SPDX-License-Identifier: Apache-2.0
"""Options of `magicdec plan` for the model, draft, devices, budgets and acceptance rates."""

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
# Bytes per weight of the draft's linear layers, with their scales, by `draft_weights`.
DRAFT_WEIGHTS = {"target": None, "fp8": 1.0, "int8": 1.125, "mxfp4": 0.53125, "int4": 0.625}
# MagicDec's Tables 1 and 2 at a budget of 512: self-speculation has 2.40 to 2.57 tokens per round of 2, so
# alpha 0.79 to 0.85; TinyLlama as the draft 0.69 to 0.70. SPIRe's Table 1 has 3.40 of 4: 0.81.
DEFAULT_ACCEPTANCE, MODEL_ACCEPTANCE, SPIRE_ACCEPTANCE = 0.8, 0.7, 0.8


def add_deployment(parser: argparse.ArgumentParser) -> None:
    """Add the options that `find_deployment` reads."""
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
    parser.add_argument("--tp", type=positive, default=1, help="devices, tensor parallel")
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


def find_deployment(options: argparse.Namespace) -> Deployment:
    """Build the deployment that the options describe.

    Raises:
        UserError: a model or device is unknown, or they do not fit each other.
    """
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


def add_acceptance(parser: argparse.ArgumentParser) -> None:
    """Add the options that `find_acceptance` reads, and the numbers of drafts."""
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
    parser.add_argument("--gamma", type=positive, help="drafted tokens per round, instead of the best")
    parser.add_argument("--max-gamma", type=positive, default=8, help="most drafted tokens per round")


def find_acceptance(options: argparse.Namespace, draft: ModelShape | None) -> dict[int, float]:
    """Return the acceptance rate of every budget (tokens); `draft` is None for self-speculation.

    Raises:
        UserError: the options contradict each other, or a rate is missing.
    """
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


def positive(text: str) -> int:
    """Parse a whole number above 0 for argparse."""
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
