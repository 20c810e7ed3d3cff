# SPDX-License-Identifier: Apache-2.0
"""Compare servers of magicdec-self and of vLLM's other methods: `make bench`, or see --help.

Every method has its own `vllm serve` and gets the same greedy requests from `vllm bench serve`: all cells
of context x requests in flight, each several times, then request rates at the longest context, as
fractions of the highest rate that plain decoding serves. Plain decoding is served first and, as
`plain-again`, last: their difference is the machine's noise. With --in-turns all servers run at once and
take turns from run to run, so that a temporarily slow machine affects all of them. Prompts are real text,
answers have a fixed length.

OUT gets vLLM's JSON in a folder per run; suite.json with the runs of median throughput, machine, versions
and settings; and three plots.
"""

import argparse
import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, redirect_stdout
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from common.documents import excerpts
from common.engines import PAGE, take_turns
from common.machine import vllm_environment
from common.options import add_documents, add_model, make_parser, settings_of
from common.record import make_record, write
from common.tables import console, make_table
from kv_heavy import KV_HEAVY, KV_HEAVY_GROUPED, TINY_LLAMA, model_folder
from rich.table import Table
from suite_plots import (
    AGAIN,
    PER_POSITION,
    PLAIN,
    cells_of,
    draw,
    latency,
    pooled_acceptance,
    speedups,
    title_of,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from serving import Server, default_options, serve

TINY_DRAFT = Path(__file__).resolve().parent / "tiny-draft"
TINY_SPIRE = Path(__file__).resolve().parent / "tiny-spire"
POLICIES = ("streamingllm", "snapkv", "verify-topk")
METHODS = (
    PLAIN,
    "ngram",
    "suffix",
    "draft_model",
    *(f"magicdec-{p}" for p in POLICIES),
    "magicdec-snapkv-token",
    "magicdec-auto",
    "magicdec-draft_model",
    "magicdec-draft_model-auto",
    "magicdec-spire",
    "magicdec-spire-auto",
)
VLLM_METHODS = ("ngram", "suffix", "draft_model")
# vLLM's methods with the plugin's CPU attention kernel; not by default.
NATIVE = "-native"
NATIVE_METHODS = tuple(f"{method}{NATIVE}" for method in (PLAIN, *VLLM_METHODS))
# vLLM's methods with numbers of drafts of their own; not by default.
NUMBERED_METHODS = {
    f"{method}-{number}": {"method": method, "num_speculative_tokens": number}
    for method in VLLM_METHODS
    for number in (1, 2, 4, 8, "auto")
}
# vLLM's draft model over a window of its KV cache; not by default.
WINDOW = "-window"
WINDOW_METHODS = tuple(f"{name}{WINDOW}" for name in NUMBERED_METHODS if name.startswith("draft_model"))
CHOICES = (*METHODS, *NATIVE_METHODS, *NUMBERED_METHODS, *WINDOW_METHODS, AGAIN)
WARM_UP_TOKENS = 8  # per request, generated before the first clock starts
QUICK = {
    "methods": [PLAIN, "magicdec-streamingllm"],
    "context": [1000],
    "concurrency": [1, 4],
    "rate_fractions": [0.5],
    "repeats": 1,
    "requests": 8,
    "tokens": 64,
}


@dataclass(frozen=True)
class Load:
    """The load of one run of `vllm bench serve`: requests in flight, or requests per second."""

    context: int  # tokens of prompt
    concurrency: int | None = None  # requests in flight
    rate: float | None = None  # requests per second, Poisson

    @property
    def name(self) -> str:
        how = f"concurrency-{self.concurrency}" if self.rate is None else f"rate-{self.rate:g}"
        return f"context-{self.context}-{how}"

    @property
    def options(self) -> list[str]:
        """Options of `vllm bench serve`."""
        if self.rate is None:
            return ["--max-concurrency", str(self.concurrency)]
        return ["--request-rate", f"{self.rate:g}"]


# ---- methods


def speculations(
    drafts: int, budget: float, draft_model: str | None, spire: str | None = None
) -> dict[str, dict[str, Any]]:
    """Return every method's speculative configuration; plain decoding has none.

    Args:
        drafts: drafts per round, if fixed.
        budget: `draft_kv_budget` of magicdec-self, magicdec and windows; a SPIRe draft has its own.
        draft_model: folder or name of a small model.
        spire: folder of a draft of `magicdec train-draft`.
    """
    number = {"num_speculative_tokens": drafts}
    magicdec = {"method": "magicdec-self", "draft_kv_budget": budget}
    sparse = {"method": "magicdec", "model": draft_model, "draft_kv_budget": budget}
    of_methods: dict[str, dict[str, Any]] = {
        PLAIN: {},
        "ngram": {"method": "ngram", **number, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
        # It chooses the number of drafts itself. Its default cache of past answers would know all answers,
        # because each load repeats the requests.
        "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
        "draft_model": {"method": "draft_model", **number, "model": draft_model},
        **{f"magicdec-{p}": {**magicdec, **number, "draft_kv_policy": p} for p in POLICIES},
        "magicdec-snapkv-token": {
            **magicdec,
            **number,
            "draft_kv_policy": "snapkv",
            "draft_kv_granularity": "token",
        },
        "magicdec-auto": {**magicdec, "num_speculative_tokens": "auto"},
        "magicdec-draft_model": {**sparse, **number},
        "magicdec-draft_model-auto": {**sparse, "num_speculative_tokens": "auto"},
        "magicdec-spire": {"method": "magicdec", **number, "model": spire},
        "magicdec-spire-auto": {"method": "magicdec", "num_speculative_tokens": "auto", "model": spire},
        AGAIN: {},
    }
    native = {method: of_methods[method.removesuffix(NATIVE)] for method in NATIVE_METHODS}
    numbered = {name: of_methods[own["method"]] | own for name, own in NUMBERED_METHODS.items()}
    windows = {name: numbered[name.removesuffix(WINDOW)] for name in WINDOW_METHODS}
    windows = {name: {**own, "draft_kv_budget": budget} for name, own in windows.items()}
    return of_methods | native | numbered | windows


def environment_of(method: str) -> dict[str, str]:
    """Return the variables of a method's server, added to this process's."""
    native = {"VLLM_MAGICDEC_NATIVE_ATTENTION": "1"} if method in NATIVE_METHODS else {}
    # A fault of the plugin must end the server instead of making it a plain one.
    return {"VLLM_MAGICDEC_STRICT": "1", **native}


def why_skipped(method: str, draft_model: str | None, spire: str | None = None) -> str | None:
    """Return a sentence that explains why a method cannot run on this machine, or None."""
    if method.partition("-")[0] == "suffix" and find_spec("arctic_inference") is None:
        return "arctic-inference is not installed; 'make bench' builds it if it finds a C++ compiler"
    if "draft_model" in method and draft_model is None:
        return "there is no draft model for this model; name one with --draft-model"
    if "spire" in method and spire is None:
        return "there is no trained draft for this model; 'magicdec train-draft' makes one for --spire"
    return None


def is_shipped(model: str) -> bool:
    """Return whether the model is the shipped one, or a copy of it."""
    return model in (KV_HEAVY, KV_HEAVY_GROUPED) or Path(model).resolve() == TINY_LLAMA


# ---- requests and loads


def write_requests(
    tokenizer: Any, contexts: list[int], count: int, folder: Path, documents: Path | None
) -> dict[int, Path]:
    """Write prompts for `vllm bench serve --dataset-name custom`, and return their files by context.

    A shorter prompt is the beginning of a longer one. Lengths may differ by a few tokens, because the
    tokenizer may split an excerpt's first and last word differently.
    """
    longest = excerpts(tokenizer, count, max(contexts), documents)
    paths = {}
    for context in contexts:
        paths[context] = folder / f"requests-{context}.jsonl"
        # The server adds the special tokens.
        prompts = [tokenizer.decode(tokens[:context], skip_special_tokens=True) for tokens in longest]
        paths[context].write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return paths


def run_load(
    server: Server,
    model: str,
    load: Load,
    requests: Path,
    count: int,
    num_tokens: int,
    folder: Path,
) -> dict[str, Any]:
    """Run `vllm bench serve` in this process, because importing vLLM takes longer than most loads.

    The folder gets its JSON as `result.json`.

    Raises:
        SystemExit: a request failed, or the number of generated tokens is wrong.
    """
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    folder.mkdir(parents=True)
    options = [
        *("--base-url", server.url, "--model", model, *load.options),
        *("--dataset-name", "custom", "--dataset-path", str(requests), "--num-prompts", str(count)),
        *("--skip-chat-template", "--disable-shuffle", "--disable-tqdm"),
        *("--custom-output-len", str(num_tokens), "--ignore-eos", "--temperature", "0"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "99"),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "result.json"),
    ]
    with (folder / "output.txt").open("w") as output, redirect_stdout(output):
        result = bench_serve(parser.parse_args(options))
    gc.unfreeze()  # `vllm bench serve` expects the process to end with it
    if result["completed"] != count or result["total_output_tokens"] != count * num_tokens:
        print(server.log_tail(), file=sys.stderr)
        sys.exit(
            f"{load.name}: {result['completed']} of {count} requests were answered, with "
            f"{result['total_output_tokens']} of {count * num_tokens} tokens"
        )
    return result


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers in vLLM's JSON, without those of single requests."""
    return {
        name: value
        for name, value in result.items()
        if isinstance(value, int | float) or name == PER_POSITION
    }


def median_run(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run with the median throughput, and the range of throughputs."""
    results = sorted(results, key=lambda result: result["output_throughput"])
    speeds = [result["output_throughput"] for result in results]
    return {
        **results[(len(results) - 1) // 2],
        "least_throughput": speeds[0],
        "most_throughput": speeds[-1],
    }


@dataclass
class Contender:
    """A method's server and its runs, in a folder per load and number."""

    method: str
    server: Server
    args: argparse.Namespace
    requests: dict[int, Path]  # by context
    counts: Counter[Load] = field(default_factory=Counter)

    def run(self, load: Load) -> dict[str, Any]:
        """Run a load and return its numbers."""
        self.counts[load] += 1
        return summary(self._run(load, self.args.tokens, f"{load.name}/{self.counts[load]}"))

    def warm_up(self) -> None:
        """Send all prompts once and generate few tokens, without measuring."""
        load = Load(max(self.args.context), max(self.args.concurrency))
        self._run(load, WARM_UP_TOKENS, "warm-up")

    def _run(self, load: Load, num_tokens: int, name: str) -> dict[str, Any]:
        args, folder = self.args, self.args.out / self.method / name
        path = self.requests[load.context]
        with self.server.only_now():
            return run_load(self.server, args.model_path, load, path, args.requests, num_tokens, folder)


def measure(
    args: argparse.Namespace, contenders: Sequence[Contender], rates: list[float] | None
) -> list[dict[str, Any]]:
    """Run all loads on servers in turns.

    Args:
        args: the settings.
        contenders: the servers.
        rates: requests per second; None for fractions of the first server's own throughput.
    """

    def measure_load(load: Load, repeats: int = 1) -> list[dict[str, Any]]:
        results = take_turns({one.method: partial(one.run, load) for one in contenders}, repeats)
        return [{"method": method, **asdict(load), **median_run(own)} for method, own in results.items()]

    longest = max(args.context)
    cells = [Load(context, number) for context in args.context for number in args.concurrency]
    runs = [run for load in cells for run in measure_load(load, args.repeats)]
    if rates is None:
        own = [run for run in runs if run["method"] == contenders[0].method]
        most = max(r["request_throughput"] for r in own if r["context"] == longest)
        rates = [float(f"{fraction * most:.2g}") for fraction in args.rate_fractions]
    return runs + [run for rate in rates for run in measure_load(Load(longest, rate=rate))]


# ---- report


def tables_of(record: dict[str, Any]) -> list[Table]:
    """Return tables of the speed by cell, and of times at the request rates."""
    runs = record["runs"]
    methods = list(dict.fromkeys(run["method"] for run in runs))
    ratios = speedups(runs)
    contexts = record["settings"]["context"]
    speed = make_table(
        f"output tokens/s and speedup over plain: {title_of(record)}",
        [f"{context:,} tokens,\n{concurrency} in flight" for context, concurrency in cells_of(runs)]
        + ["geometric\nmean", *(f"tokens\nper round\nat {context:,}" for context in contexts)],
        names=["method"],
    )
    for method in methods:
        loads = ratios[method].values()
        row = [f"{tokens_per_s:.0f}  {ratio:.2f} x" for tokens_per_s, ratio in loads]
        row.append(f"{geometric_mean(ratio for _, ratio in loads):.2f} x")
        for context in contexts:
            rates = pooled_acceptance(runs, method, context)
            row.append(f"{1 + sum(rates):.2f}" if rates else "-")
        speed.add_row(method, *row)

    times = make_table(
        f"request rates at {max(contexts):,} tokens: ms per answer and output token, median / 99th "
        "percentile, and ms to first token, median",
        [f"{rate:g} per second" for rate in sorted({run["rate"] for run in runs if run["rate"]})],
        names=["method"],
    )
    for method in methods:
        own = sorted((r for r in runs if r["method"] == method and r["rate"]), key=lambda r: r["rate"])
        cells = (
            f"{latency(r, 'median'):.1f} / {latency(r, 'p99'):.1f}, {r['median_ttft_ms']:.0f}" for r in own
        )
        times.add_row(method, *cells)
    return [speed, times]


def run_suite(args: argparse.Namespace, extra_options: list[str]) -> dict[str, Any]:
    """Serve and measure every method, and return the record."""
    from transformers import AutoTokenizer

    started = time.monotonic()
    args.out.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    requests = write_requests(tokenizer, args.context, args.requests, args.out, args.documents)
    options = [
        *("--dtype", args.dtype, "--max-model-len", str(max(args.context) + args.tokens + 2 * PAGE)),
        *("--max-num-seqs", str(max(args.concurrency)), *default_options()),
        *(["--no-enable-prefix-caching"] if args.cold else []),
        *extra_options,
    ]
    record = make_record(
        "suite",
        environment=vllm_environment(),
        model=Path(args.model).name,
        server_options=options,
        settings=settings_of(args, "quick", "model", "model_path", "methods"),
    )
    configs = speculations(args.drafts, args.budget, args.draft_model, args.spire)
    methods: dict[str, dict[str, Any]] = {m: {"speculative_config": configs[m]} for m in args.methods}
    for method, entry in methods.items():
        if reason := why_skipped(method, args.draft_model, args.spire):
            entry["skipped"] = reason
            console.print(f"{method}: skipped, {reason}", markup=False)

    def start(method: str) -> AbstractContextManager[Server]:
        own = ["--speculative-config", json.dumps(configs[method])] if configs[method] else []
        return serve(args.model_path, *options, *own, environment=environment_of(method))

    left = [method for method, entry in methods.items() if "skipped" not in entry]
    if args.in_turns:
        with ExitStack() as servers:
            contenders = []
            for method in left:
                contender = Contender(method, servers.enter_context(start(method)), args, requests)
                contenders.append(contender)
                contender.warm_up()
                console.print(f"{method}: started", markup=False)
            runs = measure(args, contenders, None)
    else:
        runs, rates = [], None
        for method in left:
            method_started = time.monotonic()
            try:
                with start(method) as server:
                    contender = Contender(method, server, args, requests)
                    contender.warm_up()
                    measured = measure(args, [contender], rates)
            except SystemExit as stop:
                # Plain decoding is the baseline; a number as exit code comes from a signal.
                if method == PLAIN or not isinstance(stop.code, str):
                    raise
                methods[method]["failed"] = stop.code
                console.print(f"{method}: failed, {stop.code}", markup=False, style="red")
                continue
            runs += measured
            rates = rates or [run["rate"] for run in measured if run["rate"]]
            methods[method]["seconds"] = round(time.monotonic() - method_started)
            console.print(f"{method}: {methods[method]['seconds']} s", markup=False)
    runs.sort(key=lambda run: args.methods.index(run["method"]))
    return {**record, "seconds": round(time.monotonic() - started), "methods": methods, "runs": runs}


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the settings, and the options for every `vllm serve`."""
    parser = make_parser(
        __doc__, epilog="Every other option goes to all `vllm serve` commands.", allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="two methods and short loads: two minutes")
    add_model(parser, default=str(TINY_LLAMA))
    parser.add_argument("--draft-model", help="for draft_model, vLLM's and ours; the shipped model has one")
    parser.add_argument(
        "--spire", help="folder of a trained draft, for magicdec-spire*; the shipped model has one"
    )
    parser.add_argument("--methods", nargs="+", default=[*METHODS, AGAIN], choices=CHOICES)
    parser.add_argument("--context", type=int, nargs="+", default=[1000, 7000], help="tokens of prompt")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8], help="requests in flight")
    parser.add_argument(
        "--rate-fractions",
        type=float,
        nargs="*",
        default=[0.4, 0.8, 1.2],
        help="request rates at the longest context, in units of what plain decoding could just serve",
    )
    parser.add_argument("--repeats", type=int, default=3, help="of the runs with fixed requests in flight")
    parser.add_argument("--requests", type=int, default=16, help="per load")
    parser.add_argument("--tokens", type=int, default=128, help="generated per request")
    parser.add_argument("--drafts", type=int, default=4, help="drafted tokens per round, where fixed")
    parser.add_argument("--budget", type=float, default=512, help="draft_kv_budget of magicdec-self")
    parser.add_argument(
        "--in-turns", action="store_true", help="all servers at once, in memory for all of them"
    )
    parser.add_argument("--cold", action="store_true", help="no prefix cache: every load reads its prompts")
    add_documents(parser)
    parser.add_argument("--out", type=Path, help="a new folder (default: benchmarks/runs/TIME)")
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**QUICK)
    args, extra_options = parser.parse_known_args(arguments)
    if PLAIN not in args.methods:
        parser.error(f"--methods must name '{PLAIN}', which the others are compared with")
    args.methods.sort(key=CHOICES.index)
    args.context.sort()
    args.concurrency.sort()
    if is_shipped(args.model):
        args.draft_model = args.draft_model or os.path.relpath(TINY_DRAFT)
    if Path(args.model).resolve() == TINY_LLAMA:
        args.spire = args.spire or os.path.relpath(TINY_SPIRE)
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    args.out = args.out or Path(__file__).resolve().parent / "runs" / now
    return args, extra_options


def main() -> None:
    args, extra_options = parse_arguments()
    # A terminated benchmark must still end its server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with model_folder(args.model) as args.model_path:
        record = run_suite(args, extra_options)
    write(record, args.out / "suite.json")
    draw(record, args.out)
    for table in tables_of(record):
        console.print(table)
    for method, entry in record["methods"].items():
        for outcome in ("skipped", "failed"):
            if outcome in entry:
                console.print(f"{method}: {outcome}, {entry[outcome]}", markup=False)
    console.print(f"{record['seconds'] / 60:.1f} minutes")
    if failed := [method for method, entry in record["methods"].items() if "failed" in entry]:
        sys.exit(f"error: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
