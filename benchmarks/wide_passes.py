# SPDX-License-Identifier: Apache-2.0
"""How many draft passes lookups on the device spare, and at which tokens per round.

The shipped model drafts a fixed number of tokens a round on vLLM's V2 runner, with lookups on the device
(`drafting/wide_passes.py`) and without, greedily, after the same prompts. On a GPU that is what a server
does. On a CPU the host would look up; here it is kept from it, and Triton's interpreter plays the GPU's
part in vLLM's own kernels: there is no time to be measured, and what is counted is the same.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.documents import describe_documents, excerpts
from common.options import add_out, make_parser, settings_of
from common.record import make_record, write
from common.tables import console, make_table
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import engines

ON_DEVICE = {"MAGICDEC_TEST_TOKENS_ON_DEVICE": "1"}


@dataclass(frozen=True)
class Row:
    """One engine's answers to one batch."""

    documents: str
    batch: int
    lookup: str
    tokens_per_round: float  # of a request
    passes_per_round: float  # of the batch
    looked_up: int  # tokens that passes read
    right: int  # of these, those that the draft drew


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Every cell, without lookups and with them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engines.MODEL)
    for folder in (None, *args.documents):
        prompts = excerpts(tokenizer, max(args.batch), args.context, folder)
        for batch in args.batch:
            for lookup in ("off", "on"):
                yield row_of(args, describe_documents(folder), prompts[:batch], lookup)


def row_of(args: argparse.Namespace, documents: str, prompts: list[list[int]], lookup: str) -> Row:
    """Of an engine of its own."""
    sampling = {"temperature": 0, "max_tokens": args.tokens, "ignore_eos": True}
    batches = {"batches": [{"prompts": prompts, "sampling": sampling}]}
    spec = engines.magicdec(args.drafts, draft_kv_budget=args.budget, draft_lookup=lookup)
    room = len(prompts) * (args.context + args.tokens + args.drafts + 2 * engines.PAGE)
    run = engines.run(
        [("generate_and_count_drafts", batches)],
        v2=True,
        env=ON_DEVICE,
        time_limit_s=3600,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=engines.MODEL_LEN // engines.PAGE + room // engines.PAGE,
        speculative_config=spec,
    )
    if run.draft_failures:
        raise SystemExit(f"drafting failed {run.draft_failures} times")
    (counted,) = run.results
    lookups = {
        name: run.metrics.get(f"vllm:magicdec_lookup_{name}", 0)
        for name in ("rounds", "passes", "tokens", "accepted_tokens")
    }
    passes = lookups["passes"] / lookups["rounds"] if lookups["rounds"] else args.drafts
    return Row(
        documents=documents,
        batch=len(prompts),
        lookup=lookup,
        tokens_per_round=1 + args.drafts * counted["accepted"] / counted["drafted"],
        passes_per_round=passes,
        looked_up=lookups["tokens"],
        right=lookups["accepted_tokens"],
    )


def table_of(record: Mapping[str, Any]) -> Table:
    """A row per cell."""
    settings = record["settings"]
    title = f"{settings['drafts']} drafts a round, {settings['context']:,} tokens of context"
    numbers = ("tokens per round", "passes", "looked up", "right")
    table = make_table(title, numbers, ["documents", "batch", "lookups"])
    for row in record["rows"]:
        names = row["documents"], f"{row['batch']}", row["lookup"]
        read = (f"{row['looked_up']:,}", f"{row['right']:,}") if row["lookup"] == "on" else ("-", "-")
        table.add_row(*names, f"{row['tokens_per_round']:.2f}", f"{row['passes_per_round']:.1f}", *read)
    return table


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--documents", type=Path, nargs="*", default=[], help="folders of .txt files, too")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--context", type=int, default=1500, help="tokens")
    parser.add_argument("--tokens", type=int, default=400, help="to generate for each request")
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--budget", type=int, default=256, help="tokens")
    add_out(parser)
    args = parser.parse_args()
    settings = settings_of(args, "documents")
    rows = []
    for row in measure(args):
        rows.append(asdict(row))
        console.print(rows[-1])
    record = make_record("wide passes", model=engines.MODEL.name, settings=settings, rows=rows)
    console.print(table_of(record))
    write(record, args.out)


if __name__ == "__main__":
    main()
