# SPDX-License-Identifier: Apache-2.0
"""One request through the official client, and how its answer compares with plain decoding's."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from .requests import Request

# Where two logprobs are closer, other sums of the same numbers may change their order (float32).
ROUNDING = 1e-4
# Between plain decoding's logprobs and those with speculation, of the same tokens (float32).
MOST_LOGPROBS_DIFFER = 1e-3
TIMEOUT_S = 300  # of an answer, after which it is lost


@dataclass
class Answer:
    """What a server answered to one request."""

    tokens: list[list[int]]
    """Of each completion."""
    texts: list[str]
    finish_reasons: list[str | None]
    logprobs: list[Sequence[float]] = field(default_factory=list)
    """Of the first completion: the best of each token, falling; where they were asked for."""


@dataclass
class Outcome:
    """What became of a request. Times are seconds since the run began."""

    request: int  # its index
    sent_s: float
    ended_s: float
    first_s: float | None = None
    """When the first token came; None: it was not streamed, or none came."""
    answer: Answer | None = None
    hung_up: bool = False
    error: str = ""
    """Why there is no answer."""

    @property
    def is_lost(self) -> bool:
        return self.answer is None and not self.hung_up


async def ask(
    client: openai.AsyncOpenAI,
    model: str,
    request: Request,
    *,
    stream: bool,
    now_s: Callable[[], float] = time.monotonic,
    **more: Any,
) -> tuple[Answer, float | None]:
    """The whole answer, and when its first token came.

    Args:
        client: of the server.
        model: its name there.
        request: what is asked.
        stream: the answer comes token by token.
        now_s: tells when the first one came.
        more: fields of the body.
    """
    body = request.body(model, **more)
    known = {name: body.pop(name) for name in ("model", "prompt", "max_tokens", "temperature")}
    chunks = []
    first_s = None
    if stream:
        async for chunk in await client.completions.create(**known, stream=True, extra_body=body):
            first_s = first_s or now_s()
            chunks.append(chunk)
    else:
        chunks.append(await client.completions.create(**known, extra_body=body))
    return _joined(chunks, request.num_answers), first_s


async def ask_and_hang_up(client: openai.AsyncOpenAI, model: str, request: Request, seed: int) -> None:
    """Close the connection after some chunks, or before the first of them."""
    rng = random.Random(seed)
    body = request.body(model)
    known = {name: body.pop(name) for name in ("model", "prompt", "max_tokens", "temperature")}
    if rng.random() < 0.3:  # while the prompt is read, or waits
        asked = asyncio.create_task(client.completions.create(**known, extra_body=body))
        await asyncio.wait([asked], timeout=rng.uniform(0.01, 1))
        if asked.done():
            asked.result()  # an error is the server's, not the client's that hangs up
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        return
    async with await client.completions.create(**known, stream=True, extra_body=body) as chunks:
        left = rng.randint(1, 12)
        async for _ in chunks:
            left -= 1
            if left == 0:
                return


def _joined(chunks: Sequence[Any], num_answers: int) -> Answer:
    answer = Answer([[] for _ in range(num_answers)], [""] * num_answers, [None] * num_answers)
    for chunk in chunks:
        for choice in chunk.choices:
            answer.tokens[choice.index] += (choice.model_extra or {}).get("token_ids") or []
            answer.texts[choice.index] += choice.text
            answer.finish_reasons[choice.index] = (
                choice.finish_reason or answer.finish_reasons[choice.index]
            )
            if choice.index == 0 and choice.logprobs and choice.logprobs.top_logprobs:
                for of_token in choice.logprobs.top_logprobs:
                    answer.logprobs.append(sorted((of_token or {}).values(), reverse=True))
    return answer


def compare(plain: Answer, got: Answer) -> str:
    """How a greedy answer stands to plain decoding's: "same", "rounding" or "differs".

    Logprobs count as far as both have them, and up to the first token that is another: what is behind it
    has another context.

    Args:
        plain: with logprobs.
        got: with speculation.
    """
    (expected,), (tokens,) = plain.tokens, got.tokens
    num_common = min(len(expected), len(tokens))
    first = next((i for i in range(num_common) if expected[i] != tokens[i]), num_common)
    if any(
        abs(one - other) > MOST_LOGPROBS_DIFFER
        for of_plain, of_got in zip(plain.logprobs[: first + 1], got.logprobs, strict=False)
        for one, other in zip(of_plain, of_got, strict=False)
    ):
        return "differs"
    if plain.tokens == got.tokens and plain.texts == got.texts:
        return "same" if plain.finish_reasons == got.finish_reasons else "differs"
    if first == num_common or first >= len(plain.logprobs):
        return "differs"
    best, second = plain.logprobs[first][:2]
    return "rounding" if best - second < ROUNDING else "differs"


def why_incomplete(request: Request, answer: Answer) -> str:
    """What an answer lacks of what was asked for; nothing: ""."""
    if None in answer.finish_reasons:
        return "ended without a reason"
    if not all(0 < len(tokens) <= request.max_tokens for tokens in answer.tokens):
        return f"{[len(tokens) for tokens in answer.tokens]} tokens of {request.max_tokens}"
    for tokens, reason in zip(answer.tokens, answer.finish_reasons, strict=True):
        if reason == "length" and len(tokens) != request.max_tokens:
            return f"ended for its length with {len(tokens)} tokens of {request.max_tokens}"
    if "logprobs" in request.options and len(answer.logprobs) != len(answer.tokens[0]):
        return f"{len(answer.logprobs)} logprobs of {len(answer.tokens[0])} tokens"
    num_best = request.options.get("logprobs", 0)
    if any(len(of_token) < num_best for of_token in answer.logprobs):
        return f"{min(map(len, answer.logprobs))} of the {num_best} best logprobs of a token"
    return ""
