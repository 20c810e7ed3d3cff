# SPDX-License-Identifier: Apache-2.0
"""What clients ask for: every kind of request that people send, from a fixed seed."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.documents import encode, read_text

SHORTEST, MEDIAN, LONGEST = 5, 200, 7000  # tokens of prompt
MAX_MODEL_LEN = 7168
_SHORTEST_ANSWER, _LONGEST_ANSWER = 8, 160  # tokens, at most
_SPREAD = 1.2  # standard deviation of the logarithm of a length
_NUM_SHARED, _SHARED_TOKENS = 4, (48, 200)
_SHARED_SHARE = 0.25  # of requests that begin as others do
_CHARACTERS = 6_000_000  # of text that prompts are cut from
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
# By kind: how many of a hundred requests, and what they ask for beside a prompt and a length.
GREEDY_KINDS: Mapping[str, tuple[int, Sequence[Mapping[str, Any]]]] = {
    "greedy": (36, [{}]),
    "stop strings": (10, [{"stop": [")", "\n\n"]}, {"stop": "self"}, {"stop": [" = ", "return"]}]),
    "logprobs": (10, [{"logprobs": 1}, {"logprobs": 5}]),
    "structured output": (
        8,
        [
            {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": _SCHEMA}}},
            {"structured_outputs": {"regex": r"(yes|no), [0-9]{3,9}"}},
            {"structured_outputs": {"choice": ["import os", "import sys", "return None"]}},
        ],
    ),
    "hangs up": (9, [{}]),
}
SAMPLED_KINDS: Mapping[str, tuple[int, Sequence[Mapping[str, Any]]]] = {
    "sampled": (17, [{"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.3}]),
    "n > 1": (10, [{"temperature": 0.8, "n": 2}, {"temperature": 1.0, "n": 3, "top_k": 50}]),
}


@dataclass(frozen=True)
class Request:
    """A body of /v1/completions, and how its client behaves."""

    kind: str
    prompt: Sequence[int]
    max_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """More of the body."""

    @property
    def is_greedy(self) -> bool:
        return self.kind in GREEDY_KINDS

    @property
    def num_answers(self) -> int:
        return int(self.options.get("n", 1))

    def body(self, model: str, **more: Any) -> dict[str, Any]:
        """Of the request."""
        options = {"temperature": 0, **self.options}
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **options,
            **more,
        }


def make_requests(tokenizer: Any, count: int, seed: int = 0) -> list[Request]:
    """`count` requests; the first two have the shortest and the longest prompt.

    Lengths of prompts are log-normal, those of answers are short in most cases.
    """
    rng = random.Random(seed)
    text = encode(tokenizer, read_text(None)[:_CHARACTERS])
    shared = [_cut(text, rng.randint(*_SHARED_TOKENS), rng) for _ in range(_NUM_SHARED)]
    kinds = {**GREEDY_KINDS, **SAMPLED_KINDS}
    names = rng.choices(list(kinds), [weight for weight, _ in kinds.values()], k=count)
    lengths = [SHORTEST, LONGEST] + [_length(rng) for _ in range(count - 2)]
    requests = []
    for name, length in zip(names, lengths, strict=True):
        first = rng.choice(shared) if rng.random() < _SHARED_SHARE else []
        first = first if len(first) < length else []
        prompt = [*first, *_cut(text, length - len(first), rng)]
        max_tokens = min(
            round(math.exp(rng.uniform(math.log(_SHORTEST_ANSWER), math.log(_LONGEST_ANSWER)))),
            MAX_MODEL_LEN - length,
        )
        if name == "hangs up":
            max_tokens = 128
        requests.append(Request(name, prompt, max_tokens, rng.choice(kinds[name][1])))
    return requests


def _cut(text: Sequence[int], length: int, rng: random.Random) -> list[int]:
    begin = rng.randrange(len(text) - length)
    return list(text[begin : begin + length])


def _length(rng: random.Random) -> int:
    while True:
        length = round(math.exp(rng.gauss(math.log(MEDIAN), _SPREAD)))
        if SHORTEST <= length <= LONGEST:
            return length
