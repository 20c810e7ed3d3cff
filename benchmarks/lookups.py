# SPDX-License-Identifier: Apache-2.0
"""Gain of lookups: engines with and without them, cell by cell. See --help.

All engines run at the same time and take turns on every cell (documents x batch x context); in a cell's
first turn, which does not count, `auto` learns its times. Results are medians over the other turns, and
ratios of turns of the same pass over the contenders.

- plain: vLLM without speculation.
- fixed: `num_speculative_tokens` drafts with lookups, without drafts that are unlikely to be accepted.
- fixed-off (only if named in --contenders): the same number without lookups, one draft pass each.
- auto-off, auto: `num_speculative_tokens: auto` without lookups and with them.
- datastore: auto with lookups also in a datastore (--datastore, built by `magicdec index`).
- A turn is a job: the requests arrive together, and the clock runs until the last request has all of its
  tokens. All contenders generate the same number of tokens, and the same text in greedy decoding.
- Tokens per round are per request and step. "passes": draft passes per step with lookups; "unread": share
  of the verified drafts that were looked up and not checked by the draft.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.decoding import Decoding, decode_job, medians
from common.documents import describe_documents, prompts_of_cells
from common.engines import PAGE, Turn, engine, engine_settings, set_environment, take_turns
from common.options import add_cells, add_model, add_out, make_parser, settings_of
from common.record import engine_record, write
from common.tables import console, make_table
from kv_heavy import KV_HEAVY, model_folder
from rich.table import Table

from vllm_magicdec.planner.profile import fill_prefix_cache

PLAIN, BEFORE, AUTO, DATASTORE = "plain", "auto-off", "auto", "datastore"
FIXED_BEFORE, FIXED = "fixed-off", "fixed"
# vLLM shows only the latest engine's metrics, so the plugin's counters are read from the workers.
_COUNTED_BY_WORKERS = {
    "rounds": "lookup_rounds",
    "passes": "lookup_passes",
    "unread": "lookup_unchecked_tokens",
}
_METRICS = {
    "verified": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


@dataclass(frozen=True)
class Counted(Decoding):
    """A turn with its counters."""

    rounds: int  # with lookups
    passes: int
    unread: int  # looked-up drafts that the draft did not check
    verified: int
    accepted: int


@dataclass(frozen=True)
class Row:
    """One contender in one cell; medians over the turns."""

    documents: str
    batch: int
    context: int
    contender: str
    tokens_per_s: float
    over_plain: float | None  # median of the turns' ratios; None without plain decoding
    over_before: float | None  # the same over auto without lookups
    tokens_per_round: float
    passes_per_round: float | None  # None: no round was read with lookups
    # Of the drafts that were verified. None: vLLM counts those of the engine that was started last.
    unread_share: float | None
    verified_per_accepted: float | None


def speculations(
    drafts: int, budget: float, policy: str, datastore: Path | None
) -> dict[str, dict[str, Any] | None]:
    """Speculative configurations by contender."""
    magicdec = {"method": "magicdec-self", "draft_kv_budget": budget, "draft_kv_policy": policy}
    auto = {**magicdec, "num_speculative_tokens": "auto"}
    return {
        PLAIN: None,
        FIXED_BEFORE: {**magicdec, "num_speculative_tokens": drafts, "draft_lookup": "off"},
        FIXED: {**magicdec, "num_speculative_tokens": drafts, "draft_lookup": "on"},
        BEFORE: {**auto, "draft_lookup": "off"},
        AUTO: {**auto, "draft_lookup": "on"},
        DATASTORE: {**auto, "draft_lookup": "on", "draft_lookup_sources": ["context", str(datastore)]},
    }


def take_totals(worker: Any) -> dict[str, int]:
    """Return a worker's counters of lookups, or nothing without lookups."""
    drafter = getattr(worker.model_runner, "drafter", None)
    loop = drafter and drafter._drafter._loop
    counters = getattr(loop, "_counters", None)
    return dict(counters.totals) if counters else {}


def decode_and_count(llm: Any, prompts: list[list[int]], num_tokens: int, temperature: float) -> Counted:
    """Run `decode_job` with counters."""

    def count() -> dict[str, int]:
        (totals,) = llm.collective_rpc(take_totals)
        values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        return {
            **{name: int(totals.get(counter, 0)) for name, counter in _COUNTED_BY_WORKERS.items()},
            **{name: int(values.get(metric, 0)) for name, metric in _METRICS.items()},
        }

    before = count()
    decoding = decode_job(llm, prompts, num_tokens, temperature=temperature)
    after = count()
    return Counted(**asdict(decoding), **{name: after[name] - before[name] for name in after})


def rows_of(documents: str, prompts: list[list[int]], turns: Mapping[str, list[Counted]]) -> list[Row]:
    """Return the rows of one cell."""

    def ratio(name: str, other: str) -> float | None:
        pairs = zip(turns[name], turns.get(other, ()), strict=False)
        ratios = [one.tokens_per_s / two.tokens_per_s for one, two in pairs]
        return statistics.median(ratios) if ratios else None

    rows = []
    for name, own in turns.items():
        middle = medians(own)
        rounds, passes, unread, verified, accepted = (
            sum(getattr(turn, counter) for turn in own) for counter in (*_COUNTED_BY_WORKERS, *_METRICS)
        )
        rows.append(
            Row(
                documents=documents,
                batch=len(prompts),
                context=len(prompts[0]),
                contender=name,
                tokens_per_s=middle.tokens_per_s,
                over_plain=ratio(name, PLAIN),
                over_before=ratio(name, BEFORE),
                tokens_per_round=middle.acceptance_length,
                passes_per_round=passes / rounds if rounds else None,
                unread_share=unread / verified if verified else None,
                verified_per_accepted=verified / accepted if accepted else None,
            )
        )
    return rows


def table_of(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row per cell and contender, of one record or of several models."""
    columns = ("tok/s", "over plain", "over auto-off", "tokens per round", "passes", "unread", "verified")
    first = records[0]["engine"]
    names = ["model", "documents", "batch", "context", "contender"]
    table = make_table(f"lookups, {first['dtype']}", columns, names)
    for record in records:
        for row in (Row(**row) for row in record["rows"]):
            table.add_row(
                *(record["engine"]["model"], row.documents, str(row.batch), f"{row.context:,}"),
                *(row.contender, f"{row.tokens_per_s:.0f}", _shown(row.over_plain)),
                "-" if row.contender == BEFORE else _shown(row.over_before),
                *(f"{row.tokens_per_round:.2f}", _shown(row.passes_per_round, ".1f")),
                *(
                    "-" if row.unread_share is None else f"{100 * row.unread_share:.0f} %",
                    _shown(row.verified_per_accepted),
                ),
            )
    return table


def _shown(value: float | None, how: str = ".2f") -> str:
    return "-" if value is None else format(value, how)


def run(args: argparse.Namespace, model: str) -> None:
    configs = speculations(args.drafts, args.budget, args.policy, args.datastore)
    model_len = max(args.context) + args.tokens + 2 * PAGE
    settings = engine_settings(model, args.dtype, batch=max(args.batch), model_len=model_len)
    record = engine_record(
        "lookups",
        args.model,
        settings,
        settings={**settings_of(args, "model", "documents", "datastore"), "clock": "job"},
        speculative_configs={name: configs[name] for name in args.contenders},
    )
    rows, all_turns = [], []
    with ExitStack() as stack:
        engines = {name: stack.enter_context(engine(settings, configs[name])) for name in args.contenders}
        tokenizer, turn = next(iter(engines.values())).get_tokenizer(), Turn()
        for folder in [None, *args.documents]:
            documents = describe_documents(folder)
            for prompts in prompts_of_cells(tokenizer, args.batch, args.context, folder):
                for llm in engines.values():
                    fill_prefix_cache(turn.of(llm), prompts)

                def take(llm: Any, prompts: list[list[int]] = prompts) -> Counted:
                    return decode_and_count(turn.of(llm), prompts, args.tokens, args.temperature)

                contenders = {name: lambda llm=llm: take(llm) for name, llm in engines.items()}
                take_turns(contenders, 1)
                turns = take_turns(contenders, args.turns)
                rows += rows_of(documents, prompts, turns)
                all_turns += [
                    {name: asdict(own) for name, own in zip(turns, each, strict=True)}
                    for each in zip(*turns.values(), strict=True)
                ]
                for row in rows[-len(turns) :]:
                    cell = f"{documents} {row.batch} x {row.context} {row.contender}"
                    over = f"{_shown(row.over_plain)} over plain, {_shown(row.over_before)} over {BEFORE}"
                    console.print(f"{cell}: {over}")
    record |= {"rows": [asdict(row) for row in rows], "all_turns": all_turns}
    console.print(table_of([record]))
    write(record, args.out)


def main() -> None:
    parser = make_parser(__doc__)
    add_model(parser, default=KV_HEAVY)
    add_cells(parser, batch=[1, 4, 8], context=[16_000])
    parser.add_argument("--tokens", type=int, default=128, help="per request and turn")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--datastore", type=Path, help=f"for the contender {DATASTORE!r}, which it adds")
    parser.add_argument("--drafts", type=int, default=8, help="of the contenders with a fixed number")
    parser.add_argument("--policy", default="streamingllm")
    parser.add_argument("--budget", type=float, default=1024)
    parser.add_argument("--turns", type=int, default=3, help="per engine and cell, after one to warm up")
    known = [PLAIN, FIXED_BEFORE, FIXED, BEFORE, AUTO]
    parser.add_argument("--contenders", nargs="+", choices=known, default=[PLAIN, FIXED, BEFORE, AUTO])
    parser.add_argument(
        "--documents",
        type=Path,
        nargs="*",
        default=[],
        help="folders of .txt files, beside the standard library's sources",
    )
    parser.add_argument("--kv-cache-gib", type=int, default=3, help="of each engine")
    add_out(parser)
    args = parser.parse_args()
    args.contenders += [DATASTORE] if args.datastore else []
    # A function is sent to the workers.
    set_environment(kv_cache_gib=args.kv_cache_gib, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    with model_folder(args.model) as model:
        run(args, model)


if __name__ == "__main__":
    main()
