# SPDX-License-Identifier: Apache-2.0
"""Check that a profile matches the engine."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from vllm_magicdec.adaptive.step_times import StepTimes
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError, quoted

logger = init_logger(f"vllm.{__name__}")


def check_profile(path: str, spec: MagicDecSpeculativeConfig) -> None:
    """Refuse a profile that is unreadable or has another budget or method; warn if the model differs.

    Raises:
        MagicDecConfigError: if the profile is refused; says what to do instead.
    """
    try:
        times = StepTimes.load(Path(path))
    except ValueError as error:
        raise MagicDecConfigError(f"{spec.name}: profile: {error}") from None
    _check_drafter(path, spec, times.description)
    measured = times.budgets
    # A fraction applies to the engine's model length, which may differ from the profile's.
    if spec.draft_kv_budget >= 1 and spec.draft_kv_budget not in measured:
        raise MagicDecConfigError(
            f"{spec.name}: profile: {path} was measured with draft_kv_budget={_join(measured)}, not "
            f"{spec.draft_kv_budget:g}; use a measured budget, or measure again with 'magicdec profile'"
        )


def _check_drafter(path: str, spec: MagicDecSpeculativeConfig, description: Mapping[str, Any]) -> None:
    """Refuse another method or other weights, and warn if another model drafted: step times differ."""
    model, target = spec.model, spec.target_model_config.model
    assert model is not None
    method, drafted = _find_drafter(description)
    verified, fields = description.get("model"), description.get("speculative_config")
    weights = fields.get("draft_weights", "target") if isinstance(fields, dict) else spec.draft_weights
    own = {"method": (method or spec.name, spec.name), "draft_weights": (weights, spec.draft_weights)}
    for name, (measured, asked) in own.items():
        if measured != asked:
            raise MagicDecConfigError(
                f"{spec.name}: profile: {path} was measured with {name}={quoted(measured)}, not {asked!r}; "
                "measure again with 'magicdec profile', or remove 'profile'"
            )
    if drafted is None:
        what = f"does not name the model that drafted; if that was not {quoted(model)}"
    elif _base_name(drafted) != _base_name(model):
        # Not an error: a folder may be mounted under any name, or be a link.
        what = f"was measured with drafts of {quoted(drafted)}, not {quoted(model)}; if these are "
        what += "not the same size"
    elif isinstance(verified, str) and _base_name(verified) != _base_name(target):
        what = f"was measured with {quoted(verified)}, not {quoted(target)}; if these are not the same size"
    else:
        return
    logger.warning_once("%s: profile: %s %s, measure again with 'magicdec profile'", spec.name, path, what)


def _find_drafter(description: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the method and the draft model of a profile, each None if the profile does not name it."""
    fields = description.get("speculative_config")
    if not isinstance(fields, dict):
        return None, None
    method, model = fields.get("method"), fields.get("model")
    if method != MODEL_METHOD:
        if METHOD not in (method, model):
            return None, None
        method, model = METHOD, description.get("model")  # the target
    return method, model if isinstance(model, str) else None


def _base_name(model: str) -> str:
    """Return the name of a model without its publisher or folder."""
    parts = Path(os.path.abspath(model)).parts
    # Hugging Face's cache names the folder models--PUBLISHER--NAME.
    cached = [part.rpartition("--")[2] for part in parts if part.startswith("models--")]
    return (cached or parts)[-1].casefold()


def _join(budgets: Sequence[float]) -> str:
    *first, last = (f"{budget:g}" for budget in budgets)
    return f"{', '.join(first)} and {last}" if first else last
