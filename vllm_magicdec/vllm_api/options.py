# SPDX-License-Identifier: Apache-2.0
"""Command-line options of the plugin, and display of its configuration errors."""

import argparse
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from vllm.config.utils import get_attr_docs

from vllm_magicdec.config.fields import MagicDecFields, default_of, documented_fields, user_fields
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError, quoted


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add aliases of vLLM's speculative options, and the help page `--help=magicdec`."""
    options = {name: action for action in parser._actions for name in action.option_strings}
    if "--speculative-model" in options:
        return parser
    method = options["--spec-method"]
    if method.choices is not None:
        method.choices = [*method.choices, METHOD, MODEL_METHOD]
    fields_option = options["--speculative-config"]
    fields_option.type = _checked_fields(fields_option.type)

    group = parser.add_argument_group("magicdec", description=_help_text())
    group.add_argument(
        "--speculative-model",
        dest="spec_model",
        default=argparse.SUPPRESS,
        help=f"Alias of --spec-model: a draft model, or {METHOD} to draft with the served model itself. "
        f"With --spec-method {MODEL_METHOD}, the draft model reads a sparse view of its own KV cache.",
    )
    group.add_argument(
        "--num-speculative-tokens",
        dest="spec_tokens",
        type=_number_or_auto,
        default=argparse.SUPPRESS,
        help="Alias of --spec-tokens: draft tokens per round, or 'auto'.",
    )
    options["--spec-tokens"].type = _number_or_auto
    _show_config_errors_as_sentences()
    return parser


def _number_or_auto(text: str) -> int | str:
    """Parse a number of draft tokens or `auto`."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor 'auto'") from None


def _checked_fields(parse: Any) -> Callable[[str], Any]:
    """Say in a sentence what --speculative-config takes; `create_engine_config` checks the fields."""

    def parse_and_check(text: str) -> Any:
        example = f'write it as \'{{"method": "{METHOD}"}}\''
        try:
            value = parse(text)
        except (argparse.ArgumentTypeError, ValueError, RecursionError):
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not JSON; {example}") from None
        if not isinstance(value, dict | None):
            raise argparse.ArgumentTypeError(f"{quoted(value)} is not a JSON object; {example}")
        return value

    return parse_and_check


def _help_text() -> str:
    """Return one paragraph, because vLLM's help pages show only the first of a group."""
    docs = get_attr_docs(MagicDecFields)
    sentences = [
        "Draft with the served model itself over a sparse view of its KV cache: --speculative-model "
        f"{METHOD}. Fields of --speculative-config for this method (or --speculative-config.FIELD VALUE):"
    ]
    for name in documented_fields():
        sentences.append(f"{name} (default {default_of(name)}): {' '.join(docs[name].split())}")
    others = [name for name in user_fields() if name not in documented_fields()]
    sentences.append(f"It also takes vLLM's own {', '.join(others)}.")
    return " ".join(sentences).replace("%", "%%")


def _show_config_errors_as_sentences() -> None:
    """Print configuration errors without a traceback."""
    previous = sys.excepthook

    def show(cls: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(cls, MagicDecConfigError):
            print(f"error: {error}", file=sys.stderr)
        else:
            previous(cls, error, trace)

    sys.excepthook = show
