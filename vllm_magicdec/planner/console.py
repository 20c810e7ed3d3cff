# SPDX-License-Identifier: Apache-2.0
"""The command `magicdec`: one module per subcommand, each with an `add_command(subparsers)`."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

COMMANDS = tuple(
    f"vllm_magicdec.planner.{name}" for name in ("plan", "simulate", "profile", "index", "train_draft")
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `magicdec`; returns the exit status, 2 for what the user has to change."""
    parser = argparse.ArgumentParser(prog="magicdec", description="Tools around vllm-magicdec.")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(name).add_command(subparsers)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
