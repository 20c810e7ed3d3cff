# SPDX-License-Identifier: Apache-2.0
"""Options that several command lines have."""

import argparse
from pathlib import Path
from typing import Any

from .documents import describe_documents


def make_parser(description: str | None, **settings: Any) -> argparse.ArgumentParser:
    """A parser whose help begins with a script's docstring."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=formatter, **settings)


def served_dtype() -> str:
    """What a model should be served in here: some CPUs multiply bfloat16 token by token."""
    import torch

    from vllm_magicdec.vllm_api.cpu_products import multiplies_many_at_once

    is_fast = torch.cuda.is_available() or multiplies_many_at_once(torch.bfloat16)
    return "bfloat16" if is_fast else "float32"


def add_model(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--model", default=default, help="a folder, a name, or one of kv_heavy.py's")
    parser.add_argument("--dtype", default=served_dtype(), help="%(default)s on this machine")


def add_cells(parser: argparse.ArgumentParser, batch: list[int], context: list[int]) -> None:
    """The batches and contexts that a script measures, each with each."""
    parser.add_argument("--batch", type=int, nargs="+", default=batch, help="requests that decode together")
    parser.add_argument("--context", type=int, nargs="+", default=context, help="tokens")


def add_documents(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--documents", type=Path, help="folder of .txt files for the prompts")


def add_out(parser: argparse.ArgumentParser, beside: str = "") -> None:
    """Where the record goes, and what goes beside it."""
    parser.add_argument("--out", type=writable, help=f"JSON file for the result{beside}")


def writable(text: str) -> Path:
    """A file's path, its folder made: what has been measured for an hour must have a place.

    Raises:
        argparse.ArgumentTypeError: it is a folder, or there can be none above it.
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
    """What the user could set, for a record."""
    settings = {name: value for name, value in vars(args).items() if name not in ("out", *left_out)}
    if "documents" in settings:
        settings["documents"] = describe_documents(args.documents)
    return settings
