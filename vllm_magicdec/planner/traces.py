# SPDX-License-Identifier: Apache-2.0
"""Who asks a server for what, and when: a trace from a file, or one that is drawn."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from vllm_magicdec.planner.console import UserError

# A distribution's name -> how many numbers it takes.
_KINDS = {"uniform": 2, "lognormal": 2}
_MOST_TOKENS = 2**30


class Arrival(NamedTuple):
    """A request, before anybody has served it."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Lengths:
    """Lengths that are drawn: the same for all, from a range, or log-normal.

    Written `512`, `uniform:100:900` (both ends included) or `lognormal:MEDIAN:SIGMA` (SIGMA of the
    logarithm).

    Raises:
        ValueError: it is written otherwise, or no such lengths are possible.
    """

    written: str

    def __post_init__(self) -> None:
        self.sampler()

    def sampler(self) -> Callable[[random.Random], int]:
        """What draws a length of at least 1."""
        kind, *rest = self.written.split(":")
        try:
            if not rest:
                fixed = int(kind)
                if 1 <= fixed <= _MOST_TOKENS:
                    return lambda rng: fixed
            elif len(rest) == _KINDS[kind]:
                low, high = map(float, rest)
                if kind == "uniform" and 1 <= low <= high <= _MOST_TOKENS:
                    return lambda rng: rng.randint(int(low), int(high))
                if kind == "lognormal" and 1 <= low <= _MOST_TOKENS and 0 <= high < 10:
                    return lambda rng: max(
                        1, min(_MOST_TOKENS, round(rng.lognormvariate(math.log(low), high)))
                    )
        except (ValueError, KeyError):
            pass
        raise ValueError(
            f"'{self.written}' says no lengths; write them as 512, uniform:100:900 or lognormal:300:0.8"
        )


def poisson(rate: float, count: int, prompt: Lengths, output: Lengths, seed: int) -> list[Arrival]:
    """`count` requests that arrive at `rate` per second, independently (math.inf: at once)."""
    rng = random.Random(seed)
    gaps = (0.0 if math.isinf(rate) else rng.expovariate(rate) for _ in range(count))
    draw_prompt, draw_output = prompt.sampler(), output.sampler()
    return [Arrival(at, draw_prompt(rng), draw_output(rng)) for at in accumulate(gaps)]


def load(path: Path) -> list[Arrival]:
    """A trace of JSON lines, ordered by arrival.

    Each line is an object with `arrival_s`, `prompt_tokens` and `output_tokens`; other fields are ignored.

    Raises:
        UserError: there is no such file, or a line is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the trace {path}: {error}") from None
    arrivals = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                arrivals.append(_arrival(json.loads(line)))
            except (ValueError, TypeError, KeyError, RecursionError):
                raise UserError(
                    f'{path}, line {number}: write a request as {{"arrival_s": 0.5, "prompt_tokens": 1000, '
                    '"output_tokens": 100}'
                ) from None
    if not arrivals:
        raise UserError(f"the trace {path} holds no requests")
    return sorted(arrivals)


def _arrival(row: dict[str, Any]) -> Arrival:
    """
    Raises:
        ValueError, TypeError, KeyError: the row is none.
    """
    arrival = Arrival(float(row["arrival_s"]), row["prompt_tokens"], row["output_tokens"])
    counts = arrival[1:]
    if not all(isinstance(count, int) and 1 <= count <= _MOST_TOKENS for count in counts):
        raise ValueError
    if not 0 <= arrival.arrival_s < math.inf:
        raise ValueError
    return arrival
