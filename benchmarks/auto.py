# SPDX-License-Identifier: Apache-2.0
"""`auto` against plain decoding and fixed numbers of drafts and budgets, cell by cell.

Two engines are alive at the same time: plain vLLM, and magicdec-self with `auto`. On every cell (batch x
context) they take turns: plain, the second engine with its controller pinned to each fixed choice, and with
the controller free. With `--budget auto` the fixed choices are of every budget that `auto` has. Before the
turns that count the controller meets each cell once, as a server does in its first seconds; that turn is in
the JSON file as `first`. Clock and tokens as in decode.py.

The best of several noisy medians is better than it will be the next time. So those turns only find the
best contender; then it and `auto` meet in pairs, which give the share of the best. Plain decoding, another
engine, meets it in whole turns. A fixed choice meets it in duels: both decode the same generation by turns,
piece by piece, and then once more with the pieces exchanged. So both have decoded the same text, and a
machine that is slow for some seconds is slow for both.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
from decode import IDLE_SPIN_S, PAGE, console, decode
from documents import excerpts
from kv_heavy import model_folder
from machine import describe_machine
from rich.table import Table
from scipy.stats import binom

from vllm_magicdec.adaptive.controller import Choice, Controller

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import TwoSlopeNorm

FIXED = (1, 2, 4, 8)
MIN_TOKENS, MAX_TOKENS = 192, 768  # of a turn or generation and request
PIECE = 96  # tokens per request that one contender decodes before the other goes on
# Steps after a change that count for nobody: one verifies the other contender's drafts, and one may have
# been scheduled already (asynchronous scheduling).
SETTLING_STEPS = 2


@dataclass(frozen=True)
class Cell:
    """Tokens per second; medians over the turns."""

    batch: int
    context: int
    plain: float
    fixed: dict[str, float]  # by what `name_of` calls the choice
    auto: float
    best: str  # of plain and fixed
    of_best: float  # speed of auto over that of the best: the median of their pairs
    of_best_interval: tuple[float, float]  # see `median_interval`
    first: float  # of auto, when it met the cell
    chosen: dict[int, int]  # steps of auto by the number of drafts chosen
    chosen_budgets: dict[int, int]  # and those with drafts by the budget

    @property
    def mean_drafts(self) -> float:
        steps = sum(self.chosen.values())
        return sum(length * count for length, count in self.chosen.items()) / steps


@dataclass(frozen=True)
class Contender:
    engine: Any  # an LLM
    hold: Callable[[], AbstractContextManager[None]] = nullcontext  # while it decodes


class Batch:
    """A cell's requests in one engine, decoded piece by piece."""

    def __init__(self, llm: Any, prompts: list[list[int]]) -> None:
        from vllm import SamplingParams

        self._engine = llm.llm_engine
        # Requests whose drafts are better get ahead of the others; none must end before the last piece.
        params = SamplingParams(temperature=0, max_tokens=2 * MAX_TOKENS, ignore_eos=True, detokenize=False)
        self._tokens = dict.fromkeys((f"{i}-{time.monotonic_ns()}" for i in range(len(prompts))), 0)
        for request_id, prompt in zip(self._tokens, prompts, strict=True):
            self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        while not all(self._tokens.values()):
            self._step()

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                raise SystemExit("a request ended before the others had decoded their pieces")
            self._tokens[output.request_id] = len(output.outputs[0].token_ids)

    def decode_piece(self) -> tuple[int, float]:
        """Go on by a piece.

        Returns:
            Tokens and seconds of the steps that count.
        """
        whole = sum(self._tokens.values()) + PIECE * len(self._tokens)
        for _ in range(SETTLING_STEPS):
            self._step()
        before, began = sum(self._tokens.values()), time.perf_counter()
        while sum(self._tokens.values()) < whole:
            self._step()
        return sum(self._tokens.values()) - before, time.perf_counter() - began

    def abort(self) -> None:
        self._engine.abort_request(list(self._tokens))
        while self._engine.has_unfinished_requests():
            self._engine.step()


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """What holds the true median with a probability of at least 90 %, of seven or more values."""
    ordered = sorted(values)
    rank = max(1, int(binom.ppf(0.05, len(ordered), 0.5)))
    return ordered[rank - 1], ordered[-rank]


def name_of(choice: Choice, controller: Controller) -> str:
    """Short, for a table's head."""
    budget = f", {choice.budget}" if len(controller.budgets) > 1 else ""
    return f"{choice.drafts}{budget}"


@contextmanager
def pinned(controller: Controller, choice: Choice) -> Iterator[None]:
    """A controller that always chooses the same and learns nothing."""
    controller.choose = lambda num_reqs, context_tokens: choice
    controller.observe = lambda rounds, budget, timed: None
    try:
        yield
    finally:
        del controller.choose, controller.observe


@contextmanager
def watched(controller: Controller, chosen: list[Choice]) -> Iterator[None]:
    """Note what the controller chooses."""
    choose = controller.choose

    def choose_and_note(num_reqs: int, context_tokens: int) -> Choice:
        chosen.append(choose(num_reqs, context_tokens))
        return chosen[-1]

    controller.choose = choose_and_note
    try:
        yield
    finally:
        del controller.choose


def measure_cell(
    plain: Any, magicdec: Any, prompts: list[list[int]], seconds: float, turns: int, pairs: int
) -> tuple[Cell, dict[str, Any]]:
    """All contenders, then the best and `auto`; turns of plain decoding take about `seconds`."""
    from vllm import SamplingParams

    for llm in (plain, magicdec):  # fill the prefix cache
        ids = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(ids, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    controller = magicdec.llm_engine.engine_core.engine_core.scheduler._controller
    chosen: list[Choice] = []
    fixed = {
        name_of(choice, controller): Contender(magicdec, functools.partial(pinned, controller, choice))
        for choice in itertools.starmap(Choice, itertools.product(FIXED, controller.budgets))
    }
    auto = Contender(magicdec, functools.partial(watched, controller, chosen))
    contenders = {"plain": Contender(plain), **fixed, "auto": auto}

    time.sleep(IDLE_SPIN_S)
    probe = decode(plain, prompts, MIN_TOKENS, 0)
    num_tokens = min(max(MIN_TOKENS, int(1000 * seconds / probe.step_ms)), MAX_TOKENS)
    latest = plain

    def run_turn(contender: Contender) -> float:
        nonlocal latest
        if contender.engine is not latest:
            time.sleep(IDLE_SPIN_S)
        latest = contender.engine
        with contender.hold():
            return decode(contender.engine, prompts, num_tokens, 0).tokens_per_s

    first = run_turn(auto)
    speeds = take_turns({n: functools.partial(run_turn, c) for n, c in contenders.items()}, turns)
    middle = {name: statistics.median(values) for name, values in speeds.items()}
    best = max((name for name in contenders if name != "auto"), key=middle.__getitem__)
    chosen.clear()
    rivals = {name: contenders[name] for name in (best, "auto")}
    if contenders[best].engine is magicdec:
        duels = [duel(rivals, prompts, num_tokens // PIECE) for _ in range(pairs)]
        fought = {name: [speed[name] for speed in duels] for name in rivals}
    else:
        fought = take_turns({n: functools.partial(run_turn, c) for n, c in rivals.items()}, pairs)
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
        chosen_budgets=dict(sorted(Counter(choice.budget for choice in chosen if choice.drafts).items())),
    )
    return cell, {"turns": speeds, "pairs": fought}


def take_turns(contenders: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """What each returns, turn by turn; every other turn goes through them backwards."""
    results: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns):
        for name in list(contenders)[:: -1 if turn % 2 else 1]:
            results[name].append(contenders[name]())
    return results


def duel(rivals: dict[str, Contender], prompts: list[list[int]], pieces: int) -> dict[str, float]:
    """Tokens per second of two contenders of one engine that decode the same text by turns, piece by piece.

    Twice, the second time with the pieces exchanged.
    """
    tokens, seconds = Counter[str](), dict.fromkeys(rivals, 0.0)
    llm = rivals["auto"].engine
    for order in (list(rivals), list(rivals)[::-1]):
        batch = Batch(llm, prompts)
        for name in itertools.islice(itertools.cycle(order), pieces):
            with rivals[name].hold():
                made, took = batch.decode_piece()
            tokens[name] += made
            seconds[name] += took
        batch.abort()
    return {name: tokens[name] / seconds[name] for name in rivals}


def make_table(cells: list[Cell], title: str) -> Table:
    table = Table(title=title)
    fixed = (f"gamma {name}" for name in cells[0].fixed)
    others = ("auto", "drafts", "of plain", "of the best", "90 % interval")
    for column in ("batch", "context", "plain", *fixed, *others):
        table.add_column(column, justify="right")
    for cell in cells:
        table.add_row(
            *(str(cell.batch), str(cell.context), f"{cell.plain:.1f}"),
            *(f"{speed:.1f}" for speed in cell.fixed.values()),
            *(f"{cell.auto:.1f}", f"{cell.mean_drafts:.1f}"),
            *(f"{cell.auto / cell.plain:.2f}", f"{cell.of_best:.3f}"),
            "{:.3f} to {:.3f}".format(*cell.of_best_interval),
        )
    return table


def draw(cells: list[Cell], title: str, path: Path) -> None:
    """A heat map of the speed over plain decoding, with the share of the best in each cell."""
    batches = sorted({cell.batch for cell in cells})
    contexts = sorted({cell.context for cell in cells})
    by_place = {(cell.batch, cell.context): cell for cell in cells}
    grid = [[by_place[b, c].auto / by_place[b, c].plain for c in contexts] for b in batches]
    figure, axes = plt.subplots(figsize=(1.6 * len(contexts) + 3, 0.8 * len(batches) + 2))
    # Yellow where speculation neither gains nor loses.
    norm = TwoSlopeNorm(1.0, vmin=0.5, vmax=max(2.0, *map(max, grid)))
    image = axes.imshow(grid, cmap="RdYlGn", norm=norm, aspect="auto")
    for row, batch in enumerate(batches):
        for column, context in enumerate(contexts):
            cell = by_place[batch, context]
            text = f"{grid[row][column]:.2f} x\n{100 * cell.of_best:.0f} % of the best"
            axes.text(column, row, text, ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axes.set_yticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("batch")
    axes.set_title(title, fontsize=9)
    figure.colorbar(image, label="speed of auto over plain decoding")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def run(args: argparse.Namespace, model: str) -> None:
    from vllm import LLM

    spec = {
        "method": "magicdec-self",
        "num_speculative_tokens": "auto",
        "draft_kv_policy": args.policy,
        "draft_kv_budget": args.budget,
        **({"profile": str(args.profile)} if args.profile else {}),
    }
    settings = {
        "model": model,
        "dtype": args.dtype,
        "block_size": PAGE,
        "max_num_seqs": max(args.batch),
        "max_model_len": max(args.context) + 2 * MAX_TOKENS + 2 * PAGE,
        "max_num_batched_tokens": 4096,
        "enforce_eager": True,
        "disable_log_stats": False,
    }
    plain = LLM(**settings)
    magicdec = LLM(**settings, speculative_config=spec)

    def encode(text: str) -> list[int]:
        return plain.get_tokenizer().encode(text, add_special_tokens=False)

    longest = excerpts(encode, max(args.batch), max(args.context), args.documents)
    cells, all_turns = [], []
    for context in sorted(args.context):
        for batch in sorted(args.batch, reverse=True):
            prompts = [prompt[:context] for prompt in longest[:batch]]
            cell, speeds = measure_cell(plain, magicdec, prompts, args.seconds, args.turns, args.pairs)
            console.print(f"batch {batch}, context {context}: {cell.of_best:.3f} of the best")
            cells.append(cell)
            all_turns.append({"batch": batch, "context": context, **speeds})
    name = Path(args.model).name
    title = f"{name}, {args.dtype}, auto (at most 8 drafts), budget {args.budget} ({args.policy})"
    cells.sort(key=lambda cell: (cell.context, cell.batch))
    console.print(make_table(cells, f"tokens per second: {title}"))
    if args.out:
        result = {
            "benchmark": "auto",
            "date": datetime.now(UTC).date().isoformat(),
            "machine": describe_machine(),
            "engine": {**settings, "model": name},
            "speculative_config": {**spec, "profile": bool(args.profile)},
            "seconds": args.seconds,
            "turns": args.turns,
            "pairs": args.pairs,
            "cells": [asdict(cell) for cell in cells],
            "all_turns": all_turns,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        draw(cells, title, args.out.with_suffix(".png"))
        console.print(f"wrote {args.out} and {args.out.with_suffix('.png')}")


def number_or_auto(text: str) -> float | str:
    return text if text == "auto" else float(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="kv-heavy", help="a folder, a name, or 'kv-heavy'")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[100, 2048, 16000], help="tokens")
    parser.add_argument("--seconds", type=float, default=4, help="of plain decoding in a turn, about")
    parser.add_argument("--policy", default="streamingllm")
    parser.add_argument("--budget", type=number_or_auto, default=512.0, help="of the draft, or 'auto'")
    parser.add_argument("--profile", type=Path, help="a file of 'magicdec profile'")
    parser.add_argument("--turns", type=int, default=2, help="per contender and cell")
    parser.add_argument("--pairs", type=int, default=9, help="of 'auto' and the best, per cell")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--documents", type=Path, help="folder of .txt files for the prompts")
    parser.add_argument("--out", type=Path, help="JSON file for the result; a heat map goes beside it")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
    # The controller must be within reach: both engines' schedulers run in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with model_folder(args.model) as model:
        run(args, model)


if __name__ == "__main__":
    main()
