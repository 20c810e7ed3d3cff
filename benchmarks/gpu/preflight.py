# SPDX-License-Identifier: Apache-2.0
"""What the kit needs and this machine lacks: a sentence for each thing, with what to type.

`make bench-gpu` begins with it; `python -m benchmarks.gpu.preflight` runs it alone. What stops everything
ends it with status 1; without the rest the kit runs, slower or with less to show, as the sentence says.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from packaging.version import Version

from benchmarks.common.options import add_out, make_parser
from benchmarks.common.record import make_record, write

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent  # pip's programs
FREE_SHARE = 0.92  # of the device's memory: what vLLM takes by default
SPARE_GIB = 10  # on the disk, for kernels and graphs that vLLM, Triton and FlashInfer compile
LOST = "Triton reads what drafts look at instead, slower"
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One thing that the kit needs."""

    what: str
    found: str = ""  # in words
    missing: str = ""  # what is, and what to type; empty: nothing
    is_fatal: bool = False  # nothing runs without it


def driver() -> Finding:
    """NVIDIA's, and a device that it shows."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        child = subprocess.run(query, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        missing = (
            "no NVIDIA driver: nvidia-smi is not there; install the driver (Ubuntu: sudo ubuntu-drivers "
            "install), or start the container with --gpus all"
        )
    except subprocess.CalledProcessError as error:
        said = " ".join((error.stdout or error.stderr).split())
        missing = f"the NVIDIA driver does not answer ({said}); type nvidia-smi, and restart the machine"
    else:
        return Finding("driver", "; ".join(child.stdout.strip().splitlines()))
    return Finding("driver", missing=missing, is_fatal=True)


def torch_with_cuda() -> Finding:
    """torch, built for CUDA, with a device."""
    import torch

    found = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        missing = (
            f"{found} is built without CUDA; type rm -rf .venv, then make venv where nvidia-smi answers"
        )
    elif not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        missing = (
            f"CUDA_VISIBLE_DEVICES={hidden!r} leaves {found} no device; type unset CUDA_VISIBLE_DEVICES"
            if hidden is not None
            else f"{found} finds no device; its CUDA {torch.version.cuda} needs a newer driver: type "
            "nvidia-smi for the highest CUDA that yours knows"
        )
    else:
        return Finding("torch", f"{found}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}")
    return Finding("torch", missing=missing, is_fatal=True)


def gpu_memory() -> Finding:
    """As much free memory as vLLM takes by default."""
    import torch

    free, total = torch.cuda.mem_get_info()
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB of GPU memory are free"
    if free >= FREE_SHARE * total:
        return Finding("GPU memory", found)
    missing = (
        f"{found}, and vLLM takes {FREE_SHARE:.0%}; type nvidia-smi to see which processes hold the rest, "
        "and end them"
    )
    return Finding("GPU memory", found, missing, is_fatal=True)


def vllm() -> Finding:
    """A version that the plugin was tested with."""
    installed = _version("vllm")
    if installed is None:
        missing = "vLLM is not installed; type make venv, and start the kit with make bench-gpu"
        return Finding("vLLM", missing=missing, is_fatal=True)
    from vllm_magicdec import TESTED_VLLM_VERSIONS

    missing = ""
    if Version(installed).public not in TESTED_VLLM_VERSIONS:
        tested = " or ".join(TESTED_VLLM_VERSIONS)
        missing = (
            f"vLLM {installed} is not what the plugin was tested with; type {BIN}/pip install "
            f"vllm=={TESTED_VLLM_VERSIONS[-1]} to have {tested}"
        )
    return Finding("vLLM", f"vLLM {installed}", missing)


def plugin() -> Finding:
    """The plugin of this checkout, where vLLM looks for it."""
    import vllm_magicdec

    here, installed = vllm_magicdec.__version__, _version("vllm-magicdec")
    allowed = os.environ.get("VLLM_PLUGINS")
    install = f"{BIN}/pip install --no-deps -e {ROOT}"
    missing = ""
    if not any(point.name == "magicdec" for point in entry_points(group="vllm.general_plugins")):
        missing = f"vLLM cannot find the plugin; type {install}"
    elif installed != here:
        missing = f"vllm-magicdec {installed} is installed and this is {here}; type {install}"
    elif allowed is not None and "magicdec" not in allowed.split(","):
        wanted = ",".join(filter(None, [allowed, "magicdec"]))
        missing = f"VLLM_PLUGINS keeps the plugin out; type export VLLM_PLUGINS={wanted}"
    return Finding("plugin", f"vllm-magicdec {installed or here}", missing, is_fatal=bool(missing))


def flashinfer() -> Finding:
    """FlashInfer, by vLLM's own rules: its package, and kernels that are there or can be compiled."""
    from vllm.utils.flashinfer import _flashinfer_nvcc_path, has_flashinfer, has_flashinfer_cubin

    installed = _version("flashinfer-python")
    found = f"flashinfer-python {installed}"
    if importlib.util.find_spec("flashinfer") is None:
        wanted = "flashinfer-python==0.7.0.post1"
        return Finding(
            "FlashInfer", missing=f"FlashInfer is missing ({LOST}); type {BIN}/pip install {wanted}"
        )
    if has_flashinfer():
        cubins = "with" if has_flashinfer_cubin() else "without"
        return Finding("FlashInfer", f"{found}, {cubins} flashinfer-cubin")
    lacks = [
        (_flashinfer_nvcc_path() is None, "nvcc", "export CUDA_HOME=/path/to/cuda"),
        (shutil.which("ninja") is None, "ninja", f"export PATH={BIN}:$PATH, where pip puts it"),
    ]
    absent = [name for is_absent, name, _ in lacks if is_absent]
    ways = [way for is_absent, _, way in lacks if is_absent]
    return Finding(
        "FlashInfer",
        found,
        f"vLLM does not use FlashInfer: flashinfer-cubin is not installed and {' and '.join(absent)} "
        f"cannot be found ({LOST}); type {BIN}/vllm download-kernels, or {', and '.join(ways)}",
    )


def flashinfer_kernels() -> Finding:
    """FlashInfer's kernels for draft attention, as the plugin uses them; compiled here if need be."""
    import torch

    from benchmarks.gpu.draft_attention import token_flashinfer
    from benchmarks.gpu.problem import Heads, Layer

    heads = Heads("", num_heads=32, num_kv_heads=8, head_size=128)
    try:
        layer = Layer(
            heads,
            batch=1,
            context=64,
            page_size=16,
            dtype=torch.bfloat16,
            device=torch.device("cuda"),
            seed=0,
        )
        token_flashinfer(layer, layer.token_view(32)).run()
        torch.cuda.synchronize()
    except Exception as error:  # of whatever compiles, loads or launches it
        said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        missing = (
            f"FlashInfer's kernels do not run ({said}; {LOST}); type {BIN}/vllm download-kernels, or "
            "install the CUDA toolkit and export CUDA_HOME"
        )
        return Finding("FlashInfer kernels", missing=missing)
    return Finding("FlashInfer kernels", "they run")


def disk() -> Finding:
    """Room for what is compiled."""
    folder = Path.home() / ".cache"
    free = shutil.disk_usage(_existing(folder)).free / GIB
    found = f"{free:.0f} GiB free at {folder}"
    missing = (
        f"{found}, and what vLLM, Triton and FlashInfer compile may take {SPARE_GIB}; make room there, or "
        "export HOME=/path/with/room"
        if free < SPARE_GIB
        else ""
    )
    return Finding("disk", found, missing)


def model(name: str) -> Finding:
    """Real weights on this disk: the kit's engines fetch nothing."""
    from huggingface_hub import constants, snapshot_download

    if Path(name, "config.json").exists():
        return Finding("model", name)
    try:
        return Finding("model", snapshot_download(name, local_files_only=True))
    except Exception:  # it names neither a folder nor anything that was downloaded
        cache = Path(constants.HF_HUB_CACHE)
        free = shutil.disk_usage(_existing(cache)).free / GIB
        missing = (
            f"{name} is not on this disk; type {BIN}/hf download {name} ({cache} has {free:.0f} GiB free; "
            "export HF_HOME=/path for another place)"
        )
        return Finding("model", missing=missing)


def findings(device: str, model_name: str | None) -> Iterator[Finding]:
    """Every check that says something here; what needs what has failed before is left out."""
    of_device = (driver, torch_with_cuda, gpu_memory) if device == "cuda" else ()
    checks: list[Callable[[], Finding]] = [*of_device, vllm, plugin]
    for check in checks:
        finding = check()
        yield finding
        if finding.is_fatal:
            return
    if device == "cuda":
        finding = flashinfer()
        yield finding
        if not finding.missing:
            yield flashinfer_kernels()
    yield disk()
    if model_name:
        yield model(model_name)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", help="whose real weights are wanted: a folder, a name")
    add_out(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    found = []
    for finding in findings(args.device, args.model):
        found.append(finding)
        print(f"{finding.what}: {f'MISSING: {finding.missing}' if finding.missing else finding.found}")
    is_ready = not any(finding.is_fatal for finding in found)
    record = make_record(
        "gpu preflight", device=args.device, is_ready=is_ready, findings=[asdict(f) for f in found]
    )
    write(record, args.out)
    if not is_ready:
        sys.exit(1)


if __name__ == "__main__":
    main()
