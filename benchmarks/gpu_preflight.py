# SPDX-License-Identifier: Apache-2.0
"""Check a machine before a GPU benchmark: `make bench-gpu` begins with it, or see --help.

It prints a line per check. If something is missing, the line says what to type, and the exit status is 1.
OUT gets the same as JSON.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points, version
from pathlib import Path

import torch
from common.options import add_out, make_parser
from common.record import make_record, write
from packaging.version import Version

BIN = Path(sys.executable).parent
FREE_SHARE = 0.92  # of the device's memory: vLLM's default gpu_memory_utilization
DISK_GIB = 10  # for what torch, Triton and FlashInfer compile
FLASHINFER = "flashinfer-python==0.7.0.post1"
REINSTALL = "type rm -rf .venv, then make venv where nvidia-smi answers"
NEEDS_DEVICE = "not checked without a device"
GIB = 2**30


class MissingError(Exception):
    """A missing requirement: one sentence that says what to type."""


def driver(args: argparse.Namespace) -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise MissingError(
            "there is no NVIDIA driver (nvidia-smi is missing); install it (Ubuntu: sudo ubuntu-drivers "
            "install), or start the container with --gpus all"
        ) from None
    except subprocess.CalledProcessError as error:
        output = " ".join((error.stdout or error.stderr).split())
        raise MissingError(f"the NVIDIA driver does not answer ({output}); type nvidia-smi") from None
    return "; ".join(run.stdout.strip().splitlines())


def device(args: argparse.Namespace) -> str:
    if torch.version.cuda is None:
        raise MissingError(f"torch {torch.__version__} is built without CUDA; {REINSTALL}")
    if not torch.cuda.is_available():
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            hidden = os.environ["CUDA_VISIBLE_DEVICES"]
            raise MissingError(f"CUDA_VISIBLE_DEVICES={hidden!r} hides it; type unset CUDA_VISIBLE_DEVICES")
        raise MissingError(
            f"torch finds none; CUDA {torch.version.cuda} may need a newer driver: type nvidia-smi for the "
            "highest CUDA version that yours supports"
        )
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def memory(args: argparse.Namespace) -> str:
    if not torch.cuda.is_available():
        return NEEDS_DEVICE
    free, total = torch.cuda.mem_get_info()
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
    if free < FREE_SHARE * total:
        raise MissingError(f"{found}, and vLLM takes {FREE_SHARE:.0%}; type nvidia-smi, end what uses it")
    return found


def vllm(args: argparse.Namespace) -> str:
    from vllm_magicdec import TESTED_VLLM_VERSIONS

    installed = version("vllm")
    if Version(installed).public not in TESTED_VLLM_VERSIONS:
        raise MissingError(
            f"vLLM {installed} was not tested with the plugin; type {BIN}/pip install "
            f"vllm=={TESTED_VLLM_VERSIONS[-1]}"
        )
    if Version(installed).local == "cpu":
        raise MissingError(f"vLLM {installed} is built for CPUs; {REINSTALL}")
    return f"vLLM {installed}"


def plugin(args: argparse.Namespace) -> str:
    """Check that vLLM finds the plugin and that its hooks fit."""
    from vllm_magicdec.errors import MagicDecConfigError
    from vllm_magicdec.plugin import register

    allowed = os.environ.get("VLLM_PLUGINS")
    if not any(point.name == "magicdec" for point in entry_points(group="vllm.general_plugins")):
        raise MissingError(f"vLLM does not find the plugin; type {BIN}/pip install --no-deps -e .")
    if allowed is not None and "magicdec" not in allowed.split(","):
        raise MissingError("VLLM_PLUGINS leaves the plugin out; type unset VLLM_PLUGINS")
    try:
        register()
    except MagicDecConfigError as error:
        raise MissingError(str(error)) from None
    return f"vllm-magicdec {version('vllm-magicdec')}, its hooks fit"


def ninja(args: argparse.Namespace) -> str:
    path = shutil.which("ninja")
    if path is None:
        raise MissingError(
            f"FlashInfer compiles with ninja, which is not on the PATH; type export PATH={BIN}:$PATH"
        )
    return path


def flashinfer(args: argparse.Namespace) -> str:
    """Check that vLLM uses FlashInfer and that the kernels of draft attention compile and run."""
    if importlib.util.find_spec("flashinfer") is None:
        raise MissingError(f"FlashInfer is not installed; type {BIN}/pip install {FLASHINFER}")
    if not torch.cuda.is_available():
        return NEEDS_DEVICE
    from vllm.utils.flashinfer import has_flashinfer

    from vllm_magicdec.attention.flashinfer_attention import Geometry
    from vllm_magicdec.attention.plans import CommonLengthPlans

    download = f"type {BIN}/vllm download-kernels, or install the CUDA toolkit and export CUDA_HOME"
    if not has_flashinfer():
        raise MissingError(f"vLLM finds neither compiled kernels of FlashInfer nor nvcc; {download}")
    geometry = Geometry(32, 8, 128, torch.bfloat16, torch.bfloat16, scale=1.0)
    plans = CommonLengthPlans(geometry, max_num_reqs=1, max_graph_reqs=0, device=torch.device("cuda"))
    try:
        plans.load_kernels()
        torch.cuda.synchronize()
    except Exception as error:  # of whatever compiles, loads or launches the kernel
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise MissingError(f"FlashInfer's kernels do not run ({lines[-1]}); {download}") from None
    return f"flashinfer-python {version('flashinfer-python')}, its kernels run"


def disk(args: argparse.Namespace) -> str:
    free = shutil.disk_usage(Path.home()).free / GIB
    if free < DISK_GIB:
        raise MissingError(
            f"{free:.0f} GiB are free at {Path.home()}, and compiled kernels take up to {DISK_GIB}; free "
            "some, or export HOME=/path/with/space"
        )
    return f"{free:.0f} GiB free at {Path.home()}"


def model(args: argparse.Namespace) -> str:
    """Check configuration and weights, because the benchmarks' engines download nothing."""
    from huggingface_hub import snapshot_download

    folder = Path(args.model)
    if not (folder / "config.json").exists():
        try:
            folder = Path(snapshot_download(args.model, local_files_only=True))
        except Exception:  # neither a folder nor the name of something downloaded
            raise MissingError(
                f"{args.model} is not on this disk; type {BIN}/hf download {args.model}"
            ) from None
    if not any(folder.glob("*.safetensors")):
        raise MissingError(f"{folder} has no weights (*.safetensors); type {BIN}/hf download {args.model}")
    return str(folder)


CHECKS: tuple[Callable[[argparse.Namespace], str], ...] = (
    *(driver, device, memory),
    *(vllm, plugin, ninja, flashinfer),
    *(disk, model),
)


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3-8B", help="a folder or a name")
    add_out(parser)
    args = parser.parse_args(argv)
    found: dict[str, str] = {}
    missing: dict[str, str] = {}
    for check in CHECKS:
        name = check.__name__
        try:
            found[name] = check(args)
        except MissingError as error:
            missing[name] = str(error)
        print(f"{name}: {f'MISSING: {missing[name]}' if name in missing else found[name]}", flush=True)
    if args.out is not None:
        write(make_record("gpu preflight", found=found, missing=missing), args.out)
    if missing:
        sys.exit(f"{len(missing)} of {len(CHECKS)} checks failed: nothing was measured")


if __name__ == "__main__":
    main()
