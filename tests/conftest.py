# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several modules share; engines are expensive, so plain decoding is done once."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import engines
import hypothesis_profiles  # noqa: F401 - its import chooses one
import kernel_libraries
import pytest
import texts
import torch
from greedy import GREEDY

if forced := kernel_libraries.forced():
    kernel_libraries.force(forced)

CPUINFO = Path("/proc/cpuinfo").read_text()
# An engine takes 5 to 60 s to start, as the machine is, and CI ends after 90 minutes. So what is marked
# `late` comes last, and of an engine test's cases, where they are `MANY` or more, all but one in `SHARE`.
# What has not begun after so many minutes is skipped. Every day another part of it is first.
MANY, SHARE = 2, 8
WITH_ENGINES = ("engine", "models")  # folders
MINUTES = 50
RUNS_ALL = "all" in (os.environ.get(f"MAGICDEC_TEST_{what}") for what in ("CASES", "MODELS"))
IS_LATE = pytest.StashKey[bool]()


def pytest_report_header() -> str:
    """How fast the suite is depends on these."""
    fields = dict(line.split(":", 1) for line in CPUINFO.splitlines() if ":" in line)
    cpu = {name.strip(): value.strip() for name, value in fields.items()}
    flags = [flag for flag in cpu.get("flags", "").split() if flag.startswith(("avx", "amx"))]
    family = f"family {cpu.get('cpu family')} model {cpu.get('model')} stepping {cpu.get('stepping')}"
    kernels = kernel_libraries.best() or "of this platform"
    lines = [
        f"machine: {cpu.get('model name')}, {family}, {os.cpu_count()} cores, {' '.join(flags)}",
        f"vLLM's kernels: {kernels}",
    ]
    if not RUNS_ALL:
        lines.append(f"late tests begin within {MINUTES} minutes, or are skipped (CASES=all: all run)")
    return "\n".join(lines)


def pytest_configure() -> None:
    # The workers of pytest-xdist start later, with these variables.
    os.environ.setdefault("MAGICDEC_TEST_STARTED", str(time.time()))


def pytest_unconfigure() -> None:
    engines.end_processes()


def started() -> float:
    """When the whole run began, by the clock; s."""
    return float(os.environ["MAGICDEC_TEST_STARTED"])


def note_late(items: list[pytest.Item]) -> None:
    """What is marked so, and of each engine test with `MANY` cases or more all but one in `SHARE`.

    Which ones a hash of their names decides: every fourth would be of one kind where four kinds take turns.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("late"):
            item.stash[IS_LATE] = True
        elif item.path.parent.name in WITH_ENGINES:
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for of_test in cases.values():
        if len(of_test) >= MANY:
            shuffled = sorted(of_test, key=lambda item: crc32(item.nodeid.encode()))
            for item in shuffled[-(-len(of_test) // SHARE) :]:
                item.stash[IS_LATE] = True


def is_late(item: pytest.Item) -> bool:
    return item.stash.get(IS_LATE, False)


def shares_an_engine(item: pytest.Item) -> bool:
    """With others of its module."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return any(definitions[-1].scope == "module" for definitions in fixtures)


@pytest.hookimpl(wrapper=True)  # pytest-xdist reads the groups in its own hook, pytest puts cases in order
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    chosen = config.option.keyword or config.option.markexpr
    was_chosen = chosen or any("::" in name for name in config.args)
    if not RUNS_ALL and not was_chosen:
        note_late(items)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if shares_an_engine(item):  # so they run in one pytest-xdist worker, and it starts once
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))
        if is_late(item) and item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("late"))  # in another one then
    yield
    day = int(started() // 86_400)

    def turn(item: pytest.Item) -> tuple[bool, int, bool]:
        # Of one key, they stay in the order that pytest gave them.
        together = item.module.__name__ if shares_an_engine(item) else item.nodeid.split("[")[0]
        of_day = crc32(f"{day} {together}".encode()) if is_late(item) else 0
        # Engines before all else, so that two workers end at the same time.
        return is_late(item), of_day, item.path.parent.name not in WITH_ENGINES

    items.sort(key=turn)


@pytest.hookimpl(tryfirst=True)  # before its engine starts
def pytest_runtest_setup(item: pytest.Item) -> None:
    if is_late(item) and time.time() > started() + 60 * MINUTES:
        pytest.skip(f"late: {MINUTES} minutes were over")


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """24 prompts of 20 to 1,500 tokens."""
    return texts.prompts(24, 20, 1500)


@pytest.fixture(scope="session")
def plain_run(prompts: list[list[int]]) -> engines.EngineRun:
    """Plain greedy decoding of `prompts`: the truth."""
    return engines.generate(prompts, GREEDY, max_num_seqs=16)


@pytest.fixture(scope="session")
def plain(plain_run: engines.EngineRun) -> list[dict]:
    return plain_run.results[0][0]
