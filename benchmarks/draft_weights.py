# SPDX-License-Identifier: Apache-2.0
"""Compare draft weights, policies and vLLM's own methods on a real model: see --help.

All engines run at the same time and take turns on every cell, each cell several times; a turn is a batch of
greedy requests from their arrival to the last token, with the prompts in the prefix cache. Cells are
`DOCUMENTS x TOKENS x REQUESTS`: questions about that many documents of so many tokens. Results are medians
over the turns; speeds are ratios to plain decoding in the same turn. With `--parts` a last turn splits the
time of a step into the parts of the target and of the draft (common/parts.py), for a file of its own.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from common.decoding import Batch, Decoding, decode_job, medians
from common.documents import excerpts, questions_about
from common.engines import PAGE, Turn, engine, engine_settings, set_environment, take_turns
from common.options import add_documents, add_model, add_out, make_parser, settings_of, writable
from common.parts import PARTS, install_part_timers, take_parts
from common.record import engine_record, write
from common.tables import console, make_table
from kv_heavy import model_folder
from rich.table import Table
from suite import PLAIN, POLICIES, speculations

from vllm_magicdec.planner.profile import fill_prefix_cache

CELLS = ("1x6000x4", "8x1000x8", "1x6000x1")


@dataclass(frozen=True)
class Cell:
    """Questions about documents."""

    documents: int
    tokens: int  # of each document
    requests: int

    @classmethod
    def parse(cls, text: str) -> "Cell":
        """Parse `DOCUMENTSxTOKENSxREQUESTS`."""
        return cls(*map(int, text.split("x")))

    def num_pages(self, generated: int) -> int:
        """Return an upper bound of the KV pages; `generated` tokens per request."""
        return (self.documents * self.tokens + self.requests * (generated + 512)) // PAGE

    def prompts(self, tokenizer: Any, args: argparse.Namespace) -> list[list[int]]:
        """Return the requests' token ids: questions about excerpts."""
        texts = excerpts(tokenizer, self.documents, self.tokens, args.documents)
        return questions_about(tokenizer, texts, self.requests)


def contenders(names: Sequence[str], drafts: int, budget: float) -> dict[str, dict[str, Any] | None]:
    """Return configurations by name: a method of suite.py, POLICY-WEIGHTS or auto-WEIGHTS."""
    known = speculations(drafts, budget, None)
    chosen: dict[str, dict[str, Any] | None] = {PLAIN: None}
    for name in names:
        method, _, weights = name.rpartition("-")
        if method in ("auto", *POLICIES):
            chosen[name] = {**known[f"magicdec-{method}"], "draft_weights": weights}
        elif name in known:
            chosen[name] = known[name]
        else:
            raise SystemExit(
                f"{name!r} is neither a method of suite.py nor a policy or 'auto' with weights, such as "
                "streamingllm-int4"
            )
    return chosen


def table_of(records: Sequence[dict[str, Any]]) -> Table:
    """Return a table of a row per record, cell and contender; a step of a method is a round."""
    names = ["documents x tokens x requests", "draft"]
    table = make_table(
        records[0]["engine"]["model"], ["tokens per round", "speed", "step ms", "round"], names
    )
    for record in records:
        for cell, results in record["results"].items():
            plain_ms = results[PLAIN]["step_ms"]
            for name, result in results.items():
                table.add_row(
                    cell.replace("x", " x "),
                    name,
                    *(f"{result['acceptance_length']:.2f}", f"{result['speed']:.2f}"),
                    *(f"{result['step_ms']:.0f}", f"{result['step_ms'] / plain_ms:.2f}"),
                )
    return table


def parts_table_of(records: Sequence[dict[str, Any]]) -> Table:
    """Return a table of a row per record, cell and contender: milliseconds per step of every part."""
    phases = [f"{phase} {part}" for phase in ("target", "draft") for part in PARTS]
    table = make_table(
        records[0]["engine"]["model"], [*phases, "other"], ["documents x tokens x requests", "draft"]
    )
    for record in records:
        for cell, results in record["results"].items():
            for name, parts in results.items():
                cells = (parts.get(part) for part in (*phases, "other"))
                table.add_row(
                    cell.replace("x", " x "), name, *("" if c is None else f"{c:.0f}" for c in cells)
                )
    return table


def split_step(llm: Any, prompts: list[list[int]], num_tokens: int) -> dict[str, float]:
    """Return the milliseconds of a step by part; `other`: scheduler, detokenisation and transport.

    The worker may be a step ahead of the engine's last one, so that `other` lacks up to a step's share.
    """
    batch = Batch(llm, prompts, num_tokens)
    batch.step()
    llm.collective_rpc(take_parts)
    started, num_steps = time.perf_counter(), 1
    while batch.step():
        num_steps += 1
    step_ms = 1000 * (time.perf_counter() - started) / num_steps
    (totals,) = llm.collective_rpc(take_parts)
    batch.abort()
    parts = {part: total / num_steps for part, total in totals.items()}
    return {**parts, "other": step_ms - sum(parts.values())}


def summarise(turns: dict[str, list[Decoding]]) -> dict[str, dict[str, Any]]:
    """Return every contender's medians; `speed` is the median of the turns' ratios to plain decoding."""
    plain = [turn.tokens_per_s for turn in turns[PLAIN]]
    return {
        name: {
            **asdict(medians(own)),
            "speed": statistics.median(o.tokens_per_s / p for o, p in zip(own, plain, strict=True)),
            "turns": [asdict(turn) for turn in own],
        }
        for name, own in turns.items()
    }


def run(args: argparse.Namespace, model: str) -> None:
    chosen = contenders(args.drafts_by, args.gamma, args.budget)
    cells = {text: Cell.parse(text) for text in args.cells}
    settings = engine_settings(
        model,
        args.dtype,
        batch=max(cell.requests for cell in cells.values()),
        model_len=max(cell.tokens for cell in cells.values()) + args.tokens + 256,
        enforce_eager=not args.compile,
        # Only the workers are processes of their own: an engine's core would take 0.8 GB, too.
        distributed_executor_backend="mp",
        # Each engine has its own KV cache, in which a document's questions share its pages.
        num_gpu_blocks_override=max(cell.num_pages(args.tokens) for cell in cells.values()),
        **({"gpu_memory_utilization": 0.9 / len(chosen)} if torch.cuda.is_available() else {}),
    )
    record = engine_record("draft_weights", args.model, settings, options=settings_of(args, "parts"))
    record |= {"cells": list(cells), "contenders": chosen, "results": {}}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(engine(settings, spec)) for name, spec in chosen.items()}
        tokenizer = engines[PLAIN].get_tokenizer()
        turn = Turn()
        for text, cell in cells.items():
            prompts = cell.prompts(tokenizer, args)
            for llm in engines.values():
                fill_prefix_cache(turn.of(llm), prompts)

            def job(llm: Any, prompts: list[list[int]] = prompts) -> Decoding:
                return decode_job(turn.of(llm), prompts, args.tokens, temperature=args.temperature)

            jobs = {name: lambda llm=llm: job(llm) for name, llm in engines.items()}
            record["results"][text] = summarise(take_turns(jobs, args.turns))
            write(record, args.out)
            console.print(table_of([record]))
        if args.parts:  # the timers stay, so after all cells
            parts = record | {"benchmark": "step_parts", "results": {}}
            for llm in engines.values():
                llm.collective_rpc(install_part_timers)
            for text, cell in cells.items():
                prompts = cell.prompts(tokenizer, args)
                parts["results"][text] = {
                    name: split_step(turn.of(llm), prompts, args.tokens) for name, llm in engines.items()
                }
            write(parts, args.parts)
            console.print(parts_table_of([parts]))


def main() -> None:
    parser = make_parser(__doc__)
    add_model(parser, default="smollm2")
    parser.add_argument(
        "--drafts-by",
        nargs="+",
        default=[f"streamingllm-{weights}" for weights in ("target", "int8", "int4")],
        help="beside plain decoding: methods of suite.py, POLICY-WEIGHTS, auto-WEIGHTS",
    )
    parser.add_argument("--cells", nargs="+", default=CELLS, help="%(default)s")
    parser.add_argument("--tokens", type=int, default=96, help="generated per request")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--gamma", type=int, default=4, help="drafted tokens per round")
    parser.add_argument("--budget", type=float, default=512)
    parser.add_argument("--turns", type=int, default=3, help="per engine and cell")
    parser.add_argument("--compile", action="store_true", help="torch.compile instead of eager")
    parser.add_argument("--parts", type=writable, help="JSON file for the parts of the steps")
    add_documents(parser)
    add_out(parser)
    args = parser.parse_args()
    # The timers of parts are sent to the workers.
    set_environment(
        kv_cache_gib=1, VLLM_ALLOW_INSECURE_SERIALIZATION="1", VLLM_ENABLE_V1_MULTIPROCESSING="0"
    )
    with model_folder(args.model) as model:
        run(args, model)


if __name__ == "__main__":
    main()
