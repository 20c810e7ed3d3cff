# SPDX-License-Identifier: Apache-2.0
"""Compare `auto` with plain decoding and fixed numbers of drafts, cell by cell.

Two engines run at the same time: plain vLLM, and a method with `auto`. On every cell (batch x context)
they take turns: plain, the second engine with its controller pinned to each fixed choice, and with the
controller free. One turn of `auto` comes before the turns that count, as in a server's first seconds; the
JSON file has it as `first`. Timing is that of decode.py.

The best of several noisy medians is biased, so these turns only find the best contender. Then it and
`auto` are compared in pairs. Plain decoding, another engine, is compared in whole turns. A fixed choice
is compared in duels: both decode alternate pieces of one generation, and then of another with the pieces
exchanged. So both decode the same text, and a temporarily slow machine is slow for both.
"""

import argparse
import functools
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from common.decoding import Batch, decode
from common.documents import prompts_of_cells
from common.engines import PAGE, Turn, engine, engine_settings, set_environment, take_turns
from common.machine import device_of
from common.options import add_cells, add_documents, add_model, add_out, make_parser
from common.plots import draw_heat_map, norm_of, plt, save
from common.record import engine_record, write
from common.tables import console, make_table
from kv_heavy import KV_HEAVY, model_folder
from rich.table import Table
from scipy.stats import binom
from suite import TINY_DRAFT, speculations

from vllm_magicdec.adaptive.controller import Controller
from vllm_magicdec.adaptive.value import Choice
from vllm_magicdec.planner.profile import fill_prefix_cache

FIXED = (1, 2, 4, 8)
MIN_TOKENS, MAX_TOKENS = 192, 768  # of a turn or generation and request
PIECE = 96  # tokens per request in a contender's piece
# Steps after a change that do not count: one verifies the other contender's drafts, and one may have been
# scheduled already (asynchronous scheduling).
SETTLING_STEPS = 2


@dataclass(frozen=True)
class Cell:
    """Tokens per second; medians over the turns."""

    batch: int
    context: int
    plain: float
    fixed: dict[str, float]  # by the number of drafts
    auto: float
    best: str  # of plain and fixed
    of_best: float  # speed of auto over that of the best: the median of their pairs
    of_best_interval: tuple[float, float]  # see `median_interval`
    first: float  # of auto, when it met the cell
    chosen: dict[int, int]  # steps of auto by the number of drafts chosen

    @property
    def mean_drafts(self) -> float:
        steps = sum(self.chosen.values())
        return sum(length * count for length, count in self.chosen.items()) / steps


@dataclass(frozen=True)
class Contender:
    engine: Any  # an LLM
    hold: Callable[[], AbstractContextManager[None]] = nullcontext  # while it decodes


def decode_piece(batch: Batch) -> tuple[int, float]:
    """Decode a piece, and return tokens and seconds of the steps that count."""
    whole = batch.tokens + PIECE * batch.num_requests
    for _ in range(SETTLING_STEPS):
        batch.step()
    before, began = batch.tokens, time.perf_counter()
    while batch.tokens < whole and batch.step():
        pass
    took = time.perf_counter() - began
    if batch.has_ended:
        raise SystemExit("a request ended before the others had decoded their pieces")
    return batch.tokens - before, took


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 90 % confidence interval of the median of at least seven values."""
    ordered = sorted(values)
    rank = max(1, int(binom.ppf(0.05, len(ordered), 0.5)))
    return ordered[rank - 1], ordered[-rank]


def controller_of(llm: Any) -> Controller:
    """Return the controller of an engine whose scheduler is in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler._controller


@contextmanager
def pinned(controller: Controller, choice: Choice) -> Iterator[None]:
    """Make the controller always choose the same and learn nothing."""
    controller.choose = lambda *_, **__: choice
    controller.observe = lambda *_, **__: None
    try:
        yield
    finally:
        del controller.choose, controller.observe


@contextmanager
def watched(controller: Controller, chosen: list[Choice]) -> Iterator[None]:
    """Record the controller's choices."""
    choose = controller.choose

    def choose_and_record(*args: Any, **kwargs: Any) -> Choice:
        chosen.append(choose(*args, **kwargs))
        return chosen[-1]

    controller.choose = choose_and_record
    try:
        yield
    finally:
        del controller.choose


def measure_cell(
    plain: Any, magicdec: Any, prompts: list[list[int]], args: argparse.Namespace
) -> tuple[Cell, dict[str, Any]]:
    """Measure all contenders, then the best and `auto`; return the cell and the speeds of all turns."""
    for llm in (plain, magicdec):
        fill_prefix_cache(llm, prompts)
    controller = controller_of(magicdec)
    chosen: list[Choice] = []
    fixed = {
        str(drafts): Contender(magicdec, functools.partial(pinned, controller, Choice(drafts)))
        for drafts in FIXED
    }
    auto = Contender(magicdec, functools.partial(watched, controller, chosen))
    contenders = {"plain": Contender(plain), **fixed, "auto": auto}

    turn = Turn()
    probe = decode(turn.of(plain), prompts, MIN_TOKENS)
    num_tokens = min(max(MIN_TOKENS, int(1000 * args.seconds / probe.step_ms)), MAX_TOKENS)

    def run_turn(contender: Contender) -> float:
        llm = turn.of(contender.engine)
        with contender.hold():
            return decode(llm, prompts, num_tokens).tokens_per_s

    def run_turns(names: Iterable[str], turns: int) -> dict[str, list[float]]:
        return take_turns({name: functools.partial(run_turn, contenders[name]) for name in names}, turns)

    first = run_turn(auto)
    speeds = run_turns(contenders, args.turns)
    middle = {name: statistics.median(values) for name, values in speeds.items()}
    best = max((name for name in contenders if name != "auto"), key=middle.__getitem__)
    chosen.clear()
    if contenders[best].engine is magicdec:
        rivals = {name: contenders[name] for name in (best, "auto")}
        duels = [duel(rivals, prompts, num_tokens // PIECE) for _ in range(args.pairs)]
        fought = {name: [speed[name] for speed in duels] for name in rivals}
    else:
        fought = run_turns((best, "auto"), args.pairs)
    shares = [own / other for own, other in zip(fought["auto"], fought[best], strict=True)]
    cell = Cell(
        batch=len(prompts),
        context=len(prompts[0]),
        plain=middle["plain"],
        fixed={name: middle[name] for name in fixed},
        auto=middle["auto"],
        best=best,
        of_best=statistics.median(shares),
        of_best_interval=median_interval(shares),
        first=first,
        chosen=dict(sorted(Counter(choice.drafts for choice in chosen).items())),
    )
    return cell, {"turns": speeds, "pairs": fought}


def duel(rivals: dict[str, Contender], prompts: list[list[int]], pieces: int) -> dict[str, float]:
    """Tokens per second of two contenders of one engine that decode the same text by turns, piece by piece.

    Twice, the second time with the pieces exchanged.
    """
    tokens, seconds = Counter[str](), dict.fromkeys(rivals, 0.0)
    llm = rivals["auto"].engine
    for order in (list(rivals), list(rivals)[::-1]):
        # Requests whose drafts are better get ahead of the others; none must end before the last piece.
        batch = Batch(llm, prompts, 2 * MAX_TOKENS)
        for name in itertools.islice(itertools.cycle(order), pieces):
            with rivals[name].hold():
                made, took = decode_piece(batch)
            tokens[name] += made
            seconds[name] += took
        batch.abort()
    return {name: tokens[name] / seconds[name] for name in rivals}


def cells_of(record: Mapping[str, Any]) -> list[Cell]:
    cells = []
    for cell in record["cells"]:
        values = {field.name: cell[field.name] for field in fields(Cell)}  # older records have more
        chosen = {int(drafts): steps for drafts, steps in cell["chosen"].items()}  # strings in JSON
        cells.append(Cell(**{**values, "chosen": chosen}))
    return sorted(cells, key=lambda cell: (cell.context, cell.batch))


def title_of(record: Mapping[str, Any]) -> str:
    engine, spec = record["engine"], record["speculative_config"]
    drafter = spec["method"]
    if "draft_kv_budget" in spec:
        drafter += f", budget {spec['draft_kv_budget']} ({spec['draft_kv_policy']})"
    return f"{engine['model']}, {engine['dtype']}, auto (at most {max(FIXED)} drafts), {drafter}"


def table_of(*records: Mapping[str, Any]) -> Table:
    """The cells of records with the same fixed numbers of drafts."""
    cells = [
        (record["speculative_config"]["method"], cell) for record in records for cell in cells_of(record)
    ]
    fixed = (f"gamma {name}" for name in cells[0][1].fixed)
    others = ("auto", "drafts", "of plain", "of the best", "90 % interval")
    title = f"tokens per second: {title_of(records[0])}"
    table = make_table(title, ("batch", "context", "plain", *fixed, *others), ["method"])
    for method, cell in cells:
        table.add_row(
            *(method, str(cell.batch), f"{cell.context:,}", f"{cell.plain:.0f}"),
            *(f"{speed:.0f}" for speed in cell.fixed.values()),
            *(f"{cell.auto:.0f}", f"{cell.mean_drafts:.1f}"),
            *(f"{cell.auto / cell.plain:.2f}", f"{cell.of_best:.3f}"),
            "{:.3f} to {:.3f}".format(*cell.of_best_interval),
        )
    return table


def draw(record: Mapping[str, Any], path: Path) -> None:
    """A heat map of the speed over plain decoding, with the share of the best in each cell."""
    cells = cells_of(record)
    batches = sorted({cell.batch for cell in cells})
    contexts = sorted({cell.context for cell in cells})
    by_place = {(cell.batch, cell.context): cell for cell in cells}
    rows = [[by_place[batch, context] for context in contexts] for batch in batches]
    grid = [[cell.auto / cell.plain for cell in row] for row in rows]
    labels = [
        [f"{cell.auto / cell.plain:.2f} x\n{100 * cell.of_best:.0f} % of the best" for cell in row]
        for row in rows
    ]
    figure, axes = plt.subplots(figsize=(1.6 * len(contexts) + 3, 0.8 * len(batches) + 2))
    norm = norm_of(list(itertools.chain(*grid)))
    image = draw_heat_map(axes, grid, norm, rows=batches, contexts=contexts, labels=labels)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("batch")
    axes.set_title(f"{title_of(record)}\n{device_of(record['machine'])}", fontsize=9)
    figure.colorbar(image, label="speed of auto over plain decoding")
    figure.tight_layout()
    save(figure, path)


def run(args: argparse.Namespace, model: str) -> None:
    spec = {
        "method": "magicdec-self",
        "draft_lookup": "off",  # else it would do what no fixed number does; lookups.py has that
        "draft_kv_policy": args.policy,
        "draft_kv_budget": args.budget,
        **({"profile": str(args.profile)} if args.profile else {}),
    }
    if args.method != spec["method"]:
        spec = speculations(max(FIXED), args.budget, str(args.draft_model or TINY_DRAFT))[args.method]
    spec |= {"num_speculative_tokens": "auto", "max_num_speculative_tokens": max(FIXED)}
    model_len = max(args.context) + 2 * MAX_TOKENS + 2 * PAGE
    # As served: the model computes in a process of its own, on the threads that vLLM gives it there.
    settings = engine_settings(
        model, args.dtype, batch=max(args.batch), model_len=model_len, distributed_executor_backend="mp"
    )
    record = engine_record(
        "auto",
        args.model,
        settings,
        speculative_config={**spec, **({"profile": True} if args.profile else {})},
        seconds=args.seconds,
        turns=args.turns,
        pairs=args.pairs,
    )
    cells, all_turns = [], []
    with engine(settings) as plain, engine(settings, spec) as magicdec:
        for prompts in prompts_of_cells(plain.get_tokenizer(), args.batch, args.context, args.documents):
            cell, speeds = measure_cell(plain, magicdec, prompts, args)
            console.print(f"batch {cell.batch}, context {cell.context}: {cell.of_best:.3f} of the best")
            cells.append(cell)
            all_turns.append({"batch": cell.batch, "context": cell.context, **speeds})
    record |= {"cells": [asdict(cell) for cell in cells], "all_turns": all_turns}
    console.print(table_of(record))
    write(record, args.out)
    if args.out:
        draw(record, args.out.with_suffix(".png"))


def main() -> None:
    parser = make_parser(__doc__)
    add_model(parser, default=KV_HEAVY)
    add_cells(parser, batch=[1, 2, 4, 8], context=[100, 2048, 16000])
    parser.add_argument("--seconds", type=float, default=4, help="of plain decoding in a turn, about")
    parser.add_argument(
        "--method", default="magicdec-self", choices=["magicdec-self", "ngram", "suffix", "draft_model"]
    )
    parser.add_argument("--draft-model", help="folder or name, for --method draft_model (default: shipped)")
    parser.add_argument("--policy", default="streamingllm")
    parser.add_argument("--budget", type=float, default=512.0, help="of the draft")
    parser.add_argument("--profile", type=Path, help="a file of 'magicdec profile'")
    parser.add_argument("--turns", type=int, default=2, help="per contender and cell")
    parser.add_argument("--pairs", type=int, default=9, help="of 'auto' and the best, per cell")
    add_documents(parser)
    add_out(parser, "; a heat map goes beside it")
    args = parser.parse_args()
    # The controller must be within reach: both engines' schedulers run in this process.
    set_environment(kv_cache_gib=5, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    with model_folder(args.model) as model:
        run(args, model)


if __name__ == "__main__":
    main()
