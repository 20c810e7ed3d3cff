# SPDX-License-Identifier: Apache-2.0
"""Requests of every type, generated from a seed."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import texts

MODEL = "tiny"
MAX_MODEL_LEN = 7168
SHORTEST, MEDIAN, LONGEST = 5, 200, 7000  # prompt tokens
SPREAD = 1.2  # standard deviation of the logarithm of a prompt's length
ANSWER_TOKENS = (8, 160)
NUM_SHARED, SHARED_TOKENS, SHARED_SHARE = 4, (48, 200), 0.25  # prefixes
TEXT_TOKENS = 1_000_000
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
# By type: the percentage of requests, and alternatives of additional fields.
GREEDY: Mapping[str, tuple[int, Sequence[Mapping[str, Any]]]] = {
    "greedy": (36, [{}]),
    "stop strings": (10, [{"stop": [")", "\n\n"]}, {"stop": "self"}, {"stop": [" = ", "return"]}]),
    "logprobs": (10, [{"logprobs": 1}, {"logprobs": 5}]),
    "structured output": (
        8,
        [
            {"response_format": JSON_SCHEMA},
            {"structured_outputs": {"regex": r"(yes|no), [0-9]{3,9}"}},
            {"structured_outputs": {"choice": ["import os", "import sys", "return None"]}},
        ],
    ),
    "hang-up": (9, [{}]),
}
SAMPLED: Mapping[str, tuple[int, Sequence[Mapping[str, Any]]]] = {
    "sampled": (17, [{"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.3}]),
    "n > 1": (10, [{"temperature": 0.8, "n": 2}, {"temperature": 1.0, "n": 3, "top_k": 50}]),
}
TYPES = {**GREEDY, **SAMPLED}


@dataclass(frozen=True)
class Request:
    type: str
    prompt: Sequence[int]  # token ids
    max_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)  # more fields of the body

    @property
    def is_greedy(self) -> bool:
        return self.type in GREEDY

    @property
    def num_answers(self) -> int:
        return int(self.options.get("n", 1))

    def arguments(self, **more: Any) -> dict[str, Any]:
        extra = {"return_token_ids": True, "return_tokens_as_token_ids": True, **self.options, **more}
        temperature = extra.pop("temperature", 0)
        return {
            "model": MODEL,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": temperature,
            "extra_body": extra,
        }


def make_requests(count: int, seed: int = 0) -> list[Request]:
    """Generate requests with log-normal prompt lengths; the first two are the shortest and longest."""
    rng = random.Random(seed)
    shared = [excerpt(rng.randint(*SHARED_TOKENS), rng) for _ in range(NUM_SHARED)]
    types = rng.choices(list(TYPES), [weight for weight, _ in TYPES.values()], k=count)
    lengths = [SHORTEST, LONGEST] + [prompt_length(rng) for _ in range(count - 2)]
    requests = []
    for name, length in zip(types, lengths, strict=True):
        prefix = rng.choice(shared) if rng.random() < SHARED_SHARE else []
        prefix = prefix if len(prefix) < length else []
        prompt = [*prefix, *excerpt(length - len(prefix), rng)]
        shortest, longest = map(math.log, ANSWER_TOKENS)
        max_tokens = 128 if name == "hang-up" else round(math.exp(rng.uniform(shortest, longest)))
        max_tokens = min(max_tokens, MAX_MODEL_LEN - length)
        requests.append(Request(name, prompt, max_tokens, rng.choice(TYPES[name][1])))
    return requests


def excerpt(length: int, rng: random.Random) -> list[int]:
    tokens = texts.library_tokens(TEXT_TOKENS)
    begin = rng.randrange(len(tokens) - length)
    return list(tokens[begin : begin + length])


def prompt_length(rng: random.Random) -> int:
    while True:
        length = round(math.exp(rng.gauss(math.log(MEDIAN), SPREAD)))
        if SHORTEST <= length <= LONGEST:
            return length
