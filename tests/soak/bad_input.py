# SPDX-License-Identifier: Apache-2.0
"""Invalid input, each of which must get a 4xx."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from .requests import MAX_MODEL_LEN, MODEL

TIMEOUT_S = 120
EVERY_S = 1.5
MEGABYTES_10 = 10_000_000


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "import os", "max_tokens": 4, **fields}).encode()


# Bodies of POST /v1/completions.
BODIES: Mapping[str, Callable[[], bytes]] = {
    "prompt longer than the model": lambda: body(prompt=[5] * (MAX_MODEL_LEN + 1)),
    "prompt of the wrong type": lambda: body(prompt={"text": ["import os"]}),
    "no tokens": lambda: body(prompt=[]),
    "unknown tokens": lambda: body(prompt=[10**6, -3]),
    "negative max_tokens": lambda: body(max_tokens=-5),
    "too many logprobs": lambda: body(logprobs=10**9),
    "broken regular expression": lambda: body(structured_outputs={"regex": "(((["}),
    "broken schema": lambda: body(structured_outputs={"json": {"type": "nothing"}}),
    "broken JSON": lambda: body()[:-7],
    "endless nesting": lambda: b"[" * 200_000,
    "broken UTF-8": lambda: body().replace(b"import", b"im\xff\xfe\x80"),
    "10 MB of prompt": lambda: body(prompt="import os\n" * (MEGABYTES_10 // 10)),
    "10 MB of tokens": lambda: body(prompt=[5] * (MEGABYTES_10 // 3)),
    "10 MB of zeros": lambda: b"\x00" * MEGABYTES_10,
}
TYPES = tuple(BODIES)


def is_proper(answer: str) -> bool:
    return answer.startswith("4")


async def send_bad(url: str, type_: str) -> tuple[str, str]:
    """Send one type of bad input; return the type and the HTTP status or an error."""
    headers = {"Content-Type": "application/json"}
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            answer = await client.post(f"{url}/v1/completions", content=BODIES[type_](), headers=headers)
    except httpx.HTTPError as error:
        return type_, repr(error)
    return type_, str(answer.status_code)


async def send_bad_until(url: str, done: asyncio.Event) -> list[tuple[str, str]]:
    """Send all types in turn, one every `EVERY_S`; see `send_bad`."""
    sent: list[asyncio.Task[tuple[str, str]]] = []
    while not done.is_set():
        sent.append(asyncio.create_task(send_bad(url, TYPES[len(sent) % len(TYPES)])))
        await asyncio.sleep(EVERY_S)
    return list(await asyncio.gather(*sent))
