# SPDX-License-Identifier: Apache-2.0
"""What speculation costs where it is not used: `auto` that never drafts, against plain vLLM.

Two engines are alive at the same time and take turns. The controller of the second does all of its work,
but what it chooses is replaced by no drafts. So the ratio of their speeds shows what the plugin, and what
vLLM itself once speculation is configured, add to a step that neither drafts nor verifies. Each turn
decodes the same texts; the ratios are of neighbouring turns, and every other pair is turned round.
"""

import argparse
import functools
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from auto import controller_of, median_interval
from common.decoding import decode
from common.documents import prompts_of_cells
from common.engines import Turn, engine, engine_settings, set_environment, take_turns
from common.machine import vllm_environment
from common.options import add_documents, add_model, add_out, make_parser
from common.record import make_record, write
from common.tables import console, make_table
from kv_heavy import KV_HEAVY, model_folder
from rich.table import Table

from vllm_magicdec.adaptive.controller import PLAIN, Choice, Controller
from vllm_magicdec.planner.profile import fill_prefix_cache


@contextmanager
def made_plain(controller: Controller) -> Iterator[None]:
    """A controller whose choices are made, and replaced."""
    choose = controller.choose

    def choose_and_forget(*args: Any, **kwargs: Any) -> Choice:
        choose(*args, **kwargs)
        return PLAIN

    controller.choose = choose_and_forget
    try:
        yield
    finally:
        del controller.choose


def measure_cell(
    plain: Any, magicdec: Any, prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    """Speeds of both engines, turn by turn, and the share of plain decoding's."""
    for llm in (plain, magicdec):
        fill_prefix_cache(llm, prompts)
    turn = Turn()
    decode(turn.of(magicdec), prompts, args.tokens)  # the controller meets the cell

    def run_turn(llm: Any) -> float:
        return decode(turn.of(llm), prompts, args.tokens).tokens_per_s

    contenders = {"plain": plain, "auto": magicdec}
    with made_plain(controller_of(magicdec)):
        turns = {name: functools.partial(run_turn, llm) for name, llm in contenders.items()}
        speeds = take_turns(turns, args.pairs)
    shares = [own / other for own, other in zip(speeds["auto"], speeds["plain"], strict=True)]
    return {
        "batch": len(prompts),
        "context": len(prompts[0]),
        "of_plain": statistics.median(shares),
        "of_plain_interval": median_interval(shares),
        "speeds": speeds,
    }


def table_of(record: Mapping[str, Any]) -> Table:
    """A record's cells."""
    columns = ("batch", "context", "plain tok/s", "auto without drafts tok/s", "of plain", "90 % interval")
    table = make_table(f"{record['engine']['model']}: decoding that is never speculative", columns)
    for cell in record["cells"]:
        plain, auto = (statistics.median(cell["speeds"][name]) for name in ("plain", "auto"))
        table.add_row(
            *(str(cell["batch"]), f"{cell['context']:,}", f"{plain:.0f}", f"{auto:.0f}"),
            *(f"{cell['of_plain']:.3f}", "{:.3f} to {:.3f}".format(*cell["of_plain_interval"])),
        )
    return table


def run(args: argparse.Namespace, model: str) -> None:
    spec = {
        "method": "magicdec-self",
        "num_speculative_tokens": "auto",
        "draft_kv_budget": args.budget,
        "draft_lookup": "off",
    }
    settings = engine_settings(
        model,
        args.dtype,
        batch=max(args.batch),
        model_len=max(args.context) + 2 * args.tokens,
        distributed_executor_backend="mp",
    )
    record = make_record(
        "plain_steps",
        environment=vllm_environment(),
        engine={**settings, "model": Path(args.model).name},
        speculative_config=spec,
        tokens=args.tokens,
        pairs=args.pairs,
    )
    with engine(settings) as plain, engine(settings, spec) as magicdec:
        cells = prompts_of_cells(plain.get_tokenizer(), args.batch, args.context, args.documents)
        record["cells"] = [measure_cell(plain, magicdec, prompts, args) for prompts in cells]
    console.print(table_of(record))
    write(record, args.out)


def main() -> None:
    parser = make_parser(__doc__)
    add_model(parser, default=KV_HEAVY)
    parser.add_argument("--batch", type=int, nargs="+", default=[4])
    parser.add_argument("--context", type=int, nargs="+", default=[100], help="tokens")
    parser.add_argument("--tokens", type=int, default=512, help="generated per request and turn")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=21, help="of turns, per cell")
    add_documents(parser)
    add_out(parser)
    args = parser.parse_args()
    # The controller must be within reach: both engines' schedulers run in this process.
    set_environment(kv_cache_gib=2, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    with model_folder(args.model) as model:
        run(args, model)


if __name__ == "__main__":
    main()
