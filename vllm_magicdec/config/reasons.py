# SPDX-License-Identifier: Apache-2.0
"""Errors of the libraries that judge a value, as a line of a sentence to the user."""

from traceback import walk_tb

from pydantic import ValidationError
from vllm.config import ModelConfig, SpeculativeConfig

from vllm_magicdec.errors import quoted

_LONGEST_REASON = 240  # characters of a library's


def first_problem(error: ValidationError, method: str) -> str:
    """One sentence for the first problem that pydantic found."""
    problem = error.errors(include_url=False)[0]
    # Where there is no such draft model, vLLM goes on with a page of advice.
    message = problem["msg"].removeprefix("Value error, ").split("\n")[0]
    if not problem["loc"]:
        return f"{method}: {message}"
    name = problem["loc"][0]
    value = quoted(problem["input"])
    return f"{method}: {name}={value} is not possible: {message[0].lower()}{message[1:]}"


def one_line(error: Exception) -> str:
    """What a library's error says, without the page of advice that may follow."""
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False)[0]
        name = "".join(f"{part}: " for part in problem["loc"])
        text = name + problem["msg"].removeprefix("Value error, ")
    else:
        text = repr(error) if isinstance(error, LookupError) else str(error) or type(error).__name__
    first, *more = (line.strip() for line in text.splitlines())
    line = f"{first} {more[0]}" if more and first.endswith(":") else first
    return line.rstrip(" .") if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}..."


def is_config_error(error: Exception) -> bool:
    """Whether vLLM raised it while it made a model's configuration, not while it used what it had made.

    Some of a draft's numbers its `SpeculativeConfig` takes as they are.
    """
    if isinstance(error, ValidationError):
        return error.title == ModelConfig.__name__
    frames = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    is_reckoning = frames[-1] is SpeculativeConfig.__post_init__.__code__
    return ModelConfig.__post_init__.__code__ in frames or (
        is_reckoning and isinstance(error, TypeError | ArithmeticError)
    )
