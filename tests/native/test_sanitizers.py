# SPDX-License-Identifier: Apache-2.0
"""The kernel reads and writes nothing that it was not given, and does nothing that C++ leaves undefined."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_magicdec.native.library import FOLDER, VARIANTS, runs_here

pytestmark = pytest.mark.extended

HERE = Path(__file__).parent
FLAGS = {
    "portable": [],
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4"],
    "avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"],
    "amx": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"],
}
COMPILER = os.environ.get("CXX", "c++").split()
# Four threads share the work, so that what they put together is seen as well; or fewer do it.
THREADS = {
    "as asked for": {"OMP_NUM_THREADS": "4"},
    "fewer": {"OMP_NUM_THREADS": "4", "OMP_THREAD_LIMIT": "2"},
    "one": {"OMP_NUM_THREADS": "4", "OMP_MAX_ACTIVE_LEVELS": "0"},
}


def first_cache() -> int:
    """Bytes of a core's first cache for data; 0: unknown."""
    if shutil.which("getconf") is None:
        return 0
    told = subprocess.run(["getconf", "LEVEL1_DCACHE_SIZE"], capture_output=True, text=True).stdout.strip()
    return int(told) if told.isdecimal() else 0


@pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="needs a compiler for C++")
@pytest.mark.parametrize("name", [variant.name for variant in VARIANTS if runs_here(variant)])
def test_no_sanitizer_complains(name, tmp_path):
    program = tmp_path / "sanitized"
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]
    sources = [HERE / "sanitized.cpp", *FOLDER.glob("*.cpp")]
    # Its contexts are short: so that tokens are weighed a group of rows at a time all the same.
    small = "-DMAGICDEC_MOST_LOGITS=512"
    # The other tests have the tiles of this machine's first cache, this one those of another's.
    tiles = f"-DMAGICDEC_FEW_ROWS_BYTES={16384 if first_cache() >= 49152 else 32768}"
    options = ["-std=c++17", "-w", "-fopenmp", *sanitize, small, tiles, *FLAGS[name], f"-I{FOLDER}"]
    command = [*COMPILER, *options, *sources]
    built = subprocess.run([*command, "-o", program], capture_output=True, text=True)
    if "cannot find -lasan" in built.stderr or "cannot find -lubsan" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    for how, variables in THREADS.items():
        env = {**os.environ, **variables, "ASAN_OPTIONS": "detect_leaks=0"}
        env.pop("LD_PRELOAD", None)
        run = subprocess.run([program], capture_output=True, text=True, env=env)
        assert run.returncode == 0, f"threads {how}: {run.stdout}{run.stderr}"


@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None or shutil.which("qemu-aarch64") is None,
    reason="needs Debian's g++-aarch64-linux-gnu and qemu-user",
)
def test_it_is_right_on_aarch64(tmp_path):
    """Without the sanitizers, which do not run in an emulator."""
    program = tmp_path / "emulated"
    sources = [HERE / "sanitized.cpp", *FOLDER.glob("*.cpp")]
    compiler = ["aarch64-linux-gnu-g++", "-std=c++17", "-w", "-fopenmp", "-O2", f"-I{FOLDER}"]
    subprocess.run([*compiler, *sources, "-o", program], check=True)
    for how, variables in THREADS.items():
        env = {**os.environ, **variables, "QEMU_LD_PREFIX": "/usr/aarch64-linux-gnu"}
        run = subprocess.run(["qemu-aarch64", program], capture_output=True, text=True, env=env)
        assert run.returncode == 0, f"threads {how}: {run.stdout}{run.stderr}"
