# SPDX-License-Identifier: Apache-2.0
"""Servers that are ended in the middle of their answers, each a server of its own."""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
from common.documents import encode
from kv_heavy import TINY_LLAMA
from transformers import AutoTokenizer

from .faults import FAULTS
from .requests import Request
from .servers import MODEL, Footprint, Server, serve_tiny, speculation
from .traffic import client_of
from .watching import named_processes

_PROMPT = "import argparse\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser("
_STREAMS = 6
# How streams end. vLLM 0.32.0 ends each by one of the proper two and `[DONE]`: on SIGTERM the engine ends
# its requests first, then uvicorn waits for their connections; where the engine dies, an error is sent.
ANSWER, ERROR_EVENT = PROPER = ("answer", "error event")
NO_REASON, LOST, OPEN = "without a reason", "connection lost", "left open"
_TOKENS = 2000  # more than are made while passes are slow
# Of streams that come to their own end, which has to be soon: of 2,000 it took a Zen 3 18 s.
_TOKENS_TO_THE_END = 800
_MOST_S = 120  # until a server has gone, or a client sees its end
_LOG_CHARS = 8000  # shown of a server whose streams did not end as they had to
_SETTLE_S = 30  # for what lives a moment longer than the server


@dataclass(frozen=True)
class Kill:
    """What is done to a server, and how it says so."""

    name: str
    strike: Callable[[Server], None]
    sentence: str
    """A pattern of the log's line."""
    options: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    strikes_by_itself: bool = False
    tokens: int = _TOKENS
    """Of each stream."""
    is_extra: bool = False
    """Left out where few servers are to be started."""


def _terminate(server: Server) -> None:
    server.process.terminate()


def _kill(role: str) -> Callable[[Server], None]:
    def kill(server: Server) -> None:
        named_processes(server)[role].kill()

    return kill


def _wait_for_the_fault(server: Server) -> None:
    """It strikes by itself."""


# A SIGTERM lets answers go on to their end for so many seconds. Without it vLLM 0.32.0 may leave them open:
# `AsyncLLM.shutdown` can cancel what hands on the engine's last outputs before it has done so. More than a
# server may take to end, so that one whose answers never end is found, and less than `_MOST_S`.
_ONE_RANK = (*speculation(), "--shutdown-timeout", "110")
# A fixed number of drafts, so that both ranks are drafting when the fault comes.
_TWO_RANKS = (
    *speculation(num_speculative_tokens=4),
    *("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"),
)
_FAULT = "selection:first=150,rank=1"  # after the answer that is known


def all_kills() -> list[Kill]:
    """In this order: all but the last with their options end in the server that the next one strikes."""
    cores = sorted(os.sched_getaffinity(0))
    of_each = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    died = r"(?:EngineDeadError|died unexpectedly|Engine core proc \S+ died)[^\n]*"
    return [
        Kill("SIGKILL of the engine core", _kill("engine core"), died, _ONE_RANK, is_extra=True),
        # On CPUs one rank is a process as well. The engine core notices, and dies of it.
        Kill("SIGKILL of the worker", _kill("worker"), died, _ONE_RANK),
        Kill(
            "SIGTERM in mid-stream",
            _terminate,
            r"\[shutdown\] API server: [^\n]*",
            _ONE_RANK,
            tokens=_TOKENS_TO_THE_END,
        ),
        Kill("SIGKILL of one of two ranks", _kill("worker 2"), died, _TWO_RANKS, of_each),
        Kill(
            "fault on one of two ranks",
            _wait_for_the_fault,
            r"Drafting failed on one of 2 tensor-parallel ranks; it ends\.",
            _TWO_RANKS,
            {**of_each, "VLLM_MAGICDEC_FAULT": _FAULT},
            strikes_by_itself=True,
        ),
    ]


def chosen_kills(*, with_two_ranks: bool, few: bool) -> list[Kill]:
    """Those of one rank, and of two; few: as many as `make test` has the time for."""
    return [
        kill
        for kill in all_kills()
        if (with_two_ranks or kill.options is _ONE_RANK) and not (few and kill.is_extra)
    ]


def run_kills(say: Callable[[str], None], chosen: Sequence[Kill]) -> list[dict[str, Any]]:
    """Serve, stream, strike, and see what is left; then serve again, to be struck or to answer alone.

    Args:
        say: tells what goes on.
        chosen: what is done, in this order; those with the same options one after the other.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(TINY_LLAMA))
    known = Request("greedy", encode(tokenizer, _PROMPT), max_tokens=64)
    kills: list[dict[str, Any]] = []
    answers: dict[Sequence[str], str] = {}  # by options
    for place, kill in enumerate(chosen):
        say(f"{kill.name} ...")
        with _brake() as brake:
            environment = {"VLLM_MAGICDEC_FAULT": str(brake), **kill.environment}
            with serve_tiny(*kill.options, environment=environment) as (server, footprint):
                answer = asyncio.run(_answer(server, known))
                if kill.options in answers:
                    kills[-1]["restarted"] = answer == answers[kill.options]
                else:
                    answers[kill.options] = answer
                kills.append(asyncio.run(_strike(server, footprint, kill, known, brake)))
        last = kills[-1]
        say(
            f"{kill.name}: ended after {last['exit_s']} s, {last['streams_ended']} of {_STREAMS} streams "
            f"ended ({'; '.join(last['how_streams_ended'])}), left: {last['left'] or 'nothing'}"
        )
        if not any(later.options == kill.options for later in chosen[place + 1 :]):
            say(f"{kill.name}: one more server ...")
            environment = {**kill.environment, "VLLM_MAGICDEC_FAULT": ""}
            with serve_tiny(*kill.options, environment=environment) as (server, _):
                last["restarted"] = asyncio.run(_answer(server, known)) == answers[kill.options]
    return kills


@contextmanager
def _brake() -> Iterator[Path]:
    """A file of `VLLM_MAGICDEC_FAULT`; see `_strike`."""
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        file = Path(folder, "fault")
        file.write_text("")
        yield file


async def _answer(server: Server, known: Request) -> str:
    async with client_of(server.url) as client:
        body = known.body(MODEL)
        asked = {name: body[name] for name in ("model", "prompt", "max_tokens", "temperature")}
        return (await client.completions.create(**asked)).choices[0].text


async def _strike(
    server: Server, footprint: Footprint, kill: Kill, known: Request, brake: Path
) -> dict[str, Any]:
    """The server ends in the middle of answers.

    Its draft passes are slow until then: on a busy machine a client may wait for longer than it takes the
    server to make a whole answer.
    """
    brake.write_text(FAULTS["slow"])
    asked = replace(known, max_tokens=kill.tokens)
    streams = [_Stream() for _ in range(_STREAMS)]
    tasks = [asyncio.create_task(stream.read(server, asked, i)) for i, stream in enumerate(streams)]
    await _until(partial(_have_begun, streams), _MOST_S)
    too_early = [bool(one.how) and not kill.strikes_by_itself for one in streams]
    footprint.note(server)
    told = 0 if kill.strikes_by_itself else server.log.stat().st_size
    began = time.monotonic()
    kill.strike(server)
    brake.write_text("")
    exit_s = None
    with suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(server.process.wait, _MOST_S)
        exit_s = round(time.monotonic() - began, 1)
    await asyncio.wait(tasks, timeout=_SETTLE_S)
    ended = [
        stream.end in PROPER and stream.has_begun and not early
        for stream, early in zip(streams, too_early, strict=True)
    ]
    improper_ends = Counter(stream.end for stream in streams if stream.end not in PROPER)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if not all(ended):  # before the strike, or never
        print(server.log.read_text(errors="replace")[-_LOG_CHARS:], file=sys.stderr)
    with server.log.open(errors="replace") as log:
        log.seek(told)  # what it said before was not about the strike
        found = re.findall(kill.sentence, log.read())
    return {
        "name": kill.name,
        "exit_s": exit_s,
        "exit_code": server.process.poll(),
        "streams": len(streams),
        "streams_ended": sum(ended),
        "streams_ended_too_early": sum(too_early),
        "improper_ends": dict(improper_ends),
        "how_streams_ended": sorted({stream.how for stream in streams}),
        "sentence": found[-1] if found else "",
        "shared_memory_segments": footprint.num_shared,
        "left": await asyncio.to_thread(footprint.wait_until_gone, _SETTLE_S),
    }


def _have_begun(streams: Sequence["_Stream"]) -> bool:
    return all(one.has_begun or one.how for one in streams)


class _Stream:
    """A client that reads a long answer to its end, whatever that is."""

    def __init__(self) -> None:
        self.num_chunks = 0
        self.end = OPEN
        self.how = ""

    @property
    def has_begun(self) -> bool:
        """Whether it is in the middle of its answer; a request that was refused never is."""
        return self.num_chunks > 2

    async def read(self, server: Server, known: Request, index: int) -> None:
        try:
            async with client_of(server.url) as client:
                chunks = await client.completions.create(
                    model=MODEL,
                    prompt=[*known.prompt[index:]],
                    max_tokens=known.max_tokens,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                reason = None
                async for chunk in chunks:
                    self.num_chunks += 1
                    reason = chunk.choices[0].finish_reason if chunk.choices else reason
                self.end = ANSWER if reason else NO_REASON
                self.how = f"finish_reason {reason}"
        except Exception as error:
            self.end = _end_by(error)
            self.how = f"{type(error).__name__}: {error}"[:200]


def _end_by(error: Exception) -> str:
    if type(error) is openai.APIError:  # for an event of the stream it has no class of its own
        return ERROR_EVENT
    return LOST if isinstance(error, openai.APIConnectionError) else type(error).__name__


async def _until(holds: Callable[[], bool], most_s: float) -> None:
    deadline_s = time.monotonic() + most_s
    while not holds() and time.monotonic() < deadline_s:
        await asyncio.sleep(0.02)
