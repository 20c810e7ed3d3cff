# SPDX-License-Identifier: Apache-2.0
"""Requests through the official client in bursts and lulls, and comparison with plain decoding."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from .requests import Request

# Logprobs closer than this may swap if sums are computed in another order (float32).
ROUNDING = 1e-4
# For logprobs of the same tokens with and without speculation (float32).
MAX_LOGPROB_DIFFERENCE = 1e-3
TIMEOUT_S = 300  # after which an answer is lost
CYCLE_S, LULL_S = 20.0, 5.0
BURST_SHARE = 0.4  # of a cycle's requests, sent at once
MAX_IN_FLIGHT = 64
LOWEST_PRIORITY = 3


@dataclass
class Answer:
    tokens: list[list[int]]
    texts: list[str]
    finish_reasons: list[str | None]
    # The best of each token of the first completion, descending, if requested.
    logprobs: list[Sequence[float]] = field(default_factory=list)


@dataclass
class Outcome:
    request: int  # index
    answer: Answer | None = None
    hung_up: bool = False
    error: str = ""


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)


async def ask(client: openai.AsyncOpenAI, request: Request, *, stream: bool = False, **more: Any) -> Answer:
    """Return the whole answer; `more` are fields of the body."""
    arguments = request.arguments(**more)
    if stream:
        chunks = [chunk async for chunk in await client.completions.create(**arguments, stream=True)]
    else:
        chunks = [await client.completions.create(**arguments)]
    number = request.num_answers
    answer = Answer([[] for _ in range(number)], [""] * number, [None] * number)
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        index = choice.index
        answer.tokens[index] += (choice.model_extra or {}).get("token_ids") or []
        answer.texts[index] += choice.text
        answer.finish_reasons[index] = choice.finish_reason or answer.finish_reasons[index]
        if index == 0 and choice.logprobs and choice.logprobs.top_logprobs:
            for by_token in choice.logprobs.top_logprobs:
                answer.logprobs.append(sorted((by_token or {}).values(), reverse=True))
    return answer


async def ask_and_hang_up(client: openai.AsyncOpenAI, request: Request, rng: random.Random) -> None:
    """Close the connection after some chunks, or before the first one."""
    if rng.random() < 0.3:
        task = asyncio.create_task(client.completions.create(**request.arguments()))
        await asyncio.wait([task], timeout=rng.uniform(0.01, 1))
        if task.done():
            task.result()  # raises the server's error
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return
    async with await client.completions.create(**request.arguments(), stream=True) as chunks:
        left = rng.randint(1, 12)
        async for _ in chunks:
            left -= 1
            if left == 0:
                return


def gaps_s(requests_per_s: float, rng: random.Random) -> Iterator[float]:
    """Yield the seconds before each request: every cycle is a burst, a trickle and a lull."""
    previous_s = 0.0
    while True:
        count = max(1, round(CYCLE_S * requests_per_s))
        burst = round(BURST_SHARE * count)
        trickle = sorted(rng.uniform(0, CYCLE_S - LULL_S) for _ in range(count - burst))
        for at_s in [0.0] * burst + trickle:
            yield at_s - previous_s
            previous_s = at_s
        previous_s -= CYCLE_S


class Traffic:
    """Sends requests to a server repeatedly and keeps their outcomes."""

    def __init__(self, url: str, requests: Sequence[Request]) -> None:
        self._client = client_of(url)
        self._requests = requests
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self.outcomes: list[Outcome] = []

    async def send(self, requests_per_s: float, seed: int, done: asyncio.Event) -> None:
        """Send until `done`, then wait for all answers."""
        rng = random.Random(seed)
        order: list[int] = []
        async with asyncio.TaskGroup() as tasks:
            for gap_s in gaps_s(requests_per_s, rng):
                await asyncio.sleep(gap_s)
                await self._slots.acquire()
                if done.is_set():
                    return
                order = order or rng.sample(range(len(self._requests)), len(self._requests))
                tasks.create_task(self._send(order.pop(), random.Random(rng.getrandbits(32))))

    async def _send(self, index: int, rng: random.Random) -> None:
        request, outcome = self._requests[index], Outcome(index)
        try:
            if request.type == "hang-up" and rng.random() < 0.8:
                await ask_and_hang_up(self._client, request, rng)
                outcome.hung_up = True
            else:
                stream, priority = rng.random() < 0.6, rng.randint(0, LOWEST_PRIORITY)
                outcome.answer = await ask(self._client, request, stream=stream, priority=priority)
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"[:500]
        self.outcomes.append(outcome)
        self._slots.release()

    async def run_steps(self, number: int) -> None:
        await ask(self._client, Request("greedy", [5], max_tokens=number))

    async def close(self) -> None:
        await self._client.close()


async def plain_answers(url: str, requests: Sequence[Request]) -> list[Answer | None]:
    """Return answers to all greedy requests with at least two logprobs per token; None for others."""
    slots = asyncio.Semaphore(16)

    async def answer(request: Request) -> Answer | None:
        if not request.is_greedy:
            return None
        async with slots:
            return await ask(client, request, logprobs=max(2, request.options.get("logprobs", 0)))

    async with client_of(url) as client:
        return list(await asyncio.gather(*map(answer, requests)))


def compare(plain: Answer, got: Answer) -> str:
    """Compare a greedy answer with plain decoding's: "same", "rounding" or "differs".

    Plain answers have logprobs; they are compared up to the first different token if both have them.
    """
    (expected,), (tokens,) = plain.tokens, got.tokens
    num_common = min(len(expected), len(tokens))
    first = next((i for i in range(num_common) if expected[i] != tokens[i]), num_common)
    if any(
        abs(one - other) > MAX_LOGPROB_DIFFERENCE
        for ours, theirs in zip(plain.logprobs[: first + 1], got.logprobs, strict=False)
        for one, other in zip(ours, theirs, strict=False)
    ):
        return "differs"
    if plain.tokens == got.tokens and plain.texts == got.texts:
        return "same" if plain.finish_reasons == got.finish_reasons else "differs"
    if first == num_common or first >= len(plain.logprobs):
        return "differs"
    best, second = plain.logprobs[first][:2]
    return "rounding" if best - second < ROUNDING else "differs"


def missing_part(request: Request, answer: Answer) -> str:
    """Return the part of the requested answer that is missing; "": none."""
    if None in answer.finish_reasons:
        return "a finish reason"
    lengths = [len(tokens) for tokens in answer.tokens]
    for length, reason in zip(lengths, answer.finish_reasons, strict=True):
        is_full = length == request.max_tokens
        if not 0 < length <= request.max_tokens or (reason == "length" and not is_full):
            return f"tokens: {lengths} of {request.max_tokens}, {answer.finish_reasons}"
    num_best = request.options.get("logprobs", 0)
    if num_best and len(answer.logprobs) != lengths[0]:
        return f"logprobs: {len(answer.logprobs)} of {lengths[0]}"
    if any(len(best) < num_best for best in answer.logprobs):
        return f"logprobs of a token: {min(map(len, answer.logprobs))} of {num_best}"
    return ""
