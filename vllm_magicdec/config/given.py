# SPDX-License-Identifier: Apache-2.0
"""Checks of user input before pydantic: field names, method, `auto`."""

import difflib
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from typing import Any

from vllm.config import SpeculativeConfig

from vllm_magicdec.config.fields import (
    MODEL_FIELDS,
    PRIVATE_FIELDS,
    SWITCHES,
    TARGET_FIELDS,
    documented_fields,
    user_fields,
)
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError, quoted


def selects_magicdec(speculative_fields: Mapping[str, Any]) -> bool:
    """Return whether the fields of a `SpeculativeConfig` select this plugin."""
    method, model = speculative_fields.get("method"), speculative_fields.get("model")
    return METHOD in (method, model) or method == MODEL_METHOD


def chooses_drafts(speculative_fields: Mapping[str, Any]) -> bool:
    """Return whether the fields of a `SpeculativeConfig` ask for a controller."""
    return speculative_fields.get("num_speculative_tokens") == "auto"


def extends_method(speculative_fields: Mapping[str, Any]) -> bool:
    """Return whether the fields of one of vLLM's methods ask for a controller or a window."""
    return chooses_drafts(speculative_fields) or speculative_fields.get("draft_kv_budget") is not None


def refuse_misspelt_method(speculative_fields: Mapping[str, Any]) -> None:
    """Raise MagicDecConfigError for a misspelt method, which vLLM would take for a model's name."""
    for name in ("method", "model"):
        value = speculative_fields.get(name)
        if not isinstance(value, str) or value == METHOD or len(value) > 2 * len(METHOD):
            continue
        if name == "method" and value == MODEL_METHOD:
            continue
        letters = "".join(filter(str.isalnum, value.lower()))
        if letters == "magicdec" or difflib.get_close_matches(letters, ["magicdecself"], cutoff=0.85):
            raise MagicDecConfigError(f"{name}={value!r} is unknown; did you mean {METHOD!r}?")


def check_given(given: object, options: Mapping[str, object]) -> None:
    """Refuse a `speculative_config` that is no dictionary of fields or conflicts with options.

    Args:
        given: value of `speculative_config`.
        options: command-line options by field; None if not given.

    Raises:
        MagicDecConfigError: says what to type instead.
    """
    if given is None:
        return
    example = f"{{'method': {METHOD!r}}}"
    if not isinstance(given, dict):
        raise MagicDecConfigError(
            f"speculative_config={quoted(given)} is not a dictionary of fields; for {METHOD} use {example}"
        )
    named = {name: value for name, value in options.items() if value is not None}
    fields: dict[Any, Any] = {**given, **named}
    if not selects_magicdec(fields):
        _refuse_own_fields(fields)
        return
    for name in given:
        if not isinstance(name, str):
            raise MagicDecConfigError(f"{METHOD}: field names are strings, not {quoted(name)}")
        if name in named:
            raise MagicDecConfigError(
                f"{METHOD}: {name} is given twice, as {quoted(named[name])} by an option and as "
                f"{quoted(given[name])} in the speculative config; remove one of them"
            )


def _refuse_own_fields(given: Mapping[object, object]) -> None:
    """Raise MagicDecConfigError for fields of the plugin's methods where neither is selected."""
    fields = {str(name).replace("-", "_"): value for name, value in given.items()}
    refuse_misspelt_method(fields)
    own = [name for name in fields if name in documented_fields() and name != "num_speculative_tokens"]
    method, model = fields.get("method"), fields.get("model")
    if method is not None or model is not None:
        # Fields that the plugin adds to vLLM's methods.
        added = ["max_num_speculative_tokens"] if chooses_drafts(fields) else []
        if fields.get("draft_kv_budget") is not None:
            added += ["draft_kv_budget", "draft_kv_sink"]
        own = [name for name in own if name not in added]
    elif chooses_drafts(fields):
        own.append("num_speculative_tokens='auto'")
    if not own:
        return
    needed = METHOD if model is None else MODEL_METHOD
    if method is None:
        raise MagicDecConfigError(f"{own[0]} belongs to method={needed!r}; add that")
    raise MagicDecConfigError(
        f"{own[0]} belongs to method={needed!r}; use that instead of method={quoted(method)}, or remove "
        f"{own[0].split('=')[0]}"
    )


_REMOVED_FIELDS = {
    "draft_kv_cache": "remove it: a draft model's KV cache holds its whole context; draft_kv_budget limits "
    "what a draft step reads of it, and a draft of fewer layers leaves the target more room",
}


def check_field_names(given: Mapping[str, Any]) -> None:
    """Raise MagicDecConfigError for fields that are unknown or unused by the method."""
    allowed = user_fields()
    if given.get("method") == MODEL_METHOD or given.get("has_draft_model"):
        allowed = (*allowed, *sorted(MODEL_FIELDS))
    vllm_defaults = {f.name: f.default for f in dataclass_fields(SpeculativeConfig)}
    is_copy = given.keys() >= PRIVATE_FIELDS
    of_engine = TARGET_FIELDS | PRIVATE_FIELDS if is_copy else TARGET_FIELDS
    for name, value in given.items():
        if name in allowed and name not in SWITCHES and isinstance(value, bool):
            raise MagicDecConfigError(
                f"{name_of(given)}: {name}={value} is not possible: it is not a boolean field"
            )
        if name in allowed or name in of_engine:
            continue
        if name in vllm_defaults:
            default = getattr(vllm_defaults[name], "default", vllm_defaults[name])
            # vllm.config.utils.replace() passes every field, most at their default.
            if value == default:
                continue
            raise MagicDecConfigError(
                f"{METHOD} has no use for '{name}' because the draft is the target model itself; "
                "remove it from the speculative config"
                if given.get("method") != MODEL_METHOD
                else f"{MODEL_METHOD} does not take '{name}'; remove it from the speculative config"
            )
        if name in _REMOVED_FIELDS:
            raise MagicDecConfigError(
                f"{name_of(given)}: {name} is no longer supported; {_REMOVED_FIELDS[name]}"
            )
        close = difflib.get_close_matches(name, allowed, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise MagicDecConfigError(
            f"{name_of(given)} does not know the field '{name}'; {hint}It takes {', '.join(allowed)}"
        )


def check_method(given: Mapping[str, Any]) -> bool:
    """Return whether a draft model drafts; raise MagicDecConfigError for a contradictory method."""
    method, model = given.get("method"), given.get("model")
    if given.get("has_draft_model"):  # a copy
        return True
    if method == MODEL_METHOD:
        if model in (None, METHOD):
            raise MagicDecConfigError(
                f"method={MODEL_METHOD!r} drafts with a model of its own; name one in 'model' "
                f"(--speculative-model), or use method={METHOD!r} to draft with the target itself"
            )
        return True
    if method not in (None, METHOD, "draft_model"):
        raise MagicDecConfigError(
            f"model={METHOD!r} drafts with the target itself; remove method={quoted(method)}"
        )
    target = given.get("target_model_config")
    if model not in (None, METHOD, target and target.model):
        raise MagicDecConfigError(
            f"method={METHOD!r} drafts with the target itself; remove model={quoted(model)}, or use "
            f"method={MODEL_METHOD!r} to draft with that model"
        )
    return False


def resolve_auto(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `auto` and a single source by values of the declared types."""
    fields = dict(given)
    if chooses_drafts(given):
        del fields["num_speculative_tokens"]
        fields["adaptive"] = True
    if isinstance(given.get("draft_lookup_sources"), str):
        fields["draft_lookup_sources"] = (given["draft_lookup_sources"],)
    return fields


def name_of(given: Mapping[str, Any]) -> str:
    """Return the method's public name."""
    return MODEL_METHOD if given.get("method") == MODEL_METHOD else METHOD
