# SPDX-License-Identifier: Apache-2.0
"""Prompts from real text that every machine has: CPython's standard library."""

import random
import sysconfig
from functools import cache
from pathlib import Path

from engines import MODEL
from tokenizers import Tokenizer


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@cache
def library_tokens(num_tokens: int = 200_000) -> tuple[int, ...]:
    tokens: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tokens += tokenizer().encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids
        if len(tokens) >= num_tokens:
            break
    return tuple(tokens[:num_tokens])


def prompts(num_prompts: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Return excerpts in random order, with lengths in tokens spread evenly on a log scale."""
    rng = random.Random(seed)
    tokens = library_tokens()
    ratio = (longest / shortest) ** (1 / max(1, num_prompts - 1))
    lengths = [round(shortest * ratio**i) for i in range(num_prompts)]
    rng.shuffle(lengths)
    starts = [rng.randrange(len(tokens) - length) for length in lengths]
    return [list(tokens[start : start + length]) for start, length in zip(starts, lengths, strict=True)]
