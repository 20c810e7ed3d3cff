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

WITH_ENGINES = ("engine", "models")  # folders


def pytest_report_header() -> str:
    """Print the machine and vLLM's kernels, on which the suite's speed depends."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    cpu = {name.strip(): value.strip() for name, _, value in lines}
    flags = [flag for flag in cpu.get("flags", "").split() if flag.startswith(("avx", "amx"))]
    machine = f"machine: {cpu.get('model name')}, {os.cpu_count()} cores, {' '.join(flags)}"
    return f"{machine}\nvLLM's kernels: {kernel_libraries.best() or 'of this platform'}"


def pytest_unconfigure() -> None:
    engines.end_processes()


@pytest.hookimpl(wrapper=True)  # pytest-xdist reads the groups in its own hook, pytest orders the cases
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        # Tests share engines by fixtures of module scope. One pytest-xdist worker runs the group, so that
        # its engine starts once.
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        if any(definitions[-1].scope == "module" for definitions in fixtures):
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
