# SPDX-License-Identifier: Apache-2.0
"""Decode speed, plain against magicdec-self, side by side: `make bench`, or see --help.

Both engines are alive at the same time and take turns on every cell (batch x context), so that whatever
else the machine does hits both. A cell's prompts are in the prefix cache before its clock starts, and the
clock runs while all requests of the batch decode. Medians over the turns; one JSON file and one table.

- plain step: one engine step of the plain engine, scheduler and sampling included.
- round: one engine step of magicdec-self: verification of the last drafts, then gamma draft steps.
- draft step: the time inside the drafter, divided by gamma; verification is the rest of the round.
- selection: the time in which the policy chooses, as a share of the round; for a policy that chooses when
  a prompt ends, as a share of the prefill (of the cell that filled the prefix cache).
- overhead: the drafter's time outside the model's forward, the sampler and the selection, as a share of
  the round.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from documents import excerpts
from kv_heavy import TINY_LLAMA, model_folder
from machine import describe_machine
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PAGE = 32  # tokens
IDLE_SPIN_S = 1.5  # vLLM's idle workers poll for a second before they leave their core to others
console = Console(highlight=False, width=150)


@dataclass(frozen=True)
class Decoding:
    """One turn of one engine on one cell."""

    tokens_per_s: float
    step_ms: float  # median engine step
    acceptance_length: float = 1.0  # tokens per step and request
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
    draft_step_ms: float
    verification_ms: float
    selection_share: float  # of a round
    overhead_share: float  # of a round
    prefill_s: float  # of magicdec, with what the prefix cache held already
    prefill_selection_share: float  # of that


# ---- inside the worker


def install_timers(worker: Any) -> None:
    """Time the drafter, and inside it the target's forward, the sampler and the policy."""
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
        """The target as the drafter calls it; the runner's own calls are not timed."""

        __call__ = staticmethod(timed("forward", drafter.model))

        def __getattr__(
            self, name, model=drafter.model
        ):  # without types: a class body is sent without them
            return getattr(model, name)

    core = drafter._drafter
    if core._selector is not None:
        core._selector.update = timed("select", core._selector.update)
    elif hasattr(core._views, "_scores"):
        core._views._scores.update = timed("select", core._views._scores.update)
        core._views._choose = timed("select", core._views._choose)
    drafter.propose = timed("propose", drafter.propose)
    drafter._sample_draft_tokens = timed("sample", drafter._sample_draft_tokens)
    drafter.model = TimedModel()
    drafter.magicdec_times = times


def take_times(worker: Any) -> dict[str, list[float]]:
    """The times in seconds since the last call."""
    times = worker.model_runner.drafter.magicdec_times
    taken = {name: list(values) for name, values in times.items()}
    for values in times.values():
        values.clear()
    return taken


# ---- outside of it


def decode(llm: Any, prompts: list[list[int]], num_tokens: int, gamma: int) -> Decoding:
    """Decode all prompts as one batch; the clock runs while every request is decoding.

    Args:
        llm: the engine.
        prompts: token ids, in the prefix cache already.
        num_tokens: to generate per request.
        gamma: drafted tokens per round, 0 for plain decoding.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{index}-{time.monotonic_ns()}", {"prompt_token_ids": prompt}, params)
    lengths: dict[str, int] = {}
    clock: list[float] = []  # after each step in which all requests were decoding
    generated: list[int] = []
    finished = False
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            lengths[output.request_id] = len(output.outputs[0].token_ids)
        finished = finished or any(output.finished for output in outputs)
        if len(lengths) == len(prompts) and outputs and not finished:
            if not clock and gamma:
                llm.collective_rpc(take_times)
                now = time.perf_counter()
            clock.append(now)
            generated.append(sum(lengths.values()))
    if len(clock) < 4:
        raise SystemExit(f"only {len(clock)} steps were measured; raise --tokens")
    steps = [1000 * (after - before) for before, after in itertools.pairwise(clock)]
    num_generated = generated[-1] - generated[0]
    result = Decoding(
        tokens_per_s=num_generated / (clock[-1] - clock[0]),
        step_ms=statistics.median(steps),
        acceptance_length=num_generated / len(steps) / len(prompts),
    )
    if not gamma:
        return result
    times = llm.collective_rpc(take_times)[0]
    rounds = len(times["propose"])
    per_round = {name: 1000 * sum(values) / rounds for name, values in times.items()}
    drafter_ms = 1000 * statistics.median(times["propose"])
    return Decoding(
        **{
            **asdict(result),
            "drafter_ms": drafter_ms,
            "draft_step_ms": (drafter_ms - per_round["select"]) / gamma,
            "selection_ms": per_round["select"],
            "overhead_ms": per_round["propose"]
            - sum(per_round[n] for n in ("forward", "sample", "select")),
        }
    )


def measure_cell(
    engines: tuple[Any, Any], prompts: list[list[int]], num_tokens: int, gamma: int, turns: int
) -> tuple[Row, list[tuple[Decoding, Decoding]]]:
    """Both engines, alternately, on one cell."""
    from vllm import SamplingParams

    plain, magicdec = engines
    magicdec.collective_rpc(take_times)
    for llm in engines:  # fill the prefix cache, chunk by chunk
        time.sleep(IDLE_SPIN_S)
        ids = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = time.perf_counter()
        llm.generate(ids, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        prefill_s = time.perf_counter() - started
    selecting_s = sum(magicdec.collective_rpc(take_times)[0]["select"])
    pairs = []
    for turn in range(turns):
        order = [(plain, 0), (magicdec, gamma)]
        results = {}
        for llm, num_drafted in reversed(order) if turn % 2 else order:
            time.sleep(IDLE_SPIN_S)
            results[num_drafted] = decode(llm, prompts, num_tokens, num_drafted)
        pairs.append((results[0], results[gamma]))

    def median(side: int, name: str) -> float:
        return statistics.median(getattr(pair[side], name) for pair in pairs)

    row = Row(
        batch=len(prompts),
        context=len(prompts[0]),
        plain_tokens_per_s=median(0, "tokens_per_s"),
        magicdec_tokens_per_s=median(1, "tokens_per_s"),
        speedup=statistics.median(m.tokens_per_s / p.tokens_per_s for p, m in pairs),
        acceptance_length=median(1, "acceptance_length"),
        plain_step_ms=median(0, "step_ms"),
        draft_step_ms=median(1, "draft_step_ms"),
        verification_ms=statistics.median(m.step_ms - m.drafter_ms for _, m in pairs),
        selection_share=statistics.median(m.selection_ms / m.step_ms for _, m in pairs),
        overhead_share=statistics.median(m.overhead_ms / m.step_ms for _, m in pairs),
        prefill_s=prefill_s,
        prefill_selection_share=selecting_s / prefill_s,
    )
    return row, pairs


def make_table(rows: list[Row], title: str) -> Table:
    table = Table(title=title)
    for column in (
        *("batch", "context", "plain tok/s", "magicdec tok/s", "speedup", "acceptance length"),
        *("plain step ms", "draft step ms", "verification ms", "selection", "overhead"),
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            *(str(row.batch), str(row.context)),
            *(f"{row.plain_tokens_per_s:.1f}", f"{row.magicdec_tokens_per_s:.1f}", f"{row.speedup:.2f}"),
            *(f"{row.acceptance_length:.2f}", f"{row.plain_step_ms:.1f}", f"{row.draft_step_ms:.1f}"),
            *(f"{row.verification_ms:.1f}", f"{100 * row.selection_share:.1f} %"),
            f"{100 * row.overhead_share:.1f} %",
        )
    return table


def run(args: argparse.Namespace, model: str) -> None:
    from vllm import LLM

    spec = {
        "method": "magicdec-self",
        "num_speculative_tokens": args.gamma,
        "draft_kv_policy": args.policy,
        "draft_kv_budget": args.budget,
        "draft_kv_granularity": args.granularity,
    }
    settings = {
        "model": model,
        "dtype": args.dtype,
        "block_size": PAGE,
        "max_num_seqs": max(args.batch),
        "max_model_len": max(args.context) + args.tokens + 2 * PAGE,
        "max_num_batched_tokens": 4096,
        "enforce_eager": not args.compile,
        "disable_log_stats": False,
    }
    plain = LLM(**settings)
    magicdec = LLM(**settings, speculative_config=spec)
    magicdec.collective_rpc(install_timers)

    def encode(text: str) -> list[int]:
        return plain.get_tokenizer().encode(text, add_special_tokens=False)

    longest = excerpts(encode, max(args.batch), max(args.context), args.documents)
    rows, turns = [], []
    for context in sorted(args.context):
        # The largest batch first fills the prefix cache for the others.
        for batch in sorted(args.batch, reverse=True):
            prompts = [prompt[:context] for prompt in longest[:batch]]
            row, pairs = measure_cell((plain, magicdec), prompts, args.tokens, args.gamma, args.turns)
            console.print(f"batch {batch}, context {context}: {row.speedup:.2f} x", highlight=False)
            rows.append(row)
            turns += [{"plain": asdict(p), "magicdec": asdict(m)} for p, m in pairs]
    name = Path(args.model).name
    title = f"{name}, {args.dtype}, gamma {args.gamma}, budget {args.budget:g} ({args.policy})"
    console.print(make_table(sorted(rows, key=lambda r: (r.context, r.batch)), title))
    result = {
        "benchmark": "decode",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith("VLLM_")},
        "engine": {**settings, "model": name},
        "speculative_config": spec,
        "tokens": args.tokens,
        "turns": args.turns,
        "documents": str(args.documents.name) if args.documents else "Python's standard library",
        "rows": [asdict(row) for row in rows],
        "all_turns": turns,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"wrote {args.out}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(TINY_LLAMA), help="a folder, a name, or 'kv-heavy'")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 4096, 8000], help="tokens")
    parser.add_argument("--tokens", type=int, default=96, help="generated per request and turn")
    parser.add_argument("--gamma", type=int, default=4, help="drafted tokens per round")
    parser.add_argument("--policy", default="streamingllm")
    parser.add_argument("--granularity", default="page", choices=("page", "token"))
    parser.add_argument("--budget", type=float, default=512)
    parser.add_argument("--turns", type=int, default=3, help="per engine and cell")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="torch.compile instead of eager, both sides")
    parser.add_argument("--documents", type=Path, help="folder of .txt files for the prompts")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "5")
    # Timers are functions that are sent to the worker.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    with model_folder(args.model) as model:
        run(args, model)


if __name__ == "__main__":
    main()
