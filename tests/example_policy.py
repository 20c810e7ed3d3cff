# SPDX-License-Identifier: Apache-2.0
"""The policies of examples/custom-policy, installed for a test."""

import os
import tomllib
from pathlib import Path

import pytest
from engines import HERE

EXAMPLE = HERE.parent / "examples" / "custom-policy"


def install(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the package like pip, with its metadata in `directory` and a `broken` entry point."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = directory / "magicdec_custom_policies-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = ["[vllm_magicdec.policies]", "broken = pathlib:Path"]
    lines += [f"{k} = {v}" for k, v in project["entry-points"]["vllm_magicdec.policies"].items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    path = [str(EXAMPLE), str(directory)]
    for entry in path:
        monkeypatch.syspath_prepend(entry)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]))
