# SPDX-License-Identifier: Apache-2.0
"""Subpackages import downward only, and the import contract reports violations."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = "Imports run downward only"


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    """Check the contract for the package in a directory."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True)


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(
        ROOT / "vllm_magicdec", tmp_path / "vllm_magicdec", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_imports_run_downward_only():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{CONTRACT} KEPT" in result.stdout


@pytest.mark.parametrize(
    ("module", "statement", "imported"),
    [
        ("views/round.py", "import vllm_magicdec.config", "config"),
        (
            "policies/snapkv.py",
            "def later():\n    from vllm_magicdec.adaptive import metrics",
            "adaptive.metrics",
        ),
        ("drafting/drafter.py", "from vllm_magicdec.planner.performance import GIB", "planner.performance"),
    ],
    ids=["upward", "upward within a function", "between siblings"],
)
def test_upward_import_is_named(copied, module, statement, imported):
    with (copied / "vllm_magicdec" / module).open("a") as file:
        file.write(f"\n\n{statement}\n")
    result = lint(copied)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{CONTRACT} BROKEN" in result.stdout
    importer = module.removesuffix(".py").replace("/", ".")
    assert f"vllm_magicdec.{importer} -> vllm_magicdec.{imported}" in result.stdout


def test_new_module_must_be_in_the_contract(copied):
    (copied / "vllm_magicdec" / "attic.py").write_text("")
    result = lint(copied)
    assert result.returncode == 1
    assert "attic" in result.stdout + result.stderr
