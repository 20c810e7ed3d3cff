# SPDX-License-Identifier: Apache-2.0
"""`make check-vllm VLLM=0.33.0`: our calls against the Python files of another release, by mypy.

The argument is a folder that holds the package `vllm`. Errors are reported in our files alone.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = {"vllm.v1.spec_decode.registry"}  # of patches/
# An ignore that only one version needs is no error beside another.
MYPY = [sys.executable, "-m", "mypy", "--no-warn-unused-ignores", "--cache-dir", ".mypy_cache/vllm"]


def find_missing_modules(folder: Path) -> list[str]:
    """A line for each import of a missing module; mypy would read the installed vLLM's instead."""
    missing = []
    for path in sorted((ROOT / "vllm_magicdec").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            module = re.match(r"\s*from (vllm(?:\.\w+)*) import ", line)
            if module is None or module[1] in OPTIONAL:
                continue
            stem = folder.joinpath(*module[1].split("."))
            if not (stem.is_dir() or stem.with_suffix(".py").is_file()):
                missing.append(f"{path.relative_to(ROOT)}:{number}: error: vLLM has no module {module[1]}")
    return missing


def main(where: str) -> int:
    folder = Path(where).resolve()
    if not (folder / "vllm" / "__init__.py").is_file():
        sys.exit("check-vllm: name a release of vLLM, for example VLLM=0.33.0")
    missing = find_missing_modules(folder)
    print("\n".join(missing), end="\n" if missing else "", flush=True)
    child = subprocess.run(MYPY, cwd=ROOT, env={**os.environ, "MYPYPATH": str(folder)}, check=False)
    return child.returncode or bool(missing)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
