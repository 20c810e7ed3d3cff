# SPDX-License-Identifier: Apache-2.0
"""Bursts and lulls of requests, each in a task of its own."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence

import openai

from .asking import TIMEOUT_S, Answer, Outcome, ask, ask_and_hang_up
from .clock import sleep_until
from .requests import Request
from .servers import MODEL

CYCLE_S = 20.0
_BURST_SHARE = 0.4  # of a cycle's requests, which come at once
_LULL_S = 5.0  # at a cycle's end, in which none is sent
MOST_IN_FLIGHT = 64  # clients that wait for an answer; the next one waits for one of them
_LOWEST_PRIORITY = 3


def arrivals(requests_per_s: float, seed: int) -> Iterator[float]:
    """Seconds since the beginning at which requests are sent, without an end."""
    rng = random.Random(seed)
    begin_s = 0.0
    while True:
        count = max(1, round(CYCLE_S * requests_per_s))  # a cycle of none would follow the other for good
        burst = round(_BURST_SHARE * count)
        yield from [begin_s] * burst
        yield from sorted(begin_s + rng.uniform(0, CYCLE_S - _LULL_S) for _ in range(count - burst))
        begin_s += CYCLE_S


class Traffic:
    """Sends requests to a server and keeps what became of them.

    Args:
        url: of the server.
        requests: that are asked, in any order and each any number of times.
        now_s: seconds since the run began; see `Clock`.
    """

    def __init__(self, url: str, requests: Sequence[Request], now_s: Callable[[], float]) -> None:
        self._client = client_of(url)
        self._requests = requests
        self._now_s = now_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MOST_IN_FLIGHT)
        self.outcomes: list[Outcome] = []

    async def send(self, until_s: float, requests_per_s: float, seed: int = 0) -> None:
        """Send until that time, then wait for all answers."""
        rng = random.Random(seed)
        order: list[int] = []
        delay_s = 0.0  # of a server that is behind
        for arrival_s in arrivals(requests_per_s, seed):
            await sleep_until(arrival_s + delay_s, self._now_s)
            await self._slots.acquire()
            if self._now_s() > until_s:
                break
            delay_s = max(delay_s, self._now_s() - arrival_s)
            if not order:
                order = rng.sample(range(len(self._requests)), len(self._requests))
            task = asyncio.create_task(self._send(order.pop(), rng.getrandbits(32)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def ask_for_a_token(self) -> None:
        """One step more. vLLM's gauges are of its last step, which may be before a client hung up."""
        await ask(self._client, MODEL, Request("greedy", [5], max_tokens=1), stream=False)

    async def close(self) -> None:
        """All connections."""
        await self._client.close()

    async def _send(self, index: int, seed: int) -> None:
        request = self._requests[index]
        rng = random.Random(seed)
        outcome = Outcome(index, sent_s=self._now_s(), ended_s=0)
        try:
            if request.kind == "hangs up" and rng.random() < 0.8:
                await ask_and_hang_up(self._client, MODEL, request, seed)
                outcome.hung_up = True
            else:
                outcome.answer, outcome.first_s = await ask(
                    self._client,
                    MODEL,
                    request,
                    stream=rng.random() < 0.6,
                    now_s=self._now_s,
                    priority=rng.randint(0, _LOWEST_PRIORITY),
                )
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"[:500]
        outcome.ended_s = self._now_s()
        self.outcomes.append(outcome)
        self._slots.release()


def client_of(url: str) -> openai.AsyncOpenAI:
    """The official client, which asks once."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)


async def answers_of(url: str, requests: Sequence[Request], in_flight: int = 16) -> list[Answer | None]:
    """A server's answers to all greedy requests with two logprobs a token; None for the others."""
    slots = asyncio.Semaphore(in_flight)

    async def answer(request: Request) -> Answer | None:
        if not request.is_greedy:
            return None
        async with slots:
            most = max(2, request.options.get("logprobs", 0))
            return (await ask(client, MODEL, request, stream=False, logprobs=most))[0]

    async with client_of(url) as client:
        return list(await asyncio.gather(*map(answer, requests)))
