# SPDX-License-Identifier: Apache-2.0
"""How threads share a batch out, counted: all of it, none of it twice, as much for each."""

import os
import random
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_magicdec.native.library import FOLDER

COMPILER = os.environ.get("CXX", "c++").split()

pytestmark = pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="needs a compiler for C++")


@dataclass
class Shape:
    threads: int
    num_kv_heads: int
    requests: list[tuple[int, int, int]]  # first block, the first one behind, rows
    reading: int = 4  # rows that cost what a block's reading does

    def blocks(self) -> Counter:
        """Each block of each KV head, once."""
        return Counter(
            (request, head, block)
            for request, (first, last, _) in enumerate(self.requests)
            for head in range(self.num_kv_heads)
            for block in range(first, last)
        )

    def cost(self, request: int) -> int:
        """Of a block."""
        return self.reading + self.requests[request][2]


@pytest.fixture(scope="module")
def shared_out(tmp_path_factory):
    """Blocks by thread of each of some shapes, as the kernel's own code shares them out."""
    program = tmp_path_factory.mktemp("shares") / "shares"
    source = Path(__file__).with_name("shares.cpp")
    subprocess.run([*COMPILER, "-std=c++17", f"-I{FOLDER}", source, "-o", program], check=True)

    def run(shapes: list[Shape]) -> list[list[Counter]]:
        lines = []
        for shape in shapes:
            lines.append(f"{shape.threads} {shape.num_kv_heads} {shape.reading} {len(shape.requests)}")
            lines += [" ".join(map(str, request)) for request in shape.requests]
        given = subprocess.run(
            [program], input="\n".join(lines), capture_output=True, text=True, check=True
        )
        shared, parts = [], []
        for line in given.stdout.splitlines():
            if line.startswith("end"):
                threads = int(line.split()[1])
                shared.append([Counter() for _ in range(threads)])
                for thread, request, head, first, last in parts:
                    shared[-1][thread].update((request, head, block) for block in range(first, last))
                parts = []
            else:
                parts.append(tuple(map(int, line.split())))
        return shared

    return run


def test_blocks_are_partitioned_evenly_among_threads(shared_out):
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
    shared = shared_out(shapes)
    assert len(shared) == len(shapes)
    for shape, threads in zip(shapes, shared, strict=True):
        assert len(threads) <= shape.threads
        assert sum(threads, Counter()) == shape.blocks()
        costs = [sum(shape.cost(request) * n for (request, _, _), n in own.items()) for own in threads]
        largest = max((shape.cost(i) for i in range(len(shape.requests))), default=0)
        assert max(costs) <= sum(costs) / len(costs) + largest
