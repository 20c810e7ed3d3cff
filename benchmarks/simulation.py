# SPDX-License-Identifier: Apache-2.0
"""`magicdec simulate` against the real server: the same requests at the same times, plain and magicdec.

`magicdec profile` measures the engine. The simulation alone then says what a plain server can serve, and
three Poisson loads are shares of that. `vllm serve` and `vllm bench serve` run each of them; the simulation
replays when the requests really began. It is told how many drafts stood, which no profile can know, what
the server's front end takes (of single requests, what their first token takes beside the engine's steps),
and nothing else that was measured on the server. Machines change their speed: the engine is profiled again
after every run, while the servers stand still, a run is simulated by the profiles beside it, and of several
turns of each load the medians count. Prefix caching is off. On a CPU the server's worker has its cores for
itself, as far as there are others for the rest. Errors beyond `--within` are named, with exit code 1.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from common.engines import PAGE, set_environment, take_turns
from common.machine import vllm_environment
from common.options import add_documents, add_model, add_out, make_parser, settings_of
from common.record import make_record, write
from common.tables import console, make_table
from kv_heavy import TINY_LLAMA, model_folder
from rich.table import Table
from suite import Load, run_load, write_requests
from suite_plots import PER_POSITION, PLAIN

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from serving import Server, default_options, serve

from vllm_magicdec.planner import traces
from vllm_magicdec.planner.engine_times import EngineTimes, ProfiledTimes, Work
from vllm_magicdec.planner.simulate import summary
from vllm_magicdec.planner.simulation import PLAIN as NO_DRAFTS
from vllm_magicdec.planner.simulation import Limits, Speculation, simulate
from vllm_magicdec.planner.traces import Arrival, Lengths

MAGICDEC = "magicdec"
WITHIN = 0.15  # of what is served, the simulation is to be
FRONTEND_REQUESTS = 20  # one after the other, for its time
TIMEOUT_S = 60  # of one
ENGINE_SECONDS = ("vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum")
# What `vllm bench serve` and the simulation call the same.
COMPARED = {
    "output tokens/s": ("output_throughput", "output_throughput"),
    "TTFT": ("median_ttft_ms", "p50_ttft_ms"),
    "TPOT": ("median_tpot_ms", "p50_tpot_ms"),
    "end to end": ("median_e2el_ms", "p50_e2e_ms"),
}


def compare(served: dict[str, Any], simulated: dict[str, float]) -> dict[str, dict[str, float]]:
    """By quantity: served, simulated, and the relative error of the latter."""
    pairs = {name: (served[one], simulated[other]) for name, (one, other) in COMPARED.items()}
    return {
        name: {"served": real, "simulated": said, "error": said / real - 1}
        for name, (real, said) in pairs.items()
    }


def replay(
    result: dict[str, Any],
    context: int,
    num_tokens: int,
    times: EngineTimes,
    limits: Limits,
    frontend_s: float = 0.0,
) -> dict[str, float]:
    """Simulate what `vllm bench serve` asked for, when it did.

    Args:
        result: its JSON, with what there is of every request.
        frontend_s: see `simulate`.
    """
    begin = min(result["start_times"])
    arrivals = sorted(Arrival(at - begin, context, num_tokens) for at in result["start_times"])
    speculation = NO_DRAFTS
    if rates := result.get(PER_POSITION):
        speculation = Speculation(tuple(rates))
    return summary(simulate(arrivals, times, limits, speculation, frontend_s=frontend_s), 1)


def capacity(args: argparse.Namespace, times: EngineTimes, limits: Limits) -> float:
    """Requests per second that the simulation serves plainly when all come at once."""
    at_once = traces.poisson(math.inf, 100, Lengths(str(args.context)), Lengths(str(args.tokens)), 0)
    return summary(simulate(at_once, times, limits), 1)["request_throughput"]


def profile_engine(args: argparse.Namespace, config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Have `magicdec profile` write a profile; its content."""
    engine = {"dtype": args.dtype, "block_size": PAGE, "enforce_eager": True, "disable_log_stats": False}
    engine["max_num_batched_tokens"] = args.batched_tokens
    batches = sorted({1, max(1, args.seqs // 2), args.seqs})
    contexts = sorted({args.context // 4, args.context, args.context + args.tokens, args.batched_tokens})
    command = [sys.executable, "-m", "vllm_magicdec", "profile", "--model", args.model_path]
    command += ["--batch", *map(str, batches), "--context", *map(str, contexts)]
    command += ["--engine", json.dumps(engine), "--speculative-config", json.dumps(config)]
    subprocess.run([*command, "--out", str(path)], check=True, stdout=sys.stderr)
    return json.loads(path.read_text())


@dataclass(frozen=True)
class BeforeAndAfter:
    """The mean of what two profiles say; see `EngineTimes`."""

    before: EngineTimes
    after: EngineTimes

    def seconds(self, work: Work) -> float:
        """How long a step takes."""
        return (self.before.seconds(work) + self.after.seconds(work)) / 2


def frontend_seconds(server: Server, model: str, requests: Path) -> float:
    """What an idle server takes for a request beside the engine's steps, to and fro; median."""
    taken = []
    for line in requests.read_text().splitlines()[:FRONTEND_REQUESTS]:
        prompt = json.loads(line)["prompt"]
        body = json.dumps({"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 1}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
        before_s = engine_seconds(server)
        began_s = time.perf_counter()
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            answer.read()
        ended_s = time.perf_counter()
        taken.append(ended_s - began_s - (engine_seconds(server) - before_s))
    return statistics.median(taken)


def engine_seconds(server: Server) -> float:
    """What the engine took for the first tokens of all requests that have ended, by its own clock."""
    metrics = server.metrics()
    return sum(metrics[name] for name in ENGINE_SECONDS)


def named_processes(server: Server) -> dict[str, psutil.Process]:
    """The server's processes by role."""
    named: dict[str, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == server.process.pid:
                role = "worker" if "Worker" in process.name() else f"process {process.pid}"
                named["server" if process.pid == server.process.pid else role] = process
    return named


@contextmanager
def worker_alone(server: Server) -> Iterator[None]:
    """Until the block ends, only the server's worker runs on the cores that it computes on.

    On few cores its other processes, and this one, which asks, would take turns with it there. Where it
    computes on all cores, they do.
    """
    workers, others = [], []
    for name, process in named_processes(server).items():
        (workers if name.startswith("worker") else others).append(process)
    mine = os.sched_getaffinity(0)
    free = mine - {core for worker in workers for core in worker.cpu_affinity()}
    if free:
        for thread in (thread for process in others for thread in process.threads()):
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(thread.id, free)
        os.sched_setaffinity(0, free)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


@dataclass
class Contender:
    """A method's server, which stands still unless it is its turn, and the runs on it."""

    method: str
    server: Server
    args: argparse.Namespace
    requests: Path
    folder: Path

    def warm_up(self) -> None:
        """Nothing is measured."""
        load = Load(self.args.context, self.args.seqs)
        with self.server.only_now():
            self._run(load, self.args.seqs, 8, "warm")

    def run(self, rate: float, name: str) -> tuple[dict[str, Any], float]:
        """`vllm bench serve`'s JSON of requests that come at that rate, and `frontend_seconds`.

        Args:
            rate: requests per second.
            name: of this run alone.
        """
        count = math.ceil(rate * self.args.seconds)
        with self.server.only_now(), worker_alone(self.server):
            frontend_s = frontend_seconds(self.server, self.args.model_path, self.requests)
            load = Load(self.args.context, rate=rate)
            return self._run(load, count, self.args.tokens, name, "--save-detailed"), frontend_s

    def _run(self, load: Load, count: int, num_tokens: int, name: str, *options: str) -> dict[str, Any]:
        where = self.folder / self.method / name
        common = (self.server, self.args.model_path, load, self.requests)
        return run_load(*common, count, num_tokens, where, *options)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Serve every load and profile after each, then simulate."""
    # One profile serves both methods, and a plain server's attention is vLLM's.
    drafting = {"draft_kv_budget": args.budget, "draft_lookup": "off", "native_attention": False}
    record = make_record(
        "simulation",
        environment=vllm_environment(),
        model=Path(args.model).name,
        settings=settings_of(args, "model", "model_path", "within"),
    )
    limits = limits_of(args.seqs, args.context, args.tokens, args.batched_tokens)
    options = [
        *("--dtype", args.dtype, "--max-model-len", str(args.context + args.tokens + 2 * PAGE)),
        *("--max-num-seqs", str(args.seqs), "--max-num-batched-tokens", str(args.batched_tokens)),
        *("--no-enable-prefix-caching", *default_options()),
    ]
    magicdec = {"method": "magicdec-self", "num_speculative_tokens": args.drafts, **drafting}
    record |= {"server_options": options, "speculative_config": magicdec, "profiles": [], "runs": []}
    profiled: list[ProfiledTimes] = []

    def profile() -> None:
        path = folder / f"profile-{len(profiled)}.json"
        content = profile_engine(args, {**drafting, "max_num_speculative_tokens": args.drafts}, path)
        record["profiles"].append({**content, "model": record["model"]})
        profiled.append(ProfiledTimes.load(path))

    profile()
    record["capacity"] = capacity(args, profiled[0], limits)
    rates = [float(f"{share * record['capacity']:.3g}") for share in args.shares]
    requests = prompts_of(args, math.ceil(max(rates) * args.seconds), folder)
    with ExitStack() as servers:
        contenders = []
        for method, config in {PLAIN: {}, MAGICDEC: magicdec}.items():
            own = ["--speculative-config", json.dumps(config)] if config else []
            server = servers.enter_context(serve(args.model_path, *options, *own))
            contenders.append(Contender(method, server, args, requests, folder))
            contenders[-1].warm_up()
        profile()

        def run(rate: float, contender: Contender) -> None:
            result, frontend_s = contender.run(rate, f"run-{len(record['runs'])}")
            profile()
            times = BeforeAndAfter(*profiled[-2:])
            record["runs"].append(
                compare_run(args, contender.method, rate, result, times, limits, frontend_s)
            )

        loads = itertools.product(rates, contenders)
        take_turns({f"{rate:g} {one.method}": partial(run, rate, one) for rate, one in loads}, args.turns)
    return record


def prompts_of(args: argparse.Namespace, count: int, folder: Path) -> Path:
    """`vllm bench serve`'s file of so many prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    return write_requests(tokenizer, [args.context], count, folder, args.documents)[args.context]


def compare_run(
    args: argparse.Namespace,
    method: str,
    rate: float,
    result: dict[str, Any],
    times: EngineTimes,
    limits: Limits,
    frontend_s: float,
) -> dict[str, Any]:
    """What is recorded of a run: what was served and what the simulation says."""
    count = len(result["start_times"])
    prompt = round(result["total_input_tokens"] / count)
    simulated = replay(result, prompt, args.tokens, times, limits, frontend_s)
    return {
        "method": method,
        "rate": rate,
        "requests": count,
        PER_POSITION: result.get(PER_POSITION),
        "frontend_ms": 1e3 * frontend_s,
        "compared": compare(result, simulated),
        "simulated": simulated,
        "start_times": result["start_times"],
        "ttfts": result["ttfts"],
    }


def limits_of(seqs: int, context: int, tokens: int, batched_tokens: int) -> Limits:
    """Of an engine whose memory holds all that is in flight."""
    return Limits(seqs * (context + tokens + 2 * PAGE), seqs, batched_tokens, PAGE)


def medians(record: dict[str, Any]) -> dict[tuple[str, float], dict[str, tuple[float, float]]]:
    """Served and simulated, the medians of the turns, by load (method and rate) and quantity."""
    loads: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for run in record["runs"]:
        loads.setdefault((run["method"], run["rate"]), []).append(run["compared"])

    def median(turns: list[dict[str, Any]], name: str, whose: str) -> float:
        return statistics.median(turn[name][whose] for turn in turns)

    return {
        load: {name: (median(turns, name, "served"), median(turns, name, "simulated")) for name in COMPARED}
        for load, turns in loads.items()
    }


def cells_beyond(record: dict[str, Any], share: float = WITHIN) -> dict[tuple[str, float, str], float]:
    """The errors of the table's cells that are larger than that share of what was served.

    By method, rate and quantity.
    """
    return {
        (*load, name): simulated / served - 1
        for load, cells in medians(record).items()
        for name, (served, simulated) in cells.items()
        if abs(simulated / served - 1) > share
    }


def table_of(record: dict[str, Any], share: float = WITHIN) -> Table:
    """Served and simulated, the medians of the turns, and the error of the one to the other, by load.

    Cells whose error is beyond that share are marked.
    """
    names = [name if "/s" in name else f"{name}, median ms" for name in COMPARED]
    title = f"served, simulated, error (!: beyond {share:.0%})"
    table = make_table(title, names, names=["method", "requests/s"])
    beyond = cells_beyond(record, share)
    for (method, rate), of_load in medians(record).items():
        cells = []
        for name, (served, simulated) in of_load.items():
            mark = "!" if (method, rate, name) in beyond else ""
            cells.append(f"{served:.1f} {simulated:.1f} {simulated / served - 1:+.0%}{mark}")
        table.add_row(method, f"{rate:g}", *cells)
    return table


def main() -> None:
    parser = make_parser(__doc__)
    add_model(parser, str(TINY_LLAMA))
    add_documents(parser)
    add_out(parser)
    parser.add_argument("--context", type=int, default=1000, help="tokens of prompts")
    parser.add_argument("--tokens", type=int, default=64, help="of every answer")
    parser.add_argument("--seqs", type=int, default=8, help="requests that an engine serves at a time")
    parser.add_argument("--batched-tokens", type=int, default=2048, help="of a step, at most")
    parser.add_argument("--drafts", type=int, default=4, help="per round")
    parser.add_argument("--budget", type=int, default=256, help="tokens that a draft step reads")
    parser.add_argument("--shares", type=float, nargs=3, default=[0.25, 0.5, 0.75], help="of the capacity")
    parser.add_argument("--seconds", type=float, default=30, help="that requests come, at each load")
    parser.add_argument("--turns", type=int, default=3, help="of every load and method")
    parser.add_argument(
        "--within",
        type=float,
        default=WITHIN,
        help="of what is served, the largest share that an error may be; beyond it the exit code is 1",
    )
    args = parser.parse_args()
    set_environment(kv_cache_gib=2)
    with model_folder(args.model) as args.model_path, TemporaryDirectory() as folder:
        record = measure(args, Path(folder))
    write(record, args.out)
    console.print(table_of(record, args.within))
    if beyond := cells_beyond(record, args.within):
        cells = (
            f"{name} of {method} at {rate:g} ({error:+.0%})"
            for (method, rate, name), error in beyond.items()
        )
        sys.exit(f"error: simulated with more than {args.within:.0%} of error: {', '.join(cells)}")


if __name__ == "__main__":
    main()
