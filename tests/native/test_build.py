# SPDX-License-Identifier: Apache-2.0
"""Installing where there is no compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_magicdec.native import library
from vllm_magicdec.native.library import UnreadableError

PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false"])
def test_without_a_compiler_it_installs_without_the_kernel(compiler, tmp_path):
    folders = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    command, env = [sys.executable, "setup.py", "build_ext", *folders], {**os.environ, "CXX": compiler}
    build = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr
    assert not list(tmp_path.rglob("*.so"))
    # setuptools' warning, which names the reason
    assert "building extension" in build.stderr + build.stdout


def test_without_the_kernel_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(library, "best_variant", lambda: None)
    with pytest.raises(UnreadableError, match=r"was not built, as there was no C\+\+ compiler"):
        library.find_kernel()
