# SPDX-License-Identifier: Apache-2.0
"""Start commands and find Ray's processes below them."""

import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


@contextmanager
def started(command: Sequence[str], log: Path, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with its output in `log`; the end of the block kills it and its children."""
    process = None
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        yield process
    finally:
        if process is not None:
            left = below(process.pid) if process.poll() is None else []
            for one in (process, *left):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()


def below(pid: int) -> list[psutil.Process]:
    """Return all descendants of a process."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def batch_replicas(pid: int) -> list[psutil.Process]:
    """Return the replicas of `ray_batch.py` below a process, whether or not their engine has started."""
    found = []
    for one in below(pid):
        with suppress(psutil.NoSuchProcess):
            if "vLLMEngineStage" in " ".join(one.cmdline()):
                found.append(one)
    return found


def with_engines(replicas: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the replicas whose engine has started: until then, Ray names them by `__init__`."""
    started_ones = []
    for one in replicas:
        with suppress(psutil.NoSuchProcess):
            names = ["".join(child.cmdline()) for child in one.children()]
            is_starting = "__init__" in "".join(one.cmdline())
            if not is_starting and any("EngineCore" in name for name in names):
                started_ones.append(one)
    return started_ones
