# SPDX-License-Identifier: Apache-2.0
"""How threads share a batch out, counted: all of it, none of it twice, as much for each."""

import os
import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from vllm_magicdec.native.library import FOLDER

COMPILER = os.environ.get("CXX", "c++").split()

pytestmark = pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="needs a compiler for C++")


Blocks = Counter[tuple[int, int, int]]  # request, KV head, number


class Shape(NamedTuple):
    threads: int
    num_kv_heads: int
    requests: list[tuple[int, int, int]]  # first block, the first one behind, rows
    reading: int  # rows that cost what a block's reading does


def share_out(shapes: list[Shape], folder: Path) -> list[list[Blocks]]:
    """Blocks by thread of each shape."""
    program, source = folder / "shares", Path(__file__).with_name("shares.cpp")
    subprocess.run([*COMPILER, "-std=c++17", f"-I{FOLDER}", source, "-o", program], check=True)
    lines = []
    for shape in shapes:
        lines.append(f"{shape.threads} {shape.num_kv_heads} {shape.reading} {len(shape.requests)}")
        lines += [" ".join(map(str, request)) for request in shape.requests]
    said = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=True)
    shared, parts = [], []
    for line in said.stdout.splitlines():
        if not line.startswith("end"):
            parts.append(map(int, line.split()))
            continue
        shared.append([Counter() for _ in range(int(line.split()[1]))])
        for thread, request, head, first, last in parts:
            shared[-1][thread].update((request, head, block) for block in range(first, last))
        parts = []
    return shared


def test_blocks_are_partitioned_evenly_among_threads(tmp_path):
    rng = random.Random(1)

    def request() -> tuple[int, int, int]:
        first = rng.randrange(50)
        return first, first + rng.choice([0, 1, 2, 30, 500]), rng.choice([1, 4, 9, 36, 128])

    shapes = [
        Shape(
            rng.choice([1, 2, 3, 7, 16, 64, 192]),
            rng.choice([1, 2, 8]),
            [request() for _ in range(n % 9)],
            rng.choice([4, 64]),
        )
        for n in range(200)
    ]
    shared = share_out(shapes, tmp_path)
    assert len(shared) == len(shapes)
    for shape, threads in zip(shapes, shared, strict=True):
        assert len(threads) <= shape.threads
        assert sum(threads, Counter()) == Counter(
            (request, head, block)
            for request, (first, last, _) in enumerate(shape.requests)
            for head in range(shape.num_kv_heads)
            for block in range(first, last)
        )
        block_costs = [shape.reading + rows for _, _, rows in shape.requests]
        costs = [sum(block_costs[request] for request, _, _ in own.elements()) for own in threads]
        largest = max(block_costs, default=0)
        assert max(costs) <= sum(costs) / len(costs) + largest
