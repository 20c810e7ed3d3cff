# SPDX-License-Identifier: Apache-2.0
"""Engines that serve a trace, step by step, in simulated time.

Each replica schedules as vLLM's V1 scheduler does (0.32, first come first served): requests that run get
their tokens first, in the order they came; what is left of `max_num_batched_tokens` goes to waiting
prompts, chunk by chunk; a request is admitted once blocks for its whole prompt are free; where no block is
left, the latest request is preempted and begins again, without its K/V. A step takes as long as
`EngineTimes` say and all replicas are alike. An API server is a delay before the engine. What is left out:
prefix caching, the network.
"""

import itertools
import math
import random
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from vllm_magicdec.planner.console import UserError, require
from vllm_magicdec.planner.engine_times import EngineTimes, Work, pairs_of
from vllm_magicdec.planner.traces import Arrival

# Gaps between tokens are counted by their logarithm: a bin is that share of its value wide.
_GAP_BIN = 0.01
_in_flight = attrgetter("in_flight")


@dataclass(frozen=True)
class Limits:
    """What an engine holds and does at most, by vLLM's names."""

    kv_tokens: int  # K/V entries in memory
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16

    @property
    def num_blocks(self) -> int:
        """Of `block_size` tokens each."""
        return self.kv_tokens // self.block_size

    def blocks(self, tokens: int) -> int:
        """That hold so many tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True)
class Speculation:
    """Drafts per round, and the probability that at least the first 1, 2, ... of them stand.

    Raises:
        ValueError: the probabilities are not one per draft, or grow.
    """

    standing: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        chances = (1.0, *self.standing, 0.0)
        if not all(after <= before for before, after in itertools.pairwise(chances)):
            raise ValueError(f"{self.standing} are no probabilities of longer and longer prefixes")

    @classmethod
    def of(cls, drafts: int, alpha: float) -> "Speculation":
        """Each draft stands with probability alpha if those before it do."""
        return cls(tuple(alpha**number for number in range(1, drafts + 1)))

    @property
    def drafts(self) -> int:
        """Per round; 0: plain decoding."""
        return len(self.standing)

    @property
    def acceptance_length(self) -> float:
        """Expected tokens of a round."""
        return 1 + sum(self.standing)


PLAIN = Speculation()


class Request:
    """A request on its way through an engine."""

    __slots__ = (
        *("arrival", "blocks", "computed", "decodes", "drafts", "first_s", "last_s", "produced"),
        "to_compute",
    )

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.blocks = 0
        self.produced = 0  # tokens that the client has
        self.first_s = math.nan  # when the client got the first one
        self.last_s = math.nan
        self.begin_again()

    def begin_again(self) -> None:
        """Without K/V."""
        self.computed = 0
        self.decodes = False  # its prompt has been computed
        self.drafts = 0  # to be verified in the next step
        # As a prompt: what the client has counts as prompt after a preemption.
        self.to_compute = self.arrival.prompt_tokens + self.produced


@dataclass
class Finished:
    """What became of a request. Times in seconds of the simulation."""

    arrival: Arrival
    replica: int
    first_s: float  # its first token
    end_s: float  # its last

    @property
    def ttft_s(self) -> float:
        """To the first token."""
        return self.first_s - self.arrival.arrival_s

    @property
    def tpot_s(self) -> float:
        """Per token after the first, nan without one."""
        later = self.arrival.output_tokens - 1
        return (self.end_s - self.first_s) / later if later else math.nan

    @property
    def e2e_s(self) -> float:
        """From arrival to the end."""
        return self.end_s - self.arrival.arrival_s


@dataclass
class Outcome:
    """All that happened."""

    finished: list[Finished]
    steps: int = 0
    preemptions: int = 0
    busy_s: float = 0.0  # of all replicas
    decoding_steps: int = 0  # sum over steps of requests that decode
    rounds: int = 0  # request-steps that verified drafts
    accepted: int = 0  # drafts
    gaps: Counter[int] = field(default_factory=Counter)  # between a request's outputs, by logarithmic bin
    events: int = 0  # steps and arrivals
    wall_s: float = 0.0  # that the simulation took

    def gap_s(self, percent: float) -> float:
        """A percentile of the times between a request's outputs (vLLM's ITL), to 1 %; nan without any."""
        wanted, seen = percent / 100 * self.gaps.total(), 0
        for number in sorted(self.gaps):
            seen += self.gaps[number]
            if seen >= wanted:
                return math.exp((number + 0.5) * _GAP_BIN)
        return math.nan


class Replica:
    """One engine.

    Args:
        environment: simpy's.
        number: which of the replicas it is.
    """

    def __init__(
        self,
        environment: Any,
        number: int,
        times: EngineTimes,
        limits: Limits,
        speculation: Speculation,
        rng: random.Random,
        outcome: Outcome,
    ) -> None:
        self.environment = environment
        self.number = number
        self.in_flight = 0
        self._times, self._limits, self._rng, self._outcome = times, limits, rng, outcome
        self._drafts = speculation.drafts
        self._standing = [-chance for chance in speculation.standing]  # ascending, to be bisected
        self._free = limits.num_blocks
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._wake = environment.event()
        environment.process(self._serve())

    def add(self, arrival: Arrival) -> None:
        """A request comes."""
        self.in_flight += 1
        self._waiting.append(Request(arrival))
        if not self._wake.triggered:
            self._wake.succeed()

    @property
    def free_blocks(self) -> int:
        """That hold nothing."""
        return self._free

    def _serve(self) -> Generator[Any, Any, None]:
        while True:
            if not self._waiting and not self._running:
                self._wake = self.environment.event()
                yield self._wake
            scheduled = self._schedule()
            if not scheduled:  # the only request was preempted for drafts past its end; it begins again
                continue
            seconds = self._times.seconds(self._work(scheduled))
            outcome = self._outcome
            outcome.steps += 1
            outcome.busy_s += seconds
            yield self.environment.timeout(seconds)
            self._finish_step(scheduled)

    # ---- what vLLM's scheduler does

    def _schedule(self) -> list[tuple[Request, int]]:
        """Requests of the next step and how many tokens of each it computes."""
        left = self._limits.max_num_batched_tokens
        scheduled: list[tuple[Request, int]] = []
        preempted = False
        place = 0
        while place < len(self._running) and left > 0:
            request = self._running[place]
            tokens = min(request.to_compute - request.computed + request.drafts, left)
            while not self._allocate(request, tokens):
                preempted = True
                latest = self._running.pop()
                self._preempt(latest)
                if latest is request:
                    break
            else:
                scheduled.append((request, tokens))
                left -= tokens
                place += 1
                continue
            break
        # Requests behind it were preempted before it, so those that are scheduled all still run.
        while self._waiting and left > 0 and not preempted:
            request = self._waiting[0]
            if len(self._running) >= self._limits.max_num_seqs or not self._fits(request):
                break
            self._waiting.popleft()
            self._running.append(request)
            tokens = min(request.to_compute, left)
            self._allocate(request, tokens)
            scheduled.append((request, tokens))
            left -= tokens
        return scheduled

    def _fits(self, request: Request) -> bool:
        """Whether its whole prompt does, which vLLM asks before it admits a request."""
        return self._limits.blocks(request.to_compute + self._drafts) <= self._free

    def _allocate(self, request: Request, tokens: int) -> bool:
        """Blocks for so many more tokens, and for the drafts that follow; False: there are too few."""
        needed = self._limits.blocks(request.computed + tokens + self._drafts) - request.blocks
        if needed > self._free:
            return False
        if needed > 0:
            self._free -= needed
            request.blocks += needed
        return True

    def _release(self, request: Request) -> None:
        self._free += request.blocks
        request.blocks = 0

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.begin_again()
        self._waiting.appendleft(request)
        self._outcome.preemptions += 1

    # ---- a step

    def _work(self, scheduled: list[tuple[Request, int]]) -> Work:
        decoding = context = verified = prompt_tokens = drafting = drafting_tokens = 0
        pairs = 0.0
        for request, tokens in scheduled:
            if request.decodes:
                decoding += 1
                context += request.computed
                verified += tokens - 1
                drafting += 1
                drafting_tokens += request.computed
            else:
                prompt_tokens += tokens
                pairs += pairs_of(tokens, request.computed)
                if tokens == request.to_compute - request.computed:
                    drafting += 1
                    drafting_tokens += request.to_compute
        mean = verified / decoding if decoding else 0.0
        self._outcome.decoding_steps += decoding
        return Work(decoding, context, mean, prompt_tokens, pairs, drafting, self._drafts, drafting_tokens)

    def _finish_step(self, scheduled: list[tuple[Request, int]]) -> None:
        now = self.environment.now
        ended = False
        for request, tokens in scheduled:
            left = request.to_compute - request.computed
            if tokens < left:
                request.computed += tokens
                continue
            verified = tokens - left
            accepted = verified and min(verified, self._accepted())
            new = min(accepted + 1, request.arrival.output_tokens - request.produced)
            request.computed += left + new - 1
            request.produced += new
            request.to_compute = request.computed + 1
            request.decodes = True
            request.drafts = self._drafts
            if verified:
                self._outcome.rounds += 1
                self._outcome.accepted += accepted
            if math.isnan(request.first_s):
                request.first_s = now
            else:
                self._outcome.gaps[math.floor(math.log(max(now - request.last_s, 1e-9)) / _GAP_BIN)] += 1
            request.last_s = now
            if request.produced == request.arrival.output_tokens:
                self._end(request)
                ended = True
        if ended:
            self._running = [request for request in self._running if request.blocks]

    def _accepted(self) -> int:
        """Drafts of a round that stand."""
        return bisect_left(self._standing, -self._rng.random())

    def _end(self, request: Request) -> None:
        self._release(request)
        self.in_flight -= 1
        self._outcome.finished.append(
            Finished(request.arrival, self.number, request.first_s, self.environment.now)
        )


def simulate(
    arrivals: Sequence[Arrival],
    times: EngineTimes,
    limits: Limits,
    speculation: Speculation = PLAIN,
    replicas: int = 1,
    seed: int = 0,
    frontend_s: float = 0.0,
) -> Outcome:
    """Serve a trace to its end. Every request goes to the replica that has the fewest in flight.

    Args:
        arrivals: ordered by arrival.
        seed: of what is accepted.
        frontend_s: from a request's arrival until an engine has it: HTTP, tokenisation.

    Raises:
        UserError: a request would never fit, or simpy is not installed.
    """
    longest = max(arrivals, key=lambda arrival: arrival.prompt_tokens + arrival.output_tokens)
    most = longest.prompt_tokens + longest.output_tokens + speculation.drafts
    if limits.blocks(most) > limits.num_blocks:
        raise UserError(
            f"a request of {most:,} tokens does not fit into K/V memory for {limits.kv_tokens:,}; "
            "say more --kv-tokens or shorter requests"
        )
    started_s = time.perf_counter()
    environment = require("simpy").Environment()
    outcome = Outcome([])
    engines = [
        Replica(environment, n, times, limits, speculation, random.Random(f"{seed} {n}"), outcome)
        for n in range(replicas)
    ]
    environment.process(_arrive(environment, arrivals, engines, frontend_s))
    environment.run()
    outcome.events = outcome.steps + len(arrivals)
    outcome.wall_s = time.perf_counter() - started_s
    return outcome


def _arrive(
    environment: Any, arrivals: Iterable[Arrival], engines: Sequence[Replica], frontend_s: float
) -> Generator[Any, Any, None]:
    for arrival in arrivals:
        in_engine_s = arrival.arrival_s + frontend_s
        if in_engine_s > environment.now:
            yield environment.timeout(in_engine_s - environment.now)
        min(engines, key=_in_flight).add(arrival)
