# SPDX-License-Identifier: Apache-2.0
"""Cost and gain of leaving out unlikely drafts, and calibration of the predicted acceptance. See --help.

One engine drafts a fixed number of tokens with lookups. Its workers leave out drafts whose predicted chance
of acceptance is below a threshold; several thresholds take turns, and 0 verifies all drafts. The predicted
chances are compared with the acceptance (a plot beside the JSON).
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.decoding import decode, medians
from common.documents import describe_documents, excerpts
from common.engines import PAGE, engine, engine_settings, set_environment, take_turns
from common.options import add_model, add_out, make_parser, settings_of
from common.plots import plt, save
from common.record import engine_record, write
from common.tables import console, make_table
from kv_heavy import TINY_LLAMA, model_folder
from rich.table import Table

from vllm_magicdec.planner.profile import fill_prefix_cache

_BINS = 10  # of predicted chances


@dataclass(frozen=True)
class Turn:
    """All requests of one type of documents, with one threshold."""

    tokens_per_s: float
    tokens_per_round: float
    verified_per_accepted: float


@dataclass(frozen=True)
class Row:
    """Medians over the turns."""

    documents: str
    context: int
    least_chance: float
    tokens_per_s: float
    tokens_per_round: float
    verified_per_accepted: float
    speed_of_uncut: float  # median of the turns' ratios to all drafts verified
    tokens_of_uncut: float  # the same of tokens per round


# ---- inside the worker


def watch_chances(worker: Any) -> None:
    """Record each draft's predicted chance, whether it was accepted, and the lookup's prediction."""
    staged = worker.model_runner.drafter._drafter._loop
    confidence, staged.benchmark_seen = staged._confidence, []
    observe = confidence.observe

    def observe_and_keep(evidence: Any, stood: bool) -> None:
        seen = (confidence.chance(evidence), bool(stood), evidence.predicted.name)
        staged.benchmark_seen.append(seen)
        observe(evidence, stood)

    confidence.observe = observe_and_keep


def leave_out(worker: Any, least_chance: float) -> None:
    """Leave out drafts below this chance from now on; a round ends with the last draft above it."""
    from vllm_magicdec.adaptive.draft_plan import DraftPlan

    staged = worker.model_runner.drafter._drafter._loop
    draft = type(staged).draft
    staged.draft = lambda batch, num_steps, prepare: draft(
        staged, batch, DraftPlan(num_steps, least_chance), prepare
    )


def take_seen(worker: Any) -> list[tuple[float, bool, str]]:
    """Return the records since the last call."""
    staged = worker.model_runner.drafter._drafter._loop
    seen, staged.benchmark_seen = staged.benchmark_seen, []
    return seen


# ---- outside of it


def measure(llm: Any, prompts: list[list[int]], args: argparse.Namespace, least_chance: float) -> Turn:
    llm.collective_rpc(leave_out, args=(least_chance,))

    def count() -> list[int]:
        values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        return [int(values[f"vllm:spec_decode_num_{what}_tokens"]) for what in ("draft", "accepted")]

    before = count()
    batches = [prompts[i : i + args.batch] for i in range(0, len(prompts), args.batch)]
    decodings = [decode(llm, batch, args.tokens) for batch in batches]
    verified, accepted = (after - start for after, start in zip(count(), before, strict=True))
    return Turn(
        tokens_per_s=len(decodings) / sum(1 / decoding.tokens_per_s for decoding in decodings),
        tokens_per_round=statistics.mean(decoding.acceptance_length for decoding in decodings),
        verified_per_accepted=verified / max(1, accepted),
    )


def calibration(seen: Sequence[tuple[float, bool]]) -> list[dict[str, float]]:
    """Return predicted chance and accepted share of groups of equal size, the least likely first."""
    ordered = sorted(seen)
    cuts = [len(ordered) * index // _BINS for index in range(_BINS + 1)]
    groups = [ordered[begin:end] for begin, end in itertools.pairwise(cuts) if end > begin]
    return [
        {
            "predicted": statistics.mean(chance for chance, _ in group),
            "seen": statistics.mean(stood for _, stood in group),
            "drafts": len(group),
        }
        for group in groups
    ]


def rows_of(documents: str, context: int, turns: Mapping[float, list[Turn]]) -> list[Row]:
    """Return the rows of one type of documents, by threshold."""
    uncut = turns[0.0]

    def ratio(own: list[Turn], of: Callable[[Turn], float]) -> float:
        return statistics.median(of(one) / of(all_) for one, all_ in zip(own, uncut, strict=True))

    return [
        Row(
            documents=documents,
            context=context,
            least_chance=least_chance,
            **asdict(medians(own)),
            speed_of_uncut=ratio(own, lambda turn: turn.tokens_per_s),
            tokens_of_uncut=ratio(own, lambda turn: turn.tokens_per_round),
        )
        for least_chance, own in turns.items()
    ]


def table_of(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row per type of documents and threshold."""
    columns = ("tok/s", "of uncut", "tokens per round", "of uncut", "verified per accepted")
    (record,) = records
    names = ["documents", "context", "least chance"]
    table = make_table(f"drafts left out, {record['engine']['model']}", columns, names)
    for row in (Row(**row) for row in record["rows"]):
        table.add_row(
            *(row.documents, f"{row.context:,}", f"{row.least_chance:g}"),
            *(f"{row.tokens_per_s:.0f}", f"{100 * row.speed_of_uncut:.0f} %"),
            *(f"{row.tokens_per_round:.2f}", f"{100 * row.tokens_of_uncut:.0f} %"),
            f"{row.verified_per_accepted:.2f}",
        )
    return table


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw predicted chances against accepted shares."""
    figure, axes = plt.subplots(figsize=(5, 5))
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
    for documents, points in record["calibration"].items():
        predicted, seen = ([point[name] for point in points] for name in ("predicted", "seen"))
        axes.plot(predicted, seen, marker="o", label=documents)
    axes.set(xlabel="predicted chance of a draft", ylabel="accepted share", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend()
    figure.tight_layout()
    save(figure, path)


def run(args: argparse.Namespace, model: str) -> None:
    kinds = [(None, args.context[0]), *zip(args.documents, args.context[1:], strict=True)]
    model_len = max(args.context) + args.tokens + 2 * PAGE
    settings = engine_settings(model, args.dtype, batch=args.batch, model_len=model_len)
    spec = {
        "method": "magicdec-self",
        "num_speculative_tokens": args.drafts,
        "draft_kv_budget": args.budget,
        "draft_lookup": "on",
    }
    record = engine_record(
        "confidence",
        args.model,
        settings,
        settings=settings_of(args, "model", "documents"),
        speculative_config=spec,
    )
    rows, points, by_foreseen, all_turns = [], {}, {}, []
    with engine(settings, spec) as llm:
        llm.collective_rpc(watch_chances)
        for folder, context in kinds:
            documents = describe_documents(folder)
            prompts = excerpts(llm.get_tokenizer(), args.requests, context, folder)
            for begin in range(0, args.requests, args.batch):
                fill_prefix_cache(llm, prompts[begin : begin + args.batch])
            measure(llm, prompts, args, 0.0)  # learns the chances
            llm.collective_rpc(take_seen)
            contenders = {chance: partial(measure, llm, prompts, args, chance) for chance in args.chances}
            turns = take_turns(contenders, args.turns)
            rows += rows_of(documents, context, turns)
            seen = llm.collective_rpc(take_seen)[0]
            points[documents] = calibration([one[:2] for one in seen])
            by_foreseen[documents] = {
                name: calibration([one[:2] for one in seen if one[2] == name])
                for name in sorted({name for *_, name in seen})
            }
            all_turns.append({str(chance): [asdict(one) for one in own] for chance, own in turns.items()})
    record |= {"rows": [asdict(row) for row in rows], "calibration": points}
    record |= {"calibration_by_foreseen": by_foreseen, "all_turns": all_turns}
    console.print(table_of([record]))
    write(record, args.out)
    if args.out:
        draw(record, args.out.with_suffix(".png"))


def main() -> None:
    parser = make_parser(__doc__)
    add_model(parser, default=str(TINY_LLAMA))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--requests", type=int, default=16, help="per kind of documents")
    parser.add_argument("--context", type=int, nargs="+", default=[6000], help="tokens, of each kind")
    parser.add_argument("--documents", type=Path, nargs="*", default=[], help="folders, after the stdlib")
    parser.add_argument("--tokens", type=int, default=128, help="generated per request and turn")
    parser.add_argument("--drafts", type=int, default=16)
    parser.add_argument("--budget", type=float, default=512)
    parser.add_argument("--chances", type=float, nargs="+", default=[0.0, 0.1, 0.2, 0.3, 0.4, 0.6])
    parser.add_argument("--turns", type=int, default=3)
    add_out(parser, " and, beside it, the plot")
    args = parser.parse_args()
    if len(args.context) != 1 + len(args.documents):
        parser.error("--context takes one number for the standard library's sources and one per folder")
    if 0.0 not in args.chances:
        parser.error("--chances must name 0, which the others are compared with")
    # Functions are sent to the worker.
    set_environment(kv_cache_gib=3, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    with model_folder(args.model) as model:
        run(args, model)


if __name__ == "__main__":
    main()
