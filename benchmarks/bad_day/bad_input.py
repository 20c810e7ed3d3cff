# SPDX-License-Identifier: Apache-2.0
"""Input that no server can answer, by raw sockets: each gets a 4xx; what is no request may be closed."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .requests import MAX_MODEL_LEN
from .servers import MODEL

TIMEOUT_S = 120  # until an answer
CLOSED = "closed"
_MEGABYTES = 10
_SLOW_S = 6.0


@dataclass(frozen=True)
class Rejection:
    """What became of bad input."""

    kind: str
    answer: str
    """The status of HTTP, or `CLOSED`; or why there was neither."""
    seconds: float

    @property
    def is_proper(self) -> bool:
        return self.answer.startswith("4") or (self.answer == CLOSED and self.kind in MAY_CLOSE)


def _body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "import os", "max_tokens": 4, **fields}).encode()


# Bodies of POST /v1/completions.
BODIES: Mapping[str, Callable[[], bytes]] = {
    "prompt longer than the model": lambda: _body(prompt=[5] * (MAX_MODEL_LEN + 1)),
    "prompt of the wrong type": lambda: _body(prompt={"text": ["import os"]}),
    "no tokens": lambda: _body(prompt=[]),
    "token that is none": lambda: _body(prompt=[10**6, -3]),
    "max_tokens of the wrong type": lambda: _body(max_tokens="many"),
    "negative max_tokens": lambda: _body(max_tokens=-5),
    "temperature of the wrong type": lambda: _body(temperature=["hot"]),
    "temperature below zero": lambda: _body(temperature=-1),
    "n of the wrong size": lambda: _body(n=-1),
    "too many logprobs": lambda: _body(logprobs=10**9),
    "stop of the wrong type": lambda: _body(stop={"at": 5}),
    "priority of the wrong type": lambda: _body(priority="first"),
    "broken regular expression": lambda: _body(structured_outputs={"regex": "(((["}),
    "broken schema": lambda: _body(structured_outputs={"json": {"type": "nothing"}}),
    "unknown model": lambda: _body(model="of-somebody-else"),
    "broken JSON": lambda: _body()[:-7],
    "not an object": lambda: b'["import os"]',
    "nested without an end": lambda: b"[" * 200_000,
    "broken UTF-8": lambda: _body().replace(b"import", b"im\xff\xfe\x80"),
    "10 MB of prompt": lambda: _body(prompt="import os\n" * (_MEGABYTES * 100_000)),
    "10 MB of tokens": lambda: _body(prompt=[5] * (_MEGABYTES * 10**6 // 3)),
    "10 MB of nothing": lambda: b"\x00" * (_MEGABYTES * 10**6),
}
_NO_BODY = "body that never comes"
_NOT_HTTP = "not HTTP"
_GOOD = "health"  # what others ask meanwhile
KINDS = (*BODIES, _NOT_HTTP, "unknown path", "wrong method", _NO_BODY, "slow sender")
MAY_CLOSE = (_NO_BODY, _NOT_HTTP)  # instead of an answer: there is no whole request


async def send_bad(url: str, kind: str) -> Rejection:
    """Send one kind of bad input and see what comes."""
    began = time.monotonic()
    try:
        answer = await asyncio.wait_for(_send(url, kind), TIMEOUT_S)
    except TimeoutError:
        answer = f"nothing in {TIMEOUT_S} s"
    except ConnectionError:
        answer = CLOSED
    return Rejection(kind, answer, time.monotonic() - began)


async def _send(url: str, kind: str) -> str:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        async for part in _parts(kind):
            writer.write(part)
            await writer.drain()
        return await (_give_up(url, reader, writer) if kind == _NO_BODY else _status(reader))
    finally:
        writer.close()


async def _status(reader: asyncio.StreamReader) -> str:
    line = (await reader.readline()).decode(errors="replace").split()
    return line[1] if len(line) > 1 else CLOSED


async def _give_up(url: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """After a while. Others have to get theirs meanwhile, and the server has to let go."""
    with suppress(TimeoutError):  # uvicorn waits for a body as long as it takes
        return await asyncio.wait_for(_status(reader), _SLOW_S)
    others = await _send(url, _GOOD)
    if others != "200":
        return f"others got {others}"
    try:
        writer.write_eof()
    except OSError:  # there is no connection any more
        return CLOSED
    return await _status(reader)


async def _parts(kind: str) -> AsyncIterator[bytes]:
    """What is sent, piece by piece."""
    if kind == _NOT_HTTP:
        yield b"\x16\x03\x01\xff\xfe\x00 hello\r\n\r\n"
    elif kind == "unknown path":
        yield b"GET /v1/secrets HTTP/1.1\r\nHost: here\r\n\r\n"
    elif kind == "wrong method":
        yield b"DELETE /v1/completions HTTP/1.1\r\nHost: here\r\n\r\n"
    elif kind == _GOOD:
        yield b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
    elif kind == _NO_BODY:
        yield _head(1000)
    elif kind == "slow sender":
        body = _body(temperature="cold")
        yield _head(len(body))
        for begin in range(len(body)):
            yield body[begin : begin + 1]
            await asyncio.sleep(_SLOW_S / len(body))
    else:
        body = BODIES[kind]()
        yield _head(len(body)) + body


def _head(num_bytes: int) -> bytes:
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: here",
        "Content-Type: application/json",
        f"Content-Length: {num_bytes}",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def send_bad_until(
    url: str, every_s: float, until_s: float, now_s: Callable[[], float]
) -> list[Rejection]:
    """All kinds in turn, one every so many seconds, until a time of that clock."""
    sent: list[asyncio.Task[Rejection]] = []
    while now_s() < until_s:
        sent.append(asyncio.create_task(send_bad(url, KINDS[len(sent) % len(KINDS)])))
        await asyncio.sleep(every_s)
    return list(await asyncio.gather(*sent))
