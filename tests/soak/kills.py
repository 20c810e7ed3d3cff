# SPDX-License-Identifier: Apache-2.0
"""Kill servers in the middle of their answers, each kill with a new server."""

import asyncio
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import texts

from .client import ask, client_of
from .faults import FAULTS
from .requests import Request
from .server import Footprint, Server, lasting_processes, serve_tiny, speculation

PROMPT = "import argparse\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser("
NUM_STREAMS = 6
# On a SIGTERM vLLM completes its answers, and it sends an error if the engine dies.
ANSWER, ERROR_EVENT, OPEN = "answer", "error event", "left open"
TIMEOUT_S = 120  # until the streams have begun, and until a server has ended
SETTLE_S = 30
# Answers may continue this long after a SIGTERM: longer than the bound, so that endless answers are found.
OPTIONS = (*speculation(), "--shutdown-timeout", "110")
DIED = r"(?:EngineDeadError|died unexpectedly|Engine core proc \S+ died)[^\n]*"


@dataclass(frozen=True)
class Kill:
    strike: Callable[[Server], None]
    reason: str  # pattern, in the log
    max_s: float = 60.0  # until the server has ended
    tokens: int = 2000  # of each stream, more than are generated before the strike


def kill(role: str) -> Callable[[Server], None]:
    return lambda server: lasting_processes(server)[role].kill()


KILLS = {
    "SIGKILL of the engine core": Kill(kill("engine core"), DIED),
    "SIGKILL of the worker": Kill(kill("worker"), DIED),
    # Six answers of 800 tokens are completed: 8 to 18 s on a quiet machine.
    "SIGTERM of the server": Kill(
        lambda server: server.process.terminate(), r"\[shutdown\] API server: [^\n]*", max_s=100, tokens=800
    ),
}


def run_kills(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Serve, stream, strike and collect leftovers; the next server must answer as the first one did."""
    known = Request("greedy", texts.tokenizer().encode(PROMPT, add_special_tokens=False).ids, max_tokens=64)
    results: list[dict[str, Any]] = []
    expected = None
    with tempfile.TemporaryDirectory(prefix="soak-kills-") as folder:
        fault = Path(folder, "fault")
        for name in [*KILLS, None]:
            fault.write_text("")
            say("one more server ..." if name is None else f"{name} ...")
            with serve_tiny(*OPTIONS, fault=fault) as (server, footprint):
                tokens = asyncio.run(answer_of(server, known))
                expected = expected or tokens
                if results:
                    results[-1]["next_is_same"] = tokens == expected
                if name is not None:
                    result = asyncio.run(strike(server, footprint, KILLS[name], known, fault))
                    results.append({"name": name, "max_s": KILLS[name].max_s, **result})
    return results


async def answer_of(server: Server, known: Request) -> list[list[int]]:
    async with client_of(server.url) as client:
        return (await ask(client, known)).tokens


async def strike(
    server: Server, footprint: Footprint, kill: Kill, known: Request, fault: Path
) -> dict[str, Any]:
    """End the server in the middle of answers; until then slow draft passes keep them from ending."""
    fault.write_text(FAULTS["slow"][0])
    num_chunks = [0] * NUM_STREAMS
    request = replace(known, max_tokens=kill.tokens)
    tasks = [asyncio.create_task(read(server, request, num_chunks, i)) for i in range(NUM_STREAMS)]
    deadline_s = time.monotonic() + TIMEOUT_S
    while min(num_chunks) < 3 and time.monotonic() < deadline_s and not any(task.done() for task in tasks):
        await asyncio.sleep(0.02)
    num_running = sum(not task.done() for task in tasks) if min(num_chunks) else 0
    footprint.note(server)
    log_begin, began_s, exit_s = server.log.stat().st_size, time.monotonic(), None
    kill.strike(server)
    fault.write_text("")
    with suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(server.process.wait, TIMEOUT_S)
        exit_s = round(time.monotonic() - began_s, 1)
    ended, open_ = await asyncio.wait(tasks, timeout=SETTLE_S)
    for task in open_:
        task.cancel()
    await asyncio.gather(*open_, return_exceptions=True)
    with server.log.open(errors="replace") as log:
        log.seek(log_begin)
        reasons = re.findall(kill.reason, log.read())
    return {
        "exit_s": exit_s,
        "streams_running": num_running,
        "stream_ends": Counter([*(task.result() for task in ended), *[OPEN] * len(open_)]),
        "reason": reasons[-1] if reasons else "",
        "left": await asyncio.to_thread(footprint.wait_until_gone, SETTLE_S),
    }


async def read(server: Server, request: Request, num_chunks: list[int], index: int) -> str:
    """Read a long answer to its end and count its chunks; return how it ended."""
    request, reason = replace(request, prompt=request.prompt[index:]), None
    try:
        async with client_of(server.url) as client:
            arguments = request.arguments(ignore_eos=True)
            async for chunk in await client.completions.create(**arguments, stream=True):
                num_chunks[index] += 1
                reason = chunk.choices[0].finish_reason if chunk.choices else reason
    except Exception as error:  # the client has no class of its own for an error event of a stream
        return ERROR_EVENT if type(error) is openai.APIError else f"{type(error).__name__}: {error}"[:200]
    return ANSWER if reason else "without a reason"
