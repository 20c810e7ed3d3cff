# SPDX-License-Identifier: Apache-2.0
"""Compare the decode speed of plain vLLM and magicdec-self: `make bench-decode`, or see --help.

Both engines run at the same time and take turns on every cell (batch x context), so that other load on the
machine affects both. A cell's prompts are in the prefix cache beforehand, and the clock runs while all
requests of the batch decode. Results are medians over the turns.

- plain step: one engine step of the plain engine, including scheduler and sampling.
- round: one engine step of magicdec-self: verification of the last drafts, then gamma draft steps.
- draft step: the time inside the drafter divided by gamma; verification is the rest of the round.
- selection: the policy's time as a share of the round; for a policy that selects when a prompt ends, as a
  share of the prefill (of the cell that filled the prefix cache).
- overhead: the drafter's time outside the model's forward, the sampler and the selection, as a share of
  the round.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from common.clock import seconds
from common.decoding import Decoding, decode, medians
from common.documents import describe_documents, prompts_of_cells
from common.engines import PAGE, Turn, engine, engine_settings, set_environment, take_turns
from common.options import add_cells, add_documents, add_model, add_out, make_parser
from common.record import engine_record, write
from common.tables import console, make_table
from kv_heavy import TINY_LLAMA, model_folder
from rich.table import Table

from vllm_magicdec.planner.profile import fill_prefix_cache


@dataclass(frozen=True)
class Drafting(Decoding):
    """A turn with the times of drafting."""

    draft_step_ms: float = 0.0
    drafter_ms: float = 0.0
    selection_ms: float = 0.0  # per round
    overhead_ms: float = 0.0  # of the drafter, per round


@dataclass(frozen=True)
class Row:
    """One cell of the table; medians over the turns."""

    batch: int
    context: int  # tokens of prompt
    plain_tokens_per_s: float
    magicdec_tokens_per_s: float
    speedup: float  # median of the turns' ratios
    acceptance_length: float
    plain_step_ms: float
    round_ms: float
    draft_step_ms: float
    verification_ms: float
    selection_share: float  # of a round
    overhead_share: float  # of a round
    prefill_s: float  # of magicdec, without tokens in the prefix cache
    prefill_selection_share: float  # of the prefill

    @property
    def round_steps(self) -> float:
        """Cost of a round in plain steps; speculation pays if a round yields more tokens."""
        return self.round_ms / self.plain_step_ms


# ---- inside the worker


def install_timers(worker: Any) -> None:
    """Time the drafter and, inside it, the target's forward, the sampler and the policy."""
    import time

    import torch

    drafter = worker.model_runner.drafter
    times: dict[str, list[float]] = {"propose": [], "forward": [], "sample": [], "select": []}

    def timed(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            started = time.perf_counter()
            result = function(*args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - started)
            return result

        return call

    class TimedModel:
        """Times the drafter's calls of the target, not the runner's."""

        __call__ = staticmethod(timed("forward", drafter.model))

        def __getattr__(
            self, name, model=drafter.model
        ):  # without types: a class body is sent without them
            return getattr(model, name)

    selector = getattr(drafter._drafter._views[0], "_selector", None)
    if selector is not None:
        selector.update = timed("select", selector.update)
    drafter.propose = timed("propose", drafter.propose)
    drafter._sample_draft_tokens = timed("sample", drafter._sample_draft_tokens)
    drafter.model = TimedModel()
    drafter.magicdec_times = times


def take_times(worker: Any) -> dict[str, list[float]]:
    """Return the times in seconds since the last call."""
    times = worker.model_runner.drafter.magicdec_times
    taken = {name: list(values) for name, values in times.items()}
    for values in times.values():
        values.clear()
    return taken


# ---- outside of it


def decode_and_time_drafts(llm: Any, prompts: list[list[int]], num_tokens: int, gamma: int) -> Drafting:
    """Decode with `gamma` drafts per round, and split the drafter's time."""
    decoding = decode(llm, prompts, num_tokens, before_clock=lambda: llm.collective_rpc(take_times))
    times = llm.collective_rpc(take_times)[0]
    rounds = len(times["propose"])
    per_round = {name: 1000 * sum(values) / rounds for name, values in times.items()}
    drafter_ms = 1000 * statistics.median(times["propose"])
    inside_ms = sum(per_round[name] for name in ("forward", "sample", "select"))
    return Drafting(
        *astuple(decoding),
        draft_step_ms=(drafter_ms - per_round["select"]) / gamma,
        drafter_ms=drafter_ms,
        selection_ms=per_round["select"],
        overhead_ms=per_round["propose"] - inside_ms,
    )


def measure_cell(
    plain: Any, magicdec: Any, prompts: list[list[int]], args: argparse.Namespace
) -> tuple[Row, list[dict[str, Any]]]:
    """Measure both engines in turns on one cell; return the row and the turns."""
    turn = Turn()
    fill_prefix_cache(turn.of(plain), prompts)
    turn.of(magicdec).collective_rpc(take_times)
    prefill_s = seconds(lambda: fill_prefix_cache(magicdec, prompts))
    selecting_s = sum(magicdec.collective_rpc(take_times)[0]["select"])
    contenders = {
        "plain": lambda: Drafting(*astuple(decode(turn.of(plain), prompts, args.tokens))),
        "magicdec": lambda: decode_and_time_drafts(turn.of(magicdec), prompts, args.tokens, args.gamma),
    }
    turns = take_turns(contenders, args.turns)
    pairs = list(zip(turns["plain"], turns["magicdec"], strict=True))
    before, after = medians(turns["plain"]), medians(turns["magicdec"])
    row = Row(
        batch=len(prompts),
        context=len(prompts[0]),
        plain_tokens_per_s=before.tokens_per_s,
        magicdec_tokens_per_s=after.tokens_per_s,
        speedup=statistics.median(m.tokens_per_s / p.tokens_per_s for p, m in pairs),
        acceptance_length=after.acceptance_length,
        plain_step_ms=before.step_ms,
        round_ms=after.step_ms,
        draft_step_ms=after.draft_step_ms,
        verification_ms=statistics.median(m.step_ms - m.drafter_ms for m in turns["magicdec"]),
        selection_share=statistics.median(m.selection_ms / m.step_ms for m in turns["magicdec"]),
        overhead_share=statistics.median(m.overhead_ms / m.step_ms for m in turns["magicdec"]),
        prefill_s=prefill_s,
        prefill_selection_share=selecting_s / prefill_s,
    )
    return row, [{"plain": asdict(p), "magicdec": asdict(m)} for p, m in pairs]


def table_of(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the cells of one record, or of several policies or models."""
    columns = (
        *("batch", "context", "plain tok/s", "magicdec tok/s", "speedup", "acceptance length"),
        *("plain step ms", "draft step ms", "verification ms", "round", "selection", "overhead"),
    )
    engine, spec = records[0]["engine"], records[0]["speculative_config"]
    title = f"{engine['model']}, {engine['dtype']}, gamma {spec['num_speculative_tokens']}"
    models = {record["engine"]["model"] for record in records}
    names = ["model", "policy"] if len(models) > 1 else ["policy"]
    table = make_table(f"{title}, budget {spec['draft_kv_budget']:g}", columns, names)
    for record in records:
        own_names = (record["engine"]["model"], name_of_policy(record["speculative_config"]))
        rows = sorted((Row(**row) for row in record["rows"]), key=lambda row: (row.context, row.batch))
        for row in rows:
            table.add_row(
                *own_names[-len(names) :],
                *(str(row.batch), f"{row.context:,}"),
                *(f"{row.plain_tokens_per_s:.0f}", f"{row.magicdec_tokens_per_s:.0f}"),
                *(f"{row.speedup:.2f}", f"{row.acceptance_length:.2f}"),
                *(f"{row.plain_step_ms:.1f}", f"{row.draft_step_ms:.1f}", f"{row.verification_ms:.1f}"),
                f"{row.round_steps:.2f}",
                *(f"{100 * row.selection_share:.1f} %", f"{100 * row.overhead_share:.1f} %"),
            )
    return table


def name_of_policy(speculative_config: Mapping[str, Any]) -> str:
    """Return the policy's name, with the granularity if it is not the default."""
    granularity = speculative_config["draft_kv_granularity"]
    return "-".join(filter(None, (speculative_config["draft_kv_policy"], granularity)))


def run(args: argparse.Namespace, model: str) -> None:
    spec = {
        "method": "magicdec-self",
        "num_speculative_tokens": args.gamma,
        "draft_kv_policy": args.policy,
        "draft_kv_budget": args.budget,
        "draft_kv_granularity": args.granularity,
        "native_attention": not args.vllm_attention,
    }
    model_len = max(args.context) + args.tokens + 2 * PAGE
    settings = engine_settings(
        model, args.dtype, batch=max(args.batch), model_len=model_len, enforce_eager=not args.compile
    )
    record = engine_record(
        "decode",
        args.model,
        settings,
        speculative_config=spec,
        tokens=args.tokens,
        turns=args.turns,
        documents=describe_documents(args.documents),
    )
    rows, turns = [], []
    with engine(settings) as plain, engine(settings, spec) as magicdec:
        magicdec.collective_rpc(install_timers)
        for prompts in prompts_of_cells(plain.get_tokenizer(), args.batch, args.context, args.documents):
            row, own_turns = measure_cell(plain, magicdec, prompts, args)
            console.print(f"batch {row.batch}, context {row.context}: {row.speedup:.2f} x")
            rows.append(row)
            turns += own_turns
    record |= {"rows": [asdict(row) for row in rows], "all_turns": turns}
    console.print(table_of([record]))
    write(record, args.out)


def main() -> None:
    parser = make_parser(__doc__)
    add_model(parser, default=str(TINY_LLAMA))
    add_cells(parser, batch=[1, 4, 8], context=[1024, 4096, 8000])
    parser.add_argument("--tokens", type=int, default=96, help="generated per request and turn")
    parser.add_argument("--gamma", type=int, default=4, help="drafted tokens per round")
    parser.add_argument("--policy", default="streamingllm")
    parser.add_argument("--granularity", choices=("page", "token"), help="default: the policy's own")
    parser.add_argument("--budget", type=float, default=512)
    parser.add_argument("--turns", type=int, default=3, help="per engine and cell")
    parser.add_argument("--compile", action="store_true", help="torch.compile instead of eager, both sides")
    parser.add_argument("--vllm-attention", action="store_true", help="on a CPU: not the plugin's kernel")
    add_documents(parser)
    add_out(parser)
    args = parser.parse_args()
    # Timers are functions that are sent to the worker.
    set_environment(kv_cache_gib=5, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    with model_folder(args.model) as model:
        run(args, model)


if __name__ == "__main__":
    main()
