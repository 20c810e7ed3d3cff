# SPDX-License-Identifier: Apache-2.0
"""A bad day of a server that drafts with `auto`: `make soak` (an hour), or see --help.

Plain decoding answers all greedy requests beforehand. Then a `vllm serve` of the shipped model gets them
and sampled ones, in bursts and lulls, through the official client: prompts of 5 to 7,000 tokens, streamed
and not, with stop strings, logprobs, structured output, several answers, priorities and shared prefixes,
from clients some of which hang up, over a KV cache too small for a burst. Bad input comes all the while,
and drafting fails in one way after the other (`VLLM_MAGICDEC_FAULT`). After that, servers of their own are
ended in mid-stream.

Every bound is a row of the table that is printed; the exit code says whether all hold. OUT gets the
record, and a plot beside it.
"""

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import openai
from bad_day.asking import Answer
from bad_day.bad_input import Rejection, send_bad_until
from bad_day.clock import Clock
from bad_day.faults import SHORT_MINUTES, Conductor
from bad_day.judging import (
    WARM_UP_SHARE,
    checks_of,
    judge_answers,
    judge_bad_input,
    latencies,
    own_passes,
    slopes,
)
from bad_day.kills import chosen_kills, run_kills
from bad_day.plotting import draw
from bad_day.requests import Request, make_requests
from bad_day.servers import serve_tiny, speculation
from bad_day.traffic import Traffic, answers_of
from bad_day.watching import Watch, as_rows, failures_of
from common.options import add_out, make_parser, settings_of, writable
from common.record import make_record, write
from common.tables import console, make_table
from kv_heavy import TINY_LLAMA
from rich.table import Table

# Of pages of 32 tokens the longest request fits, a burst does not. Prompts are let in by their first piece:
# where all of one has to fit, only answers preempt as they grow, and seldom.
_KV_CACHE = ("--num-gpu-blocks-override", "232", "--no-scheduler-reserve-full-isl")
_REQUESTS_PER_MINUTE = 40  # that differ; each comes about five times
# Of plain decoding's requests per second, while `auto` tries, fails and is forced to draft. More would only
# pile up, until those of low priority have waited for too long.
_SHARE_OF_PLAIN = 0.7
_SETTLE_S = 180  # of which a virtual machine may stand still for a minute


def make_store(folder: Path, requests: list[Request], tokenizer: Any) -> Path | None:
    """A datastore of some prompts, for lookups; None: the extra 'index' is not installed."""
    with suppress(ImportError):
        from vllm_magicdec.lookup import datastore_files

        store = folder / "store"
        vocabulary = datastore_files.Vocabulary.of(tokenizer.get_vocab())
        texts = (np.array(request.prompt) for request in requests[::8])
        datastore_files.write(store, texts, vocabulary, TINY_LLAMA.name)
        return store
    return None


def rate_of(asked: float, plain: float) -> float:
    """Requests per second that are sent; `plain` are those that plain decoding answers."""
    return min(asked, round(_SHARE_OF_PLAIN * plain, 2))


def run_traffic(args: argparse.Namespace) -> dict[str, Any]:
    """The server that is asked all the while."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(TINY_LLAMA))
    requests = make_requests(tokenizer, max(60, round(_REQUESTS_PER_MINUTE * args.minutes)), args.seed)
    num_greedy = sum(request.is_greedy for request in requests)
    say(f"plain decoding answers {num_greedy} requests ...")
    with serve_tiny() as (server, _):
        began_s = time.monotonic()
        plain = asyncio.run(answers_of(server.url, requests))
        plain_rate = num_greedy / (time.monotonic() - began_s)
    # Whoever wants an hour says what a slow machine is asked for.
    rate = rate_of(args.rate, plain_rate) if args.minutes < SHORT_MINUTES else args.rate
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        store = make_store(folder, requests, tokenizer)
        fault = folder / "fault"
        fault.write_text("")
        sources = ["context", *([str(store)] if store else [])]
        with serve_tiny(
            *speculation(draft_kv_policy="verify-topk", draft_lookup_sources=sources),
            *_KV_CACHE,
            environment={"VLLM_MAGICDEC_FAULT": str(fault)},
        ) as (server, footprint):
            say(f"{args.minutes:g} minutes of traffic, {rate:g} requests per second ...")
            if store is None:
                say("no datastore is cut: the extra 'index' is not installed")
            clock = Clock()
            traffic = Traffic(server.url, requests, clock.now_s)
            watch = Watch(server, footprint, lambda: len(traffic.outcomes), clock.now_s)
            conductor = Conductor(fault, server.log, store, lambda: failures_of(server), args.minutes)
            try:
                rejections = asyncio.run(
                    _all_at_once(args, rate, clock, traffic, watch, conductor, server.url)
                )
                drafts = {
                    name: round(value)
                    for name, value in server.metrics().items()
                    if name.startswith("vllm:spec_decode_num_") and name.endswith("_tokens_total")
                }
                server.process.terminate()
                server.process.wait(_SETTLE_S)
            except (OSError, openai.OpenAIError, subprocess.TimeoutExpired):
                console.print(server.log_tail(), markup=False)
                sys.exit("error: the server went, or stayed, when it should not; its log's end is above")
            finally:
                if args.log:
                    args.log.write_text(server.log.read_text(errors="replace"))
            left = footprint.wait_until_gone(_SETTLE_S)
    record = _record(args, requests, plain, traffic, watch, conductor, rejections, drafts, left)
    return {"asked_rate": args.rate, "rate": rate, **record}


async def _all_at_once(
    args: argparse.Namespace,
    rate: float,
    clock: Clock,
    traffic: Traffic,
    watch: Watch,
    conductor: Conductor,
    url: str,
) -> list[Rejection]:
    seconds = 60 * args.minutes
    ticking = asyncio.create_task(clock.tick())
    await watch.take()
    watching = asyncio.create_task(watch.watch(max(1.0, seconds / 500)))
    _, rejections, _ = await asyncio.gather(
        traffic.send(seconds, rate, args.seed),
        send_bad_until(url, args.bad_input_every, seconds, clock.now_s),
        conductor.conduct(clock.now_s),
    )
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    deadline_s = clock.now_s() + _SETTLE_S
    while True:  # requests of clients that hung up
        await traffic.ask_for_a_token()
        last = await watch.take()
        if not last.gauges["running"] + last.gauges["waiting"] or clock.now_s() > deadline_s:
            break
        await asyncio.sleep(1)
    await traffic.close()
    await watch.take()
    ticking.cancel()
    return rejections


def _record(
    args: argparse.Namespace,
    requests: list[Request],
    plain: list[Answer | None],
    traffic: Traffic,
    watch: Watch,
    conductor: Conductor,
    rejections: list[Rejection],
    drafts: dict[str, int],
    left: list[str],
) -> dict[str, Any]:
    seconds = 60 * args.minutes
    first, last = watch.samples[0], watch.samples[-1]
    warm = next((sample for sample in watch.samples if sample.at_s >= WARM_UP_SHARE * seconds), last)
    more_fds = {name: last.num_fds[name] - first.num_fds.get(name, 0) for name in last.num_fds}
    return {
        "minutes": args.minutes,
        "answers": judge_answers(requests, plain, traffic.outcomes),
        "latencies": latencies(traffic.outcomes, conductor.windows),
        "faults": [asdict(window) for window in conductor.windows],
        "failures": last.failures,
        "tokens": drafts,
        "own_passes": own_passes(watch.samples, conductor.windows),
        "bad_input": judge_bad_input(rejections),
        "slopes": slopes(watch.samples, seconds),
        "answered_after_warm_up": last.answered - warm.answered,
        "end": {**last.gauges, "more_fds": max(more_fds.values()), "left": left},
        "samples_missed": watch.num_missed,
        "samples": as_rows(watch.samples),
    }


# ---- report


def table_of(record: dict[str, Any]) -> Table:
    """Every bound, what it was, and whether it held."""
    table = make_table("a bad day", [], names=["what", "bound", "was", ""])
    for check in checks_of(record):
        held = {True: "holds", False: "BROKEN", None: "not judged"}[check.holds]
        table.add_row(check.name, check.bound, check.value, held)
    return table


def latency_table_of(record: dict[str, Any]) -> Table:
    """Times of answers before, during and after faults."""
    columns = {
        f"{what}, p{percent}": f"p{percent}_{name}_ms"
        for what, name in (("ms to first token", "first_token"), ("ms to answer", "answer"))
        for percent in (50, 95, 99)
    }
    table = make_table("latency", ["answers", *columns], names=["when"])
    for row in record["traffic"]["latencies"]:
        times = ("-" if row[name] is None else f"{row[name]:,.0f}" for name in columns.values())
        table.add_row(row["phase"], str(row["answers"]), *times)
    return table


def say(what: str) -> None:
    """At what time what goes on."""
    console.print(f"{time.strftime('%H:%M:%S')} {what}", markup=False)


def show(record: dict[str, Any]) -> bool:
    """Print the tables; whether every bound that was judged holds."""
    if "traffic" in record:
        console.print(latency_table_of(record))
    console.print(table_of(record))
    for reason in record.get("traffic", {}).get("answers", {}).get("reasons", []):
        console.print(reason, markup=False)
    return all(check.holds is not False for check in checks_of(record))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--minutes", type=float, default=60, help="of traffic; start-up and kills come on top"
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=3.5,
        help=f"requests per second in the mean; in less than {SHORT_MINUTES} minutes at most "
        f"{_SHARE_OF_PLAIN:g} of what plain decoding answers",
    )
    parser.add_argument("--bad-input-every", type=float, default=1.5, help="seconds")
    parser.add_argument("--only", choices=("traffic", "kills"), help="a part alone")
    parser.add_argument(
        "--one-rank",
        action="store_true",
        help="no kills of tensor-parallel ranks and of the engine core, as 'make test' has it",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--log", type=writable, help="file for the log of the server that is asked all the while"
    )
    add_out(parser, beside=", with a plot beside it")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end with it
    record = make_record("soak", model=TINY_LLAMA.name, settings=settings_of(args, "log"))
    if args.only != "kills":
        record["traffic"] = run_traffic(args)
    if args.only != "traffic":
        is_parallel = record["machine"]["vllm_kernels"] != "_C_AVX2"
        if not is_parallel:
            say("no kills of two ranks: with its AVX2 kernels vLLM 0.32.0 is not tensor-parallel")
        with_two_ranks = is_parallel and not args.one_rank
        record["kills"] = run_kills(say, chosen_kills(with_two_ranks=with_two_ranks, few=args.one_rank))
    write(record, args.out)
    if args.out is not None and "traffic" in record:
        draw(record, args.out.with_suffix(".png"))
    return 0 if show(record) else 1


if __name__ == "__main__":
    sys.exit(main())
