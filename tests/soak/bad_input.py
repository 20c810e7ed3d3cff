# SPDX-License-Identifier: Apache-2.0
"""Invalid input over raw sockets: each must get a 4xx, or a closed connection if it is no whole request."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from .requests import MAX_MODEL_LEN, MODEL

TIMEOUT_S = 120
EVERY_S = 1.5
SLOW_S = 6.0
CLOSED = "closed"
MEGABYTES_10 = 10_000_000


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "import os", "max_tokens": 4, **fields}).encode()


# Bodies of POST /v1/completions.
BODIES: Mapping[str, Callable[[], bytes]] = {
    "prompt longer than the model": lambda: body(prompt=[5] * (MAX_MODEL_LEN + 1)),
    "prompt of the wrong type": lambda: body(prompt={"text": ["import os"]}),
    "no tokens": lambda: body(prompt=[]),
    "unknown tokens": lambda: body(prompt=[10**6, -3]),
    "max_tokens of the wrong type": lambda: body(max_tokens="many"),
    "negative max_tokens": lambda: body(max_tokens=-5),
    "temperature of the wrong type": lambda: body(temperature=["hot"]),
    "temperature below zero": lambda: body(temperature=-1),
    "negative n": lambda: body(n=-1),
    "too many logprobs": lambda: body(logprobs=10**9),
    "stop of the wrong type": lambda: body(stop={"at": 5}),
    "priority of the wrong type": lambda: body(priority="first"),
    "broken regular expression": lambda: body(structured_outputs={"regex": "(((["}),
    "broken schema": lambda: body(structured_outputs={"json": {"type": "nothing"}}),
    "unknown model": lambda: body(model="of-somebody-else"),
    "broken JSON": lambda: body()[:-7],
    "not an object": lambda: b'["import os"]',
    "endless nesting": lambda: b"[" * 200_000,
    "broken UTF-8": lambda: body().replace(b"import", b"im\xff\xfe\x80"),
    "10 MB of prompt": lambda: body(prompt="import os\n" * (MEGABYTES_10 // 10)),
    "10 MB of tokens": lambda: body(prompt=[5] * (MEGABYTES_10 // 3)),
    "10 MB of zeros": lambda: b"\x00" * MEGABYTES_10,
}
NO_BODY, NOT_HTTP, SLOW = "missing body", "not HTTP", "slow sender"
RAW: Mapping[str, bytes] = {
    "health": b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n",  # good input
    NOT_HTTP: b"\x16\x03\x01\xff\xfe\x00 hello\r\n\r\n",
    "unknown path": b"GET /v1/secrets HTTP/1.1\r\nHost: here\r\n\r\n",
    "wrong method": b"DELETE /v1/completions HTTP/1.1\r\nHost: here\r\n\r\n",
}
TYPES = (*BODIES, *list(RAW)[1:], NO_BODY, SLOW)
MAY_CLOSE = (NO_BODY, NOT_HTTP)


def is_proper(type_: str, answer: str) -> bool:
    return answer.startswith("4") or (answer == CLOSED and type_ in MAY_CLOSE)


async def send_bad(url: str, type_: str) -> tuple[str, str]:
    """Send one type of bad input; return the type and the HTTP status, `CLOSED` or an error."""
    try:
        return type_, await asyncio.wait_for(exchange(url, type_), TIMEOUT_S)
    except TimeoutError:
        return type_, f"nothing in {TIMEOUT_S} s"
    except ConnectionError:
        return type_, CLOSED


async def send_bad_until(url: str, done: asyncio.Event) -> list[tuple[str, str]]:
    """Send all types in turn, one every `EVERY_S`; see `send_bad`."""
    sent: list[asyncio.Task[tuple[str, str]]] = []
    while not done.is_set():
        sent.append(asyncio.create_task(send_bad(url, TYPES[len(sent) % len(TYPES)])))
        await asyncio.sleep(EVERY_S)
    return list(await asyncio.gather(*sent))


async def exchange(url: str, type_: str) -> str:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        async for part in parts(type_):
            writer.write(part)
            await writer.drain()
        return await (give_up(url, reader, writer) if type_ == NO_BODY else status(reader))
    finally:
        writer.close()


async def status(reader: asyncio.StreamReader) -> str:
    line = (await reader.readline()).decode(errors="replace").split()
    return line[1] if len(line) > 1 else CLOSED


async def give_up(url: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Send no body: others must be served meanwhile, and then the server must close the connection."""
    with suppress(TimeoutError):  # uvicorn waits for a body without limit
        return await asyncio.wait_for(status(reader), SLOW_S)
    others = await exchange(url, "health")
    if others != "200":
        return f"others got {others}"
    try:
        writer.write_eof()
    except OSError:  # not connected any more
        return CLOSED
    return await status(reader)


async def parts(type_: str) -> AsyncIterator[bytes]:
    if type_ in RAW:
        yield RAW[type_]
    elif type_ == NO_BODY:
        yield head(1000)
    elif type_ == SLOW:
        slow = body(temperature="cold")
        yield head(len(slow))
        for begin in range(len(slow)):
            yield slow[begin : begin + 1]
            await asyncio.sleep(SLOW_S / len(slow))
    else:
        whole = BODIES[type_]()
        yield head(len(whole)) + whole


def head(num_bytes: int) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: here", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {num_bytes}", "", ""]).encode()
