# SPDX-License-Identifier: Apache-2.0
"""Training data: a file of tokens, split into sequences in a seeded order."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_magicdec.spire.settings import SpireError

_MAX_HELD_OUT = 64  # sequences


def write_tokens(path: Path, documents: Iterable[np.ndarray], vocab_size: int, begin: Any, end: Any) -> int:
    """Write the tokens of all documents to a file, and return their number.

    Args:
        path: file of dtype `np.min_scalar_type(vocab_size)`.
        documents: token ids, `[num_tokens]` integers each.
        vocab_size: exclusive upper bound on the ids.
        begin, end: token ids before and after each document; None for none.
    """
    dtype = np.min_scalar_type(vocab_size)
    count = 0
    with path.open("wb") as file:
        for document in documents:
            before, after = ([] if token is None else [token] for token in (begin, end))
            tokens = np.concatenate([before, document, after], dtype=dtype, casting="unsafe")
            count += len(tokens)
            tokens.tofile(file)
    return count


@dataclass(frozen=True)
class Sequences:
    """Sequences of equal length; the last ones are held out.

    Args:
        tokens: `[num_tokens]` unsigned integers.
        length: tokens per sequence.
    """

    tokens: np.ndarray
    length: int
    seed: int

    @classmethod
    def read(cls, path: Path, vocab_size: int, length: int, seed: int) -> "Sequences":
        """Map a file of `write_tokens`; raise SpireError if it has fewer tokens than two sequences."""
        dtype = np.min_scalar_type(vocab_size)
        tokens = np.fromfile(path, dtype) if path.stat().st_size < 2**20 else np.memmap(path, dtype, "r")
        if len(tokens) < 2 * length:
            raise SpireError(
                f"--data has {len(tokens):,} tokens, fewer than two sequences of {length:,}; "
                "give more data, or a smaller --sequence"
            )
        return cls(tokens, length, seed)

    @property
    def num_held_out(self) -> int:
        """Number of held-out sequences: 2 %, at least one."""
        return min(_MAX_HELD_OUT, max(1, len(self.tokens) // self.length // 50))

    @property
    def num_training(self) -> int:
        """Number of sequences in an epoch."""
        return len(self.tokens) // self.length - self.num_held_out

    def batch(self, first: int, count: int) -> Tensor:
        """Return the training sequences from `first` on over all epochs, `[count, length]` int64."""
        rows = []
        for number in range(first, first + count):
            epoch, index = divmod(number, self.num_training)
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_training)
            rows.append(self._row(int(order[index])))
        return torch.stack(rows)

    def held_out(self) -> Iterable[Tensor]:
        """Yield the held-out sequences, `[1, length]` int64 each."""
        for index in range(self.num_training, self.num_training + self.num_held_out):
            yield self._row(index)[None]

    def _row(self, index: int) -> Tensor:
        begin = index * self.length
        return torch.from_numpy(self.tokens[begin : begin + self.length].astype(np.int64))
