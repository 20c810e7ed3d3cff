# SPDX-License-Identifier: Apache-2.0
"""Compare measured T_T, T_D and T_V of decode.py with the roofline.

The roofline of a GPU comes from its data sheet. That of a CPU is measured now, so it must be the machine of
the result.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common.machine import device_of, same_machine
from common.options import add_out, make_parser
from common.record import make_record, write
from common.tables import console, make_table
from kv_heavy import TINY_LLAMA, model_folder
from rich.table import Table

from vllm_magicdec.planner.hardware import HARDWARE, measure_this_machine
from vllm_magicdec.planner.models import find_model
from vllm_magicdec.planner.performance import Costs, Deployment
from vllm_magicdec.planner.shapes import ModelShape

MAX_DIFFERENCE = 0.25  # between the roofline and a measurement, as a share; larger ones are flagged
ITEM_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


@dataclass(frozen=True)
class Comparison:
    """One time of one cell."""

    batch: int
    context: int  # tokens per request
    time: str  # T_T, T_D or T_V
    measured_ms: float
    roofline_ms: Mapping[str, float]  # by the name of the costs


def compare(record: Mapping[str, Any], deployments: Mapping[str, Deployment]) -> list[Comparison]:
    """Compare all times in a result of decode.py with the roofline.

    Args:
        record: the JSON file.
        deployments: the model on its device, by the name of the costs.
    """
    gamma = record["speculative_config"]["num_speculative_tokens"]
    share_or_tokens = record["speculative_config"]["draft_kv_budget"]
    comparisons = []
    for row in sorted(record["rows"], key=lambda row: (row["context"], row["batch"])):
        batch, context = row["batch"], row["context"]
        budget = int(share_or_tokens if share_or_tokens > 1 else share_or_tokens * context)
        comparisons += [
            Comparison(
                batch, context, time, measured, {n: d.forward_ms(*cell) for n, d in deployments.items()}
            )
            for time, measured, cell in (
                ("T_T", row["plain_step_ms"], (batch, 1, context)),
                ("T_D", row["draft_step_ms"], (batch, 1, min(budget, context))),
                (f"T_V({gamma})", row["verification_ms"], (batch, gamma + 1, context)),
            )
        ]
    return comparisons


def this_deployment(shape: ModelShape, gpu: str) -> Deployment:
    """Return the deployment on this machine, by data sheet if `gpu` is known, otherwise measured."""
    words = gpu.replace("-", " ").split()
    # A PCIe board of the same name is a different device.
    known = [device for name, device in HARDWARE.items() if name in words and "PCIe" not in words]
    if known:
        return Deployment(shape, known[0])
    costs = replace(Costs(), memory_efficiency=1.0, compute_efficiency=1.0)  # measured rates are achieved
    return Deployment(shape, measure_this_machine(), costs=costs)


def differs(measured: float, predicted: float) -> bool:
    """Return whether the roofline is off by more than `MAX_DIFFERENCE`."""
    return abs(measured / predicted - 1) > MAX_DIFFERENCE


def deployment_of(
    shape: ModelShape, machine: Mapping[str, Any], here: Mapping[str, Any], known: dict[str, Deployment]
) -> Deployment:
    """Return the model's deployment on the device of a result.

    Args:
        shape: the model's shape.
        machine: the result's machine.
        here: this machine.
        known: cache of deployments by the name of the GPU, or "" for this CPU.

    Raises:
        SystemExit: the device is another machine without a data sheet.
    """
    gpu = machine.get("gpu", "")
    if gpu not in known:
        known[gpu] = this_deployment(shape, gpu)
    if known[gpu].hardware.source == "measured here" and not same_machine(machine, here):
        raise SystemExit(
            f"the result is of {device_of(machine)}, for which there is no data sheet, and this is "
            f"{device_of(here)}; compare it on the machine of the result"
        )
    return replace(known[gpu], shape=shape)


def comparison_table(name: str, comparisons: Sequence[Comparison]) -> Table:
    costs = (column for name in comparisons[0].roofline_ms for column in (name, "ratio", ""))
    title = f"{name}: ms, ! where the roofline is off by more than {MAX_DIFFERENCE:.0%}"
    table = make_table(title, ("batch", "context", "time", "measured", *costs))
    for c in comparisons:
        table.add_row(
            *(str(c.batch), str(c.context), c.time, f"{c.measured_ms:.2f}"),
            *itertools.chain.from_iterable(
                (f"{ms:.2f}", f"{c.measured_ms / ms:.2f}", "!" if differs(c.measured_ms, ms) else "")
                for ms in c.roofline_ms.values()
            ),
        )
    return table


def table_of(record: Mapping[str, Any]) -> Table:
    """Return a table of all comparisons in a record, with measured over predicted in brackets."""
    comparisons = record["comparisons"]
    columns = ("batch", "context", "time", "measured ms", *comparisons[0]["costs"])
    table = make_table("measured times beside the roofline's", columns, names=["result"])
    for compared in comparisons:
        for c in (Comparison(**time) for time in compared["times"]):
            predicted = (f"{ms:.2f} ({c.measured_ms / ms:.2f})" for ms in c.roofline_ms.values())
            cells = (str(c.batch), f"{c.context:,}", c.time, f"{c.measured_ms:.2f}", *predicted)
            table.add_row(Path(compared["result"]).stem.removeprefix("decode-"), *cells)
    return table


def shape_of(model: str, dtype: str) -> ModelShape:
    """Return the shape of a model of decode.py with weights and K/V of `dtype`."""
    with model_folder(str(TINY_LLAMA) if model == TINY_LLAMA.name else model) as folder:
        shape = find_model(folder)
    return replace(shape, name=model, weight_bytes=ITEM_BYTES[dtype], kv_bytes=ITEM_BYTES[dtype])


def compare_all(files: Iterable[Path], here: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare all results with the roofline."""
    compared = []
    known: dict[str, Deployment] = {}
    for file in files:
        record = json.loads(file.read_text())
        shape = shape_of(record["engine"]["model"], record["engine"]["dtype"])
        deployment = deployment_of(shape, record["machine"], here, known)
        comparisons = compare(record, {"roofline": deployment})
        console.print(comparison_table(file.name, comparisons))
        compared.append(
            {
                "result": file.name,
                "device": asdict(deployment.hardware),
                "costs": {"roofline": asdict(deployment.costs)},
                "times": [asdict(comparison) for comparison in comparisons],
            }
        )
    return compared


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of decode.py")
    add_out(parser)
    args = parser.parse_args()
    record = make_record("roofline")
    record["comparisons"] = compare_all(args.results, record["machine"])
    write(record, args.out)


if __name__ == "__main__":
    main()
