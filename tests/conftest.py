# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several modules share; engines are expensive, so plain decoding is done once."""

import os
import platform
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
# On x86 without AVX-512 engines are several times slower, and of an engine test's many cases some run.
IS_SLOW = platform.machine() == "x86_64" and " avx512f" not in CPUINFO
RUNS_SOME_CASES = IS_SLOW and os.environ.get("MAGICDEC_TEST_CASES") != "all"
MANY, SHARE = 3, 4  # of so many or more, one in `SHARE`


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
    if RUNS_SOME_CASES:
        lines.append(f"of engine tests with {MANY} cases or more: one in {SHARE} (CASES=all: all)")
    return "\n".join(lines)


def pytest_unconfigure() -> None:
    engines.end_processes()


def leave_cases_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each engine test with `MANY` cases or more keep one in `SHARE`.

    Which ones a hash of their names decides: every fourth would be of one kind where four kinds take turns.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.parent.name == "engine":
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    left_out = set()
    for of_test in cases.values():
        if len(of_test) >= MANY:
            shuffled = sorted(of_test, key=lambda item: crc32(item.nodeid.encode()))
            left_out |= set(shuffled[-(-len(of_test) // SHARE) :])
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in its own hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if RUNS_SOME_CASES and not config.option.keyword and not any("::" in name for name in config.args):
        leave_cases_out(config, items)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        # Tests that share a module's engine run in one pytest-xdist worker, so that it starts once.
        shared = item._fixtureinfo.name2fixturedefs.values()
        if any(definitions[-1].scope == "module" for definitions in shared):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


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
