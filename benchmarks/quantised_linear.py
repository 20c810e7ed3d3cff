# SPDX-License-Identifier: Apache-2.0
"""Time the linear layers of a model on a CPU by weights and rows: the plugin's kernel and torch's products.

The sum over all linear layers of a model and its unembedding, in milliseconds. Every layer has weights of
its own, so that they come from memory as in a forward pass. Minimum of several turns; the kinds take turns.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common.options import add_out, make_parser
from common.record import make_record, write
from common.tables import console, make_table
from rich.table import Table

from vllm_magicdec.native.quantised_linear import multiply, pack

# (out_features, in_features) of a layer's projections, number of layers, and the unembedding.
SHAPES = {
    "SmolLM2-135M": ([(960, 576), (576, 576), (3072, 576), (576, 1536)], 30, (49152, 576)),
}
TORCH_GROUP = 32


def as_torch_packs(weights: torch.Tensor, bits: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return torch's product with packed weights, for bfloat16 activations."""
    if bits == 8:
        scale = weights.abs().amax(1) / 127
        integers = (weights / scale.unsqueeze(1)).round().to(torch.int8)
        scale = scale.to(torch.bfloat16)
        return lambda x: torch._weight_int8pack_mm(x, integers, scale)
    grouped = weights.unflatten(1, (-1, TORCH_GROUP))
    low = grouped.amin(2)
    scale = (grouped.amax(2) - low) / 15
    quantised = ((grouped - low.unsqueeze(2)) / scale.unsqueeze(2)).round().to(torch.int32).flatten(1)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quantised, 1)
    scales = torch.stack([scale.t(), (low + 8 * scale).t()], -1).to(torch.bfloat16).contiguous()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, TORCH_GROUP, scales)


def kinds_of(weights: torch.Tensor) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the products with one layer's weights by name; those of torch take bfloat16."""
    kinds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "float32": lambda x: torch.nn.functional.linear(x, weights)
    }
    for bits in (8, 4):
        packed = pack(weights, bits)
        kinds[f"int{bits}"] = lambda x, packed=packed, bits=bits: multiply(x, packed, len(weights), bits)
        kinds[f"int{bits}, torch"] = as_torch_packs(weights, bits)
    return kinds


def measure(rows: int, turns: int, layers: list[Any]) -> dict[str, float]:
    """Return milliseconds of all linear layers by kind; `layers` are (in_features, products by kind)."""
    best: dict[str, float] = {}
    for _ in range(turns):
        for kind in layers[0][1]:
            dtype = torch.bfloat16 if "torch" in kind else torch.float32
            inputs = {size: torch.randn(rows, size).to(dtype) for size, _ in layers}
            began = time.perf_counter()
            for size, kinds in layers:
                kinds[kind](inputs[size])
            took = 1000 * (time.perf_counter() - began)
            best[kind] = min(took, best.get(kind, took))
    return best


def table_of(records: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the records: a row per number of rows, in milliseconds."""
    table = make_table("ms", records[0]["rows"][0]["ms"], ["rows"])
    for record in records:
        for row in record["rows"]:
            table.add_row(str(row["rows"]), *(f"{ms:.1f}" for ms in row["ms"].values()))
    return table


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    record = make_record("quantised_linear", model=args.model, threads=args.threads, rows=[])
    projections, num_layers, head = SHAPES[args.model]
    shapes = [*projections * num_layers, head]
    layers = [(shape[1], kinds_of(torch.randn(shape) * 0.02)) for shape in shapes]
    for rows in args.rows:
        record["rows"].append({"rows": rows, "ms": measure(rows, args.turns, layers)})
    console.print(table_of([record]))
    write(record, args.out)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="SmolLM2-135M")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16], help="tokens of a pass")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=9)
    add_out(parser)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
