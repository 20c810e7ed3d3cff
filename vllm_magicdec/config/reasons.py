# SPDX-License-Identifier: Apache-2.0
"""Library errors, shortened to one line."""

from traceback import walk_tb

from pydantic import ValidationError
from vllm.config import ModelConfig, SpeculativeConfig

from vllm_magicdec.config.adaptive import MOST_DRAFTS
from vllm_magicdec.errors import quoted

_LONGEST_REASON = 240  # characters
# What to type where pydantic names neither words nor fractions.
_POSSIBLE = {
    "num_speculative_tokens": f"use 1 to {MOST_DRAFTS} or 'auto', or leave speculation out",
    "draft_kv_budget": "use a number of tokens, or a fraction of the context such as 0.06",
}


def first_problem(error: ValidationError, method: str) -> str:
    """Return a sentence on the first problem that pydantic found."""
    problem = error.errors(include_url=False)[0]
    # For an unknown draft model, vLLM adds a page of advice.
    message = problem["msg"].removeprefix("Value error, ").split("\n")[0]
    if not problem["loc"]:
        return f"{method}: {message}"
    name = problem["loc"][0]
    value = quoted(problem["input"])
    instead = f"; {_POSSIBLE[name]}" if name in _POSSIBLE else ""
    return f"{method}: {name}={value} is not possible: {message[0].lower()}{message[1:]}{instead}"


def one_line(error: Exception) -> str:
    """Return the first line of an error."""
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
    """Return whether vLLM raised the error while it read a model's configuration.

    `SpeculativeConfig` computes with some of the draft's unchecked numbers, so its errors count too.
    """
    if isinstance(error, ValidationError):
        return error.title == ModelConfig.__name__
    frames = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    is_computing = frames[-1] is SpeculativeConfig.__post_init__.__code__
    return ModelConfig.__post_init__.__code__ in frames or (
        is_computing and isinstance(error, TypeError | ArithmeticError)
    )
