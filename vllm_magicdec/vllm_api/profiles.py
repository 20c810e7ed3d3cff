# SPDX-License-Identifier: Apache-2.0
"""Whether a profile given to an engine is of its draft and its budget, and what measures one that is."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_magicdec.adaptive.step_times import StepTimes
from vllm_magicdec.config import (
    MODEL_FIELDS,
    MagicDecSpeculativeConfig,
    default_of,
    documented_fields,
)
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError, quoted

logger = init_logger(f"vllm.{__name__}")


def check_profile(
    path: str, spec: MagicDecSpeculativeConfig, vllm_config: VllmConfig, default_most: int
) -> None:
    """Refuse one that cannot be read or is of another budget or method; warn of another model.

    Args:
        path: of the profile.
        spec: the engine's.
        vllm_config: the engine's.
        default_most: drafts of a round, at most, where the user does not say.

    Raises:
        MagicDecConfigError: with the reason and the way out.
    """
    try:
        times = StepTimes.load(Path(path))
    except ValueError as error:
        raise MagicDecConfigError(f"{spec.name}: profile: {error}") from None
    command = _command_to_measure(spec, _engine_options(vllm_config), default_most)
    _check_who_drafted(spec, times.description, command)
    measured = times.budgets
    # A fraction is of this engine's model length, which may differ from the profile's.
    if spec.draft_kv_budget >= 1 and spec.draft_kv_budget not in measured:
        raise MagicDecConfigError(
            f"{spec.name}: profile: {path} was measured with draft_kv_budget={_and(measured)}, not "
            f"{spec.draft_kv_budget:g}; use what was measured, or measure again with 'magicdec profile'"
        )


def _check_who_drafted(
    spec: MagicDecSpeculativeConfig, description: Mapping[str, Any], command: str
) -> None:
    """Passes of another model take other times, and `auto` would choose by these.

    Args:
        spec: the engine's.
        description: the profile's.
        command: what measures one for this engine.
    """
    path, model, target = spec.profile, spec.model, spec.target_model_config.model
    assert model is not None
    method, drafted = _who_drafted(description)
    verified = description.get("model")
    if method not in (None, spec.name):
        raise MagicDecConfigError(
            f"{spec.name}: profile: {path} was measured with method={method!r}, with which another "
            f"model drafts; measure again with: {command}, or remove 'profile'"
        )
    if drafted is None:
        what = f"does not say what drafted when it was measured; if that was not {quoted(model)}"
    elif _own_name(drafted) != _own_name(model):
        # That proves nothing: a folder may be mounted under any name, or be a link.
        what = f"was measured with drafts of {quoted(drafted)}, not {quoted(model)}; if these are "
        what += "not the same size"
    elif isinstance(verified, str) and _own_name(verified) != _own_name(target):
        what = f"was measured with {quoted(verified)}, not {quoted(target)}; if these are not the same size"
    else:
        return
    logger.warning_once("%s: profile: %s %s, measure again with: %s", spec.name, path, what, command)


def _engine_options(vllm_config: VllmConfig) -> dict[str, Any]:
    """What says how long an engine's steps are, as arguments of `LLM`."""
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


def _command_to_measure(
    spec: MagicDecSpeculativeConfig, engine: Mapping[str, Any], default_most: int
) -> str:
    """What writes a profile for this configuration, with the fields that the user gave."""
    # Numbers of drafts are what `auto` has become, and nothing is looked up there.
    others = ("profile", "draft_lookup", "draft_lookup_sources")
    numbers = ("num_speculative_tokens", "max_num_speculative_tokens")
    names = {"draft_sample_method", *documented_fields(), *MODEL_FIELDS} - {*others, *numbers}
    if spec.spire is not None:  # it brings its own view, which is not what the user gave
        names = {name for name in names if not name.startswith("draft_kv_")}
    given = {name: getattr(spec, name) for name in names if getattr(spec, name) != default_of(name)}
    if spec.num_speculative_tokens != default_most:
        given["max_num_speculative_tokens"] = spec.num_speculative_tokens
    model = {"model": spec.model} if spec.has_draft_model else {}
    fields = {"method": spec.name, **model, **{name: _typed(given[name]) for name in sorted(given)}}
    target = spec.target_model_config.model
    command = ["magicdec", "profile", "--model", target, "--speculative-config", json.dumps(fields)]
    return shlex.join([*command, "--engine", json.dumps(engine)])


def _typed(value: Any) -> Any:
    """A field's value as a user types it in JSON."""
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole else getattr(value, "name", value)  # of a backend


def _who_drafted(description: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The method and the model that drafted when a profile was measured; None: it does not say."""
    fields = description.get("speculative_config")
    if not isinstance(fields, dict):
        return None, None
    method, model = fields.get("method"), fields.get("model")
    if method != MODEL_METHOD:
        if METHOD not in (method, model):
            return None, None
        method, model = METHOD, description.get("model")  # the target
    return method, model if isinstance(model, str) else None


def _own_name(model: str) -> str:
    """A model's, without who published it or the folder that it is in."""
    parts = Path(os.path.abspath(model)).parts
    # In Hugging Face's cache its folder is named models--PUBLISHER--NAME.
    cached = [part.rpartition("--")[2] for part in parts if part.startswith("models--")]
    return (cached or parts)[-1].casefold()


def _and(budgets: Sequence[float]) -> str:
    *first, last = (f"{budget:g}" for budget in budgets)
    return f"{', '.join(first)} and {last}" if first else last
