# SPDX-License-Identifier: Apache-2.0
"""The parts of `make bench-gpu`, the most telling first, and how one is run."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.processes import ends_held_back
from benchmarks.gpu.engine_report import GOAL_CELL, GOAL_SHAPE
from benchmarks.gpu.models import SHAPES
from vllm_magicdec.planner.performance import Deployment, Hardware

ROOT = Path(__file__).resolve().parents[2]
SPARE_SHARE = 0.1  # of the KV cache's room, for what the plugin keeps beside it


@dataclass(frozen=True)
class Part:
    """One command, which writes `name`.json (pytest: `name`.xml)."""

    name: str
    minutes: int  # planned: estimated, not measured
    shows: str
    arguments: tuple[str, ...]  # of Python
    writes: str = "json"

    def command(self, folder: Path) -> list[str]:
        result = str(self.result(folder))
        out = [f"--junitxml={result}"] if self.writes == "xml" else ["--out", result]
        return [sys.executable, "-m", *self.arguments, *out]

    def result(self, folder: Path) -> Path:
        return folder.absolute() / f"{self.name}.{self.writes}"

    def log(self, folder: Path) -> Path:
        return folder / f"{self.name}.log"


def preflight(device: str, model: str | None) -> Part:
    """What comes before all others."""
    return Part(
        "preflight",
        3,
        "what the machine lacks",
        ("benchmarks.gpu.preflight", "--device", device, *(("--model", model) if model else ())),
    )


def all_parts(memory_gib: float, model: str | None) -> list[Part]:
    """For one GPU. The first hour has what everything else rests on.

    Args:
        memory_gib: of the device.
        model: with real weights for the peer's cells; None: random ones alone.
    """
    engine, peer = "benchmarks.gpu.engine", "benchmarks.gpu.peer"
    batch, context = GOAL_CELL
    cell = ("--batch", str(min(batch, _most_requests(memory_gib, context))), "--context", str(context))
    parts = [
        Part(
            "lossless-graphs",
            12,
            "greedy output from CUDA graphs: float32, and bfloat16 with FlashInfer",
            (engine, "--parts", "lossless", "--lossless-modes", "graphs", "bfloat16-graphs"),
        ),
        Part(
            "goals",
            10,
            f"step times and speed where the goals are set: {GOAL_SHAPE}, {context:,} tokens",
            (
                *(engine, "--parts", "times", "speed", "--shapes", GOAL_SHAPE, *cell),
                *("--policies", "streamingllm", "--acceptance", "0.8", "0.95"),
            ),
        ),
        Part("peer-10k", 10, "Vegas' cell of 10,000 tokens", (peer, "--context", "10000")),
        Part("tests", 12, "the tests marked gpu", ("pytest", "-m", "gpu", "-p", "no:cacheprovider"), "xml"),
        Part("kernels", 12, "draft attention, kernel by kernel", ("benchmarks.gpu.kernels",)),
        Part("peer-100k", 12, "Vegas' cell of 100,000 tokens", (peer, "--context", "100000")),
    ]
    if model:
        for name, size in (("10k", "10000"), ("100k", "100000")):
            shows = f"the same at {int(size):,} tokens with real weights and acceptance"
            parts.append(
                Part(f"peer-{name}-weights", 12, shows, (peer, "--context", size, "--model", model))
            )
    parts += [
        Part(
            f"steps-{name}",
            45,
            f"the paper's cells: {name}, step times of all policies and speed",
            (engine, "--parts", "times", "speed", "--shapes", name),
        )
        for name in SHAPES
    ]
    parts.append(
        Part(
            "lossless-eager",
            12,
            "greedy output without graphs, on both model runners",
            (engine, "--parts", "lossless", "--lossless-modes", "v2", "v1"),
        )
    )
    return parts


def small_parts(device: str) -> list[Part]:
    """The same code on tiny models, which a CPU can run too: does it all work?"""
    small = ("--device", device, "--small")
    engine = ("benchmarks.gpu.engine", *small, "--parts")
    cell = ("--shapes", "small gqa", "--batch", "1", "--context", "64", "--budget", "16")
    tests = ("pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests/attention/test_flashinfer.py")
    return [
        Part("lossless", 10, "greedy output", (*engine, "lossless")),
        Part("steps", 10, "step times and speed", (*engine, "times", "speed")),
        Part("peer", 5, "a cell like the peer's", ("benchmarks.gpu.peer", *small)),
        Part("tests", 5, "some of the tests marked gpu; a CPU skips them", tests, "xml"),
        Part("kernels", 5, "draft attention, kernel by kernel", ("benchmarks.gpu.kernels", *small, *cell)),
    ]


def _most_requests(memory_gib: float, context: int) -> int:
    """Requests of `context` tokens that fit beside the weights of the goals' model."""
    device = Hardware("this one", memory_gib, 1.0, 1.0, 0.0, "")
    capacity = Deployment(SHAPES[GOAL_SHAPE], device).kv_capacity_tokens()
    return max(
        1, int(capacity * (1 - SPARE_SHARE)) // (context + 1024)
    )  # they grow while they are measured


@dataclass(frozen=True)
class Outcome:
    """How a part ended."""

    status: str  # "done", "problems" (its result or its log says which), "stopped" (out of time)
    minutes: float


def run(part: Part, folder: Path, limit_s: float) -> Outcome:
    """Run a part to its end or its time limit; everything it prints goes to its log.

    Raises:
        KeyboardInterrupt: the user has had enough; the part has ended with all of its children.
    """
    part.result(folder).unlink(missing_ok=True)  # an older one
    started = time.monotonic()
    with part.log(folder).open("w") as log:
        child = None
        try:
            with ends_held_back():
                child = subprocess.Popen(
                    part.command(folder),
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            status = "done" if child.wait(limit_s) == 0 else "problems"
        except subprocess.TimeoutExpired:
            status = "stopped"
        finally:
            if child is not None and child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # engines end with the process that started them
                child.wait()
    return Outcome(status, (time.monotonic() - started) / 60)
