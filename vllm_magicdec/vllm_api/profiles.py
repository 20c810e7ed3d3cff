# SPDX-License-Identifier: Apache-2.0
"""Check that a profile matches the engine, and build the command that measures a new one."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_magicdec.adaptive.step_times import StepTimes
from vllm_magicdec.config import MODEL_FIELDS, MagicDecSpeculativeConfig, default_of, documented_fields
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError, quoted

logger = init_logger(f"vllm.{__name__}")


def check_profile(
    path: str, spec: MagicDecSpeculativeConfig, vllm_config: VllmConfig, default_max_tokens: int
) -> None:
    """Refuse a profile that is unreadable or has another budget or method; warn if the model differs.

    Args:
        default_max_tokens: maximum number of draft tokens per round if the user sets none.

    Raises:
        MagicDecConfigError: if the profile is refused; says what to do instead.
    """
    try:
        times = StepTimes.load(Path(path))
    except ValueError as error:
        raise MagicDecConfigError(f"{spec.name}: profile: {error}") from None
    command = _profile_command(spec, _engine_options(vllm_config), default_max_tokens)
    _check_drafter(spec, times.description, command)
    measured = times.budgets
    # A fraction applies to the engine's model length, which may differ from the profile's.
    if spec.draft_kv_budget >= 1 and spec.draft_kv_budget not in measured:
        raise MagicDecConfigError(
            f"{spec.name}: profile: {path} was measured with draft_kv_budget={_join(measured)}, not "
            f"{spec.draft_kv_budget:g}; use a measured budget, or measure again with 'magicdec profile'"
        )


def _check_drafter(spec: MagicDecSpeculativeConfig, description: Mapping[str, Any], command: str) -> None:
    """Refuse another method and warn if another model drafted: step times differ between models."""
    path, model, target = spec.profile, spec.model, spec.target_model_config.model
    assert model is not None
    method, drafted = _find_drafter(description)
    verified = description.get("model")
    if method not in (None, spec.name):
        raise MagicDecConfigError(
            f"{spec.name}: profile: {path} was measured with method={method!r}, not "
            f"{spec.name!r}; measure again with: {command}, or remove 'profile'"
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
    logger.warning_once("%s: profile: %s %s, measure again with: %s", spec.name, path, what, command)


def _engine_options(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return the engine options that affect step times, as arguments of `LLM`."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    ranks = vllm_config.parallel_config.tensor_parallel_size
    given = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "trust_remote_code": model.trust_remote_code or None,
        "tensor_parallel_size": ranks if ranks > 1 else None,
        "quantization": model.quantization,
        "enforce_eager": model.enforce_eager or None,
        "block_size": cache.block_size if cache.user_specified_block_size else None,
        "kv_cache_dtype": None if cache.cache_dtype == "auto" else cache.cache_dtype,
    }
    return {name: value for name, value in given.items() if value is not None}


def _profile_command(
    spec: MagicDecSpeculativeConfig, engine: Mapping[str, Any], default_max_tokens: int
) -> str:
    """Return the command that writes a profile for this configuration, with the user's fields."""
    # The profile measures all numbers of drafts itself, without lookups.
    others = ("profile", "draft_lookup", "draft_lookup_sources")
    numbers = ("num_speculative_tokens", "max_num_speculative_tokens")
    names = {"draft_sample_method", *documented_fields(), *MODEL_FIELDS} - {*others, *numbers}
    if spec.spire is not None:  # the draft sets these fields, not the user
        names = {name for name in names if not name.startswith("draft_kv_")}
    given = {name: getattr(spec, name) for name in names if getattr(spec, name) != default_of(name)}
    if spec.num_speculative_tokens != default_max_tokens:
        given["max_num_speculative_tokens"] = spec.num_speculative_tokens
    model = {"model": spec.model} if spec.has_draft_model else {}
    fields = {"method": spec.name, **model, **{name: _json_value(given[name]) for name in sorted(given)}}
    target = spec.target_model_config.model
    command = ["magicdec", "profile", "--model", target, "--speculative-config", json.dumps(fields)]
    return shlex.join([*command, "--engine", json.dumps(engine)])


def _json_value(value: Any) -> Any:
    """Return the value of a field as a user types it in JSON."""
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole else getattr(value, "name", value)  # name of a backend


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
