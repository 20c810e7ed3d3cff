# SPDX-License-Identifier: Apache-2.0
"""The command `magicdec`: one module per subcommand, each with an `add_command(subparsers)`."""

import argparse
import difflib
import importlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

COMMANDS = (
    *(f"vllm_magicdec.planner.{name}" for name in ("plan", "profile", "index", "train_draft")),
    "vllm_magicdec.check",
)


class UserError(ValueError):
    """What the user typed cannot work, in one sentence that says what to type instead."""


def require(module: str, extra: str = "bench") -> ModuleType:
    """Import a module that only an extra brings.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise UserError(f"this needs {package}; try: pip install 'vllm-magicdec[{extra}]'") from None


def screen(width: int) -> Any:
    """rich's console for tables: as wide as the terminal, or so many columns where there is none.

    Raises:
        UserError: rich is not installed.
    """
    terminal = sys.stdout.isatty()
    return require("rich.console").Console(
        highlight=False, width=None if terminal else width, soft_wrap=True
    )


def write_json(record: Mapping[str, Any], file: Path) -> None:
    """Write a record, with null for what is not a number: JSON has no NaN.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        file.write_text(json.dumps(_without_nan(record), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def look_up(name: str, table: Mapping[str, T], what: str, choices: list[str]) -> T:
    """The entry of that name, in any case.

    Args:
        what: it is, for the sentence.
        choices: there are.

    Raises:
        UserError: there is none.
    """
    names = {known.lower(): known for known in table}
    if name.lower() in names:
        return table[names[name.lower()]]
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean '{names[close[0]]}'? " if close else ""
    raise UserError(f"there is no {what} '{name}'; {hint}There are {', '.join(choices)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `magicdec`; returns the exit status: the subcommand's, or 2 for what the user has to change."""
    parser = argparse.ArgumentParser(prog="magicdec", description="Tools around vllm-magicdec.")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(name).add_command(subparsers)
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        _refuse_loads(arguments)
        options = parser.parse_args(arguments)
        return options.run(options) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _refuse_loads(arguments: Sequence[str]) -> None:
    """Refuse `magicdec simulate` and `magicdec plan --load`, which were removed.

    Raises:
        UserError: one of them was typed.
    """
    command, *options = arguments or [""]
    has_load = any(option.split("=")[0] == "--load" for option in options)
    if command == "simulate" or (command == "plan" and has_load):
        raise UserError(
            "'magicdec simulate' and 'magicdec plan --load' were removed; measure a load with 'vllm bench "
            "serve', and predict speedups with 'magicdec plan'"
        )
