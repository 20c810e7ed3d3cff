# SPDX-License-Identifier: Apache-2.0
"""Interpret, compile and specialize Triton kernels on machines without a GPU."""

import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import hypothesis_profiles  # noqa: F401 - also for programs of `run_interpreted`
import pytest

HERE = Path(__file__).parent


def run_interpreted(program: str) -> None:
    """Run a file in a separate process: Triton decides at its import whether it interprets."""
    # `sitecustomize` patches its interpreter.
    path = [str(HERE / "at_start"), *sys.path]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)}
    child = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, timeout=1800)
    assert child.returncode == 0, child.stderr[-4000:]


def noted_calls(module: Any, names: Collection[str]) -> list[str]:
    """Return a list of the names of the functions called from now on."""
    calls: list[str] = []
    for name in names:
        own = getattr(module, name)
        setattr(module, name, lambda *args, n=name, f=own, **kwargs: calls.append(n) or f(*args, **kwargs))
    return calls


def check_compiles_for_hopper(
    kernel: Any, arguments: Mapping[str, str], constants: Mapping[str, Any]
) -> None:
    """Assert that a kernel compiles; `arguments` are Triton's types of all but 32-bit integers."""
    assert compile_for(90, kernel, arguments, constants).asm["cubin"]


def compile_for(
    capability: int,
    kernel: Any,
    arguments: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible: Collection[str] = (),
) -> Any:
    """Compile for a compute capability (90 for 9.0); `divisible` arguments are multiples of 16."""
    compiler = pytest.importorskip("triton.compiler")
    from triton.backends.compiler import GPUTarget

    names = kernel.arg_names
    types = {**dict.fromkeys(names, "i32"), **dict.fromkeys(constants, "constexpr"), **arguments}
    positions = {(names.index(name),): value for name, value in constants.items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = compiler.ASTSource(kernel, types, constexprs=positions, attrs=attributes)
    return compiler.compile(source, target=GPUTarget("cuda", capability, 32))


def specialization(kernel: Any, **arguments: Any) -> list[Any]:
    """Return what a launch specializes for, with 0 for arguments not given; another compiles again."""
    jit = pytest.importorskip("triton.runtime.jit")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    return bind(**{**dict.fromkeys(kernel.arg_names, 0), **arguments})[1]
