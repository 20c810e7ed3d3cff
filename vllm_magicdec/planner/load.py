# SPDX-License-Identifier: Apache-2.0
"""How many requests in flight, devices and replicas a load needs: `magicdec plan --load`.

An engine that always has N requests in flight spends, per request of `prompt` and `output` tokens,

    P + output * t(N) / N

of its time, P for the prompt and t(N) the time that all N take per token (a plain step; a round by its
tokens). So it serves lambda(N) = 1 / (P + output * t(N) / N) requests per second, each of them takes
N / lambda(N) (Little 1961), and the most is reached with as many as memory holds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_magicdec.planner.performance import Deployment, tokens_per_round


@dataclass(frozen=True)
class Served:
    """What a load needs, with or without drafts. Times in milliseconds."""

    method: str
    prompt: int  # tokens
    output: int  # tokens
    gamma: int  # 0: plain decoding
    budget: int  # tokens that a draft step reads; 0: plain decoding
    most_in_flight: int  # requests that one replica's memory holds, or `max_num_seqs`
    most_per_s: float  # requests that one replica serves with them
    replicas: int  # 0: not even one request fits
    devices: int
    in_flight: float  # requests, in all replicas
    ttft_ms: float  # without queueing
    tpot_ms: float
    e2e_ms: float

    @property
    def fits(self) -> bool:
        """Whether a replica can serve a request at all."""
        return self.replicas > 0


@dataclass(frozen=True)
class Replica:
    """One engine with N requests in flight, of `prompt` and `output` tokens each.

    Attributes:
        gamma: drafts of a round; 0: plain decoding.
    """

    deployment: Deployment
    prompt: int
    output: int
    gamma: int = 0
    budget: int = 0
    alpha: float = 0.0

    @property
    def prompt_ms(self) -> float:
        """P: the target's pass, and a draft model's own."""
        pairs = self.prompt * (self.prompt + 1) / 2
        own = self.deployment.draft_prompt_ms(self.prompt, pairs) if self.gamma else 0.0
        return self.deployment.prompt_ms(self.prompt) + own

    def token_ms(self, in_flight: int) -> float:
        """t(N): half of the output is there on average."""
        context = self.prompt + self.output // 2
        if not self.gamma:
            return self.deployment.plain_step_ms(in_flight, context)
        one_round = self.deployment.round_ms(self.gamma, in_flight, context, self.budget)
        return one_round / tokens_per_round(self.gamma, self.alpha)

    def busy_ms(self, in_flight: int) -> float:
        """Of the engine's time, per request."""
        return self.prompt_ms + self.output * self.token_ms(in_flight) / in_flight

    def most_in_flight(self, max_num_seqs: int) -> int:
        """Requests that memory holds when all are at their longest."""
        longest = self.prompt + self.output + (self.gamma + 1 if self.gamma else 0)
        deployment = self.deployment if self.gamma else self.deployment.without_draft
        return min(max_num_seqs, deployment.kv_capacity_tokens(longest) // longest)

    def needed_in_flight(self, most: int, per_s: float) -> int:
        """The fewest requests in flight with which it serves so many per second; `most` where none do."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if 1e3 / self.busy_ms(middle) >= per_s else (middle + 1, high)
        return low


def serve_load(
    replica: Replica, method: str, load: float, max_num_seqs: int, utilization: float, max_tpot_ms: float
) -> Served:
    """What a load needs.

    Args:
        load: requests per second.
        utilization: share of what a replica can serve at most that is planned for, in (0, 1].
        max_tpot_ms: what a token after the first may take; fewer requests are in flight then.
    """
    shared = (method, replica.prompt, replica.output, replica.gamma, replica.budget)
    most = replica.most_in_flight(max_num_seqs)
    while most and _tpot_ms(replica, most) > max_tpot_ms:
        most -= max(1, most // 64)
    if not most:
        return Served(*shared, 0, 0.0, 0, 0, 0.0, math.nan, math.nan, math.nan)
    most_per_s = 1e3 / replica.busy_ms(most)
    replicas = math.ceil(load / (most_per_s * utilization) - 1e-9)
    in_flight = replica.needed_in_flight(most, load / replicas)
    e2e_ms = in_flight * replica.busy_ms(in_flight)
    return Served(
        *shared,
        most_in_flight=most,
        most_per_s=most_per_s,
        replicas=replicas,
        devices=replicas * replica.deployment.tensor_parallel,
        in_flight=load * e2e_ms / 1e3,
        ttft_ms=replica.prompt_ms + replica.token_ms(in_flight),
        tpot_ms=_tpot_ms(replica, in_flight),
        e2e_ms=e2e_ms,
    )


def _tpot_ms(replica: Replica, in_flight: int) -> float:
    """Of each token after the first: its decoding, and the prompts of others that come meanwhile."""
    return replica.token_ms(in_flight) + (in_flight - 1) * replica.prompt_ms / replica.output


def plan_load(
    deployment: Deployment,
    alphas: Mapping[int, float],
    gammas: tuple[int, int],
    load: float,
    prompts: list[int],
    output: int,
    *,
    max_num_seqs: int = 256,
    utilization: float = 0.8,
    max_tpot_ms: float = math.inf,
) -> list[Served]:
    """Plain decoding and the drafts that need the fewest replicas, for every length of prompts.

    Args:
        alphas: acceptance rate of every budget (tokens) to consider.
        gammas: the fewest and the most drafts of a round.
        load: requests per second.
        prompts: tokens.
        output: tokens.
    """
    rows = []
    limits = (load, max_num_seqs, utilization, max_tpot_ms)
    for prompt in sorted(set(prompts)):
        plain = Replica(deployment, prompt, output)
        rows.append(serve_load(plain, "plain", *limits))
        drafted = (
            serve_load(Replica(deployment, prompt, output, gamma, budget, alpha), "magicdec", *limits)
            for budget, alpha in alphas.items()
            for gamma in range(gammas[0], gammas[1] + 1)
        )
        rows.append(max(drafted, key=lambda served: served.most_per_s))
    return rows
