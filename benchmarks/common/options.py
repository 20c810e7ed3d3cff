# SPDX-License-Identifier: Apache-2.0
"""Command-line options that several benchmarks share."""

import argparse
from pathlib import Path
from typing import Any

from .documents import describe_documents


def make_parser(description: str | None, **settings: Any) -> argparse.ArgumentParser:
    """Return a parser with a script's docstring as its description."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=formatter, **settings)


def served_dtype() -> str:
    """Return the dtype for this machine: float32 where bfloat16 products are slow."""
    import torch

    from vllm_magicdec.machine import multiplies_many_at_once

    is_fast = torch.cuda.is_available() or multiplies_many_at_once(torch.bfloat16)
    return "bfloat16" if is_fast else "float32"


def add_model(parser: argparse.ArgumentParser, default: str) -> None:
    names = "a folder, a name, or one of kv_heavy.py's or of `make models`"
    parser.add_argument("--model", default=default, help=names)
    parser.add_argument("--dtype", default=served_dtype(), help="%(default)s on this machine")


def add_cells(parser: argparse.ArgumentParser, batch: list[int], context: list[int]) -> None:
    """Add the batches and contexts that a script combines."""
    parser.add_argument("--batch", type=int, nargs="+", default=batch, help="requests that decode together")
    parser.add_argument("--context", type=int, nargs="+", default=context, help="tokens")


def add_documents(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--documents", type=Path, help="folder of .txt files for the prompts")


def add_out(parser: argparse.ArgumentParser, beside: str = "") -> None:
    """Add the path of the record; `beside` names other files in the help."""
    parser.add_argument("--out", type=writable, help=f"JSON file for the result{beside}")


def writable(text: str) -> Path:
    """Parse the path of a file to write, and create its folder.

    Raises:
        argparse.ArgumentTypeError: it is a folder, or its folder cannot be created.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be written: {error.strerror}") from None
    return path


def settings_of(args: argparse.Namespace, *left_out: str) -> dict[str, Any]:
    """Return the user's options for a record."""
    settings = {name: value for name, value in vars(args).items() if name not in ("out", *left_out)}
    if "documents" in settings:
        settings["documents"] = describe_documents(args.documents)
    return settings
