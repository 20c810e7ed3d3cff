# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures and the order of tests; engines are expensive, so plain decoding runs once."""

import os
from collections.abc import Iterator
from pathlib import Path

import engines
import hypothesis_profiles  # noqa: F401 - its import chooses one
import kernel_libraries
import pytest
import texts
from greedy import GREEDY

if forced := kernel_libraries.forced():
    kernel_libraries.force(forced)

CPUINFO = Path("/proc/cpuinfo").read_text()
WITH_ENGINES = ("engine", "models")  # folders


def pytest_report_header() -> str:
    """Print the machine and vLLM's kernels, on which the suite's speed depends."""
    fields = dict(line.split(":", 1) for line in CPUINFO.splitlines() if ":" in line)
    cpu = {name.strip(): value.strip() for name, value in fields.items()}
    flags = [flag for flag in cpu.get("flags", "").split() if flag.startswith(("avx", "amx"))]
    family = f"family {cpu.get('cpu family')} model {cpu.get('model')} stepping {cpu.get('stepping')}"
    kernels = kernel_libraries.best() or "of this platform"
    return "\n".join(
        [
            f"machine: {cpu.get('model name')}, {family}, {os.cpu_count()} cores, {' '.join(flags)}",
            f"vLLM's kernels: {kernels}",
        ]
    )


def pytest_unconfigure() -> None:
    engines.end_processes()


def shares_an_engine(item: pytest.Item) -> bool:
    """Whether the test uses a module-scoped fixture, which is how tests share engines."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return any(definitions[-1].scope == "module" for definitions in fixtures)


@pytest.hookimpl(wrapper=True)  # pytest-xdist reads the groups in its own hook, pytest orders the cases
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        # One pytest-xdist worker runs the group, so its engine starts once.
        if shares_an_engine(item):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))
    yield
    # Engines first, so that both workers end at the same time.
    items.sort(key=lambda item: item.path.parent.name not in WITH_ENGINES)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """24 prompts of 20 to 1,500 tokens."""
    return texts.prompts(24, 20, 1500)


@pytest.fixture(scope="session")
def plain_run(prompts: list[list[int]]) -> engines.EngineRun:
    """Plain greedy decoding of `prompts`, the expected output of most engine tests."""
    return engines.generate(prompts, GREEDY, max_num_seqs=16)


@pytest.fixture(scope="session")
def plain(plain_run: engines.EngineRun) -> list[dict]:
    return plain_run.results[0][0]
