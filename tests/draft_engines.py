# SPDX-License-Identifier: Apache-2.0
"""Settings for engines whose draft has its own KV cache (`method: magicdec`)."""

from pathlib import Path
from typing import Any

from greedy import GREEDY, first_tokens

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY_DRAFT, TINY_SPIRE = BENCHMARKS / "tiny-draft", BENCHMARKS / "tiny-spire"
WHOLE_LEN = 2048  # tokens; no prompt with its answer is longer

# vLLM's V2 runner is slow on a CPU, in Triton's interpreter: a few prompts, and engines of few requests.
V2_TOKENS = 24
V2_ENGINE = {
    "v2": True,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 257,
}


def drafting_with(model: Path, num_speculative_tokens: int | str = 4, **fields: Any) -> dict[str, Any]:
    """Return a speculative config with the draft in folder `model`."""
    own = {"method": "magicdec", "model": str(model), "num_speculative_tokens": num_speculative_tokens}
    return {**own, **fields}


def longest(prompts: list[list[int]]) -> list[int]:
    """Return the indices of the four longest."""
    return sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))[:4]


def few(
    prompts: list[list[int]],
    plain: list[dict],
    *,
    number: int,
    below: int,
    least: int = 0,
    tokens: int = GREEDY["max_tokens"],
) -> tuple[dict[str, Any], list[dict]]:
    """Return a batch of the first prompts of `least` to `below` tokens, and plain decoding's answers."""
    chosen = [i for i, prompt in enumerate(prompts) if least <= len(prompt) < below][:number]
    batch = {"prompts": [prompts[i] for i in chosen], "sampling": {**GREEDY, "max_tokens": tokens}}
    return batch, [first_tokens(plain[i], tokens) for i in chosen]


def on_v2(prompts: list[list[int]], plain: list[dict]) -> tuple[dict[str, Any], list[dict]]:
    return few(prompts, plain, number=8, below=600, tokens=V2_TOKENS)
