# SPDX-License-Identifier: Apache-2.0
"""A server that drafts with `auto` under load and faults: `make soak`, an hour by default.

Plain decoding answers all greedy requests first. Then a `vllm serve` of the shipped model gets them and
sampled ones, in bursts and lulls, through the official client: prompts of 5 to 7,000 tokens, streamed or
not, with stop strings, logprobs, structured output, several answers, priorities, shared prefixes and
clients that hang up, over a KV cache too small for a burst. Bad input comes all the time, and drafting
fails in one way after the other. Afterwards servers of their own are killed in mid-stream.

Every bound is a row of the printed table; the exit code says whether all hold.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .bad_input import send_bad_until
from .client import Traffic, plain_answers
from .faults import Faults
from .judge import checks_of, judge_answers
from .kills import run_kills
from .requests import make_requests
from .server import Watch, metrics_of, serve_tiny, speculation

# 232 pages of 32 tokens hold the longest request and no burst. Prompts are admitted by their first chunk;
# otherwise there would be few preemptions.
KV_CACHE = ("--num-gpu-blocks-override", "232", "--no-scheduler-reserve-full-isl")
REQUESTS_PER_MINUTE = 40  # different ones
# Share of plain decoding's throughput: trials, faults and forced drafts of `auto` would queue up requests.
SHARE_OF_PLAIN = 0.7
SETTLE_S = 180  # a virtual machine may pause for a minute
console = Console(highlight=False, width=150)


def run_traffic(minutes: float, rate: float, seed: int = 0) -> dict[str, Any]:
    """Run one server under traffic, bad input and faults, with at most `rate` requests per second."""
    requests = make_requests(max(60, round(REQUESTS_PER_MINUTE * minutes)), seed)
    num_greedy = sum(request.is_greedy for request in requests)
    say(f"plain decoding answers {num_greedy} requests ...")
    with serve_tiny() as (server, _):
        began_s = time.monotonic()
        plain = asyncio.run(plain_answers(server.url, requests))
        rate = min(rate, SHARE_OF_PLAIN * num_greedy / (time.monotonic() - began_s))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        fault = Path(folder, "fault")
        fault.write_text("")
        options = (*speculation(draft_kv_policy="verify-topk"), *KV_CACHE)
        with serve_tiny(*options, fault=fault) as (server, footprint):
            say(f"{minutes:g} minutes of traffic, {rate:.2g} requests per second ...")
            began_s = time.monotonic()

            def now_s() -> float:
                return time.monotonic() - began_s

            traffic = Traffic(server.url, requests)
            watch = Watch(server, footprint, lambda: len(traffic.outcomes), now_s)
            faults = Faults(fault, server.log, lambda: metrics_of(server), now_s, minutes)
            try:
                bad_input = asyncio.run(run_together(server.url, traffic, watch, faults, rate, seed))
                server.process.terminate()
                server.process.wait(SETTLE_S)
            except BaseException:
                console.print(server.log_tail(), markup=False)
                raise
            left = footprint.wait_until_gone(SETTLE_S)
    return {
        "minutes": minutes,
        "rate": round(rate, 2),
        "answers": judge_answers(requests, plain, traffic.outcomes),
        "windows": [asdict(window) for window in faults.windows],
        "bad_input": bad_input,
        "samples": watch.samples,
        "left": left,
    }


async def run_together(
    url: str, traffic: Traffic, watch: Watch, faults: Faults, rate: float, seed: int
) -> list[tuple[str, str]]:
    """Send traffic until the last fault is over and all requests have ended."""
    done = asyncio.Event()

    async def run_faults() -> None:
        try:
            await faults.run()
        finally:
            done.set()

    await traffic.run_steps(16)  # the first ones compile, for minutes on a busy machine
    await watch.take()
    watching = asyncio.create_task(watch.watch(every_s=1.0))
    _, bad_input, _ = await asyncio.gather(
        traffic.send(rate, seed, done), send_bad_until(url, done), run_faults()
    )
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    deadline_s = time.monotonic() + SETTLE_S
    while True:  # requests of clients that hung up; gauges are of the last step, which may precede that
        await traffic.run_steps(1)
        last = await watch.take()
        if not last["running"] + last["waiting"] or time.monotonic() > deadline_s:
            break
        await asyncio.sleep(1)
    await traffic.close()
    await watch.take()
    return bad_input


def say(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False)


def show(record: dict[str, Any]) -> bool:
    """Print the table, and return whether every judged bound holds."""
    table = Table("bound", "value", "")
    for check in checks_of(record):
        held = {True: "holds", False: "BROKEN", None: "not judged"}[check.holds]
        table.add_row(escape(check.bound), escape(check.value), held)
    console.print(table)
    for reason in record.get("traffic", {}).get("answers", {}).get("reasons", []):
        console.print(reason, markup=False)
    return all(check.holds is not False for check in checks_of(record))


def main(arguments: Sequence[str] | None = None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m soak", description=__doc__, formatter_class=formatter)
    parser.add_argument("--minutes", type=float, default=60, help="of traffic (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=3.5, help="requests per second, at most")
    parser.add_argument("--only", choices=("traffic", "kills"), help="one part")
    parser.add_argument("--out", type=Path, help="JSON file for the record")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end with this process
    record: dict[str, Any] = {}
    if args.only != "kills":
        record["traffic"] = run_traffic(args.minutes, args.rate)
    if args.only != "traffic":
        record["kills"] = run_kills(say)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if show(record) else 1


if __name__ == "__main__":
    sys.exit(main())
