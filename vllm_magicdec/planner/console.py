# SPDX-License-Identifier: Apache-2.0
"""The command `magicdec`. Each subcommand is a module with an `add_command(subparsers)`."""

import argparse
import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")

COMMANDS = (
    *(f"vllm_magicdec.planner.{name}" for name in ("plan", "profile", "index", "train_draft")),
    "vllm_magicdec.check",
)

_REMOVED = {
    "plan --png": "draw the numbers that --json writes",
    "plan --ideal": "replace constants with --costs",
}


class UserError(ValueError):
    """An error in the user's input: one sentence that says what to type instead."""


def require(module: str, extra: str = "bench") -> ModuleType:
    """Import a module of an optional dependency; raise UserError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise UserError(f"this needs {package}; try: pip install 'vllm-magicdec[{extra}]'") from None


def find_by_name(name: str, table: Mapping[str, T], what: str, choices: list[str]) -> T:
    """Return the entry of `table` with that name, ignoring case; raise UserError if there is none."""
    names = {known.lower(): known for known in table}
    if name.lower() in names:
        return table[names[name.lower()]]
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean '{names[close[0]]}'? " if close else ""
    raise UserError(f"there is no {what} '{name}'; {hint}use one of {', '.join(choices)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `magicdec`; return the subcommand's exit status, or 2 for an error in the user's input."""
    parser = argparse.ArgumentParser(prog="magicdec", description="Tools around vllm-magicdec.")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(name).add_command(subparsers)
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        _refuse_removed(arguments)
        options = parser.parse_args(arguments)
        return options.run(options) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _refuse_removed(arguments: Sequence[str]) -> None:
    command, *options = arguments or [""]
    for name in (command, *(f"{command} {option.split('=')[0]}" for option in options)):
        if name in _REMOVED:
            raise UserError(f"'magicdec {name}' was removed; {_REMOVED[name]}")
