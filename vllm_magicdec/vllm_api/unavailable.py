# SPDX-License-Identifier: Apache-2.0
"""Refuse the plugin's methods, with the reason, if the installed vLLM is not supported.

This module does not import vLLM, and the attributes that it wraps exist in many versions.
"""

import argparse
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.hooking import Hook, after, install

_reason = ""


def _refuse_to_construct(owner: type, original: Callable[..., Any]) -> Callable[..., Any]:
    def __new__(cls: type, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("method") in (METHOD, MODEL_METHOD) or kwargs.get("model") == METHOD:
            raise MagicDecConfigError(_reason)
        return object.__new__(cls)

    return __new__


def _refuse_option(text: str) -> None:
    raise argparse.ArgumentTypeError(_reason)


def _refuse_on_command_line(parser: Any, *_: Any, **__: Any) -> Any:
    """Add a --speculative-model that gives the reason; let --spec-method accept the plugin's methods."""
    with suppress(Exception):
        options = parser._option_string_actions
        if "--speculative-model" not in options:
            parser.add_argument(
                "--speculative-model",
                type=_refuse_option,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
        method = options.get("--spec-method")
        if method is not None and method.choices is not None:
            method.choices = [*method.choices, METHOD, MODEL_METHOD]
    return parser


HOOKS = (
    Hook.of(
        "vllm.config",
        "SpeculativeConfig.__new__",
        reason="the plugin's methods must be refused here before vLLM refuses them as unknown",
        wrap=_refuse_to_construct,
    ),
    Hook.of(
        "vllm.engine.arg_utils",
        "EngineArgs.add_cli_args(parser)",
        reason="--speculative-model must be refused with the reason, not as an unknown option",
        wrap=after(_refuse_on_command_line),
    ),
)


def explain(reason: str) -> None:
    """Refuse requests for the plugin's methods with `reason`, as far as this vLLM allows."""
    global _reason
    _reason = reason
    for hook in HOOKS:
        with suppress(Exception):
            install([hook])
