# SPDX-License-Identifier: Apache-2.0
"""vLLM's speculative configuration for the plugin's methods."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from typing_extensions import override
from vllm.config import SpeculativeConfig, VllmConfig

from vllm_magicdec import files
from vllm_magicdec.config.adaptive import DEFAULT_MAX_TOKENS, nested_lengths
from vllm_magicdec.config.fields import VIEW_FIELDS, MagicDecFields, default_of
from vllm_magicdec.config.given import check_field_names, check_method, name_of, resolve_auto
from vllm_magicdec.config.reasons import first_problem, is_config_error, one_line
from vllm_magicdec.config.refusals import (
    check_adaptive_verification,
    check_draft_model,
    check_model,
    check_parallel,
    check_spire,
)
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError, quoted
from vllm_magicdec.policies import find_policy
from vllm_magicdec.policies.base import Limits, Policy
from vllm_magicdec.policies.sinks_and_window import SinksAndWindow
from vllm_magicdec.spire.settings import SpireError, SpireSettings, served_settings


class MagicDecSpeculativeConfig(MagicDecFields):
    """vLLM's speculative configuration for the methods `magicdec-self` and `magicdec`.

    Raises:
        MagicDecConfigError: a field is unknown, unused by the method, or has an invalid value.
    """

    def __init__(self, /, **user_fields: Any) -> None:
        check_field_names(user_fields)
        has_draft_model = check_method(user_fields)
        fields = {**resolve_auto(user_fields), "has_draft_model": has_draft_model}
        try:
            super().__init__(**{**fields, "method": "draft_model"})
        except ValidationError as error:
            raise MagicDecConfigError(first_problem(error, name_of(user_fields))) from None
        if self.spire is not None:
            # `__post_init__` has replaced the given defaults by the draft's values.
            for name in (name for name in VIEW_FIELDS if user_fields.get(name) == default_of(name)):
                if problem := self._spire_mismatch(self.spire, name, default_of(name)):
                    raise MagicDecConfigError(f"{MODEL_METHOD}: {problem}")

    def __post_init__(self) -> "MagicDecSpeculativeConfig":
        self._check_granularity()
        self._check_sources()
        if self.snapkv_kernel % 2 == 0:
            raise ValueError(f"snapkv_kernel={self.snapkv_kernel} is even; use {self.snapkv_kernel + 1}")
        if self.rejection_sample_method == "fly":  # since vLLM 0.33
            raise ValueError(
                "rejection_sample_method='fly' changes the output distribution; use 'standard'"
            )
        if self.has_draft_model and self.draft_weights != "target":
            raise ValueError(
                f"draft_weights={self.draft_weights!r} quantises the target, but model={self.model!r} "
                "drafts; use the field 'quantization' for the draft model, or remove draft_weights"
            )
        self._resolve_adaptive()
        if not self.has_draft_model:
            self.model = self.target_model_config.model if self.target_model_config else METHOD
            self.draft_model_config = self.target_model_config
            self.draft_parallel_config = self.target_parallel_config
        if self.target_model_config is not None:
            check_model(self.target_model_config)
            check_parallel(self.target_parallel_config, self.target_model_config)
            if self.enable_adaptive_verification:
                check_adaptive_verification(self.target_model_config, is_adaptive=self.adaptive)
            if self.has_draft_model:
                self._configure_draft_model()
        return self

    def _configure_draft_model(self) -> None:
        self._refuse_untrusted_folder()
        try:
            SpeculativeConfig.__post_init__(self)
        except Exception as error:  # of any reader of config.json
            if not is_config_error(error):
                raise
            names = ("quantization", "revision", "code_revision")
            given = [name for name in names if getattr(self, name) is not None]
            beside = "".join(f", {name}={quoted(getattr(self, name))}," for name in given)
            raise ValueError(
                f"vLLM cannot use model={self.model!r}{beside} as a draft ({one_line(error)}); use "
                "another draft, or a folder with a whole config.json"
                f"{''.join(f', or remove {name}' for name in given)}"
                f"{', or add --trust-remote-code' if 'trust_remote_code' in str(error) else ''}"
            ) from None
        self.prompt_lookup_max = self.prompt_lookup_min = None  # a copy must not pass vLLM's 0
        if self.method != "draft_model":
            raise ValueError(
                f"model={self.model!r} drafts by vLLM's method {self.method!r}; use that method, or name a "
                "language model"
            )
        check_draft_model(self.draft_model_config, self.target_model_config)
        self._apply_spire_settings()
        check_parallel(self.target_parallel_config, self.draft_model_config)

    def _refuse_untrusted_folder(self) -> None:
        """Raise ValueError if any user may change the draft's folder or a file in it."""
        assert self.model is not None
        paths = [Path(self.model)] if os.path.isdir(self.model) else []
        with suppress(OSError):  # vLLM reports unreadable files
            paths += [file for folder in paths for file in folder.iterdir()]
        for path in paths:
            try:
                with suppress(OSError):
                    files.refuse_untrusted(path)
            except ValueError as error:
                raise ValueError(f"model={self.model!r} is not trusted: {error}") from None

    @property
    def spire(self) -> SpireSettings | None:
        """Settings of a SPIRe draft; None for other drafts."""
        if not self.has_draft_model or self.draft_model_config is None:
            return None
        return served_settings(self.draft_model_config.hf_config)

    @property
    def policy(self) -> type[Policy]:
        """Policy that selects the draft's view."""
        return find_policy(self.draft_kv_policy) if self.spire is None else SinksAndWindow

    def _apply_spire_settings(self) -> None:
        """Check a SPIRe draft against the target, and set its view."""
        try:
            fields = self.spire
        except SpireError as error:
            raise ValueError(f"model={self.model!r}: {error}") from None
        if fields is None:
            return
        check_spire(self.draft_model_config, self.target_model_config, fields)
        if self.quantization is not None:
            raise ValueError(
                f"quantization={self.quantization!r} is not possible with a SPIRe draft; remove it"
            )
        if (own := self.draft_model_config.quantization) is not None:
            raise ValueError(
                f"model={self.model!r}: a quantised SPIRe draft ({own}) is not possible; take the one that "
                "'magicdec train-draft' wrote"
            )
        budget = min(fields.sinks + fields.window, self.target_model_config.max_model_len)
        for name, value in zip(VIEW_FIELDS, ("streamingllm", budget, fields.sinks), strict=True):
            given = getattr(self, name)
            setattr(self, name, value)
            if given != default_of(name) and (problem := self._spire_mismatch(fields, name, given)):
                raise ValueError(problem)

    def _spire_mismatch(self, draft: SpireSettings, name: str, given: object) -> str | None:
        """Return why a field contradicts the draft's training; None if it does not."""
        trained = draft.sinks + draft.window
        # The budget is smaller where the model is shorter than the draft's view.
        if given == getattr(self, name) or (name == "draft_kv_budget" and given == trained):
            return None
        return (
            f"{name}={given!r} is not possible: model={self.model!r} was trained with {draft.sinks} sinks "
            f"and a window of {draft.window} tokens (a budget of {trained}), and drafts with these; remove "
            f"{name}"
        )

    def limits(self, vllm_config: VllmConfig, page_size: int) -> Limits:
        """Return the limits that apply to budgets; `page_size` is in tokens."""
        return Limits(
            page_size=page_size,
            max_model_len=vllm_config.model_config.max_model_len,
            num_speculative_tokens=self.num_speculative_tokens,
            device_type=vllm_config.device_config.device_type,
        )

    def _check_granularity(self) -> None:
        granularities = find_policy(self.draft_kv_policy).granularities
        if self.draft_kv_granularity in (None, *granularities):
            return
        way_out = " or ".join(["remove it", *(f"use {name!r}" for name in granularities)])
        raise ValueError(
            f"draft_kv_granularity={self.draft_kv_granularity!r} is not supported by "
            f"draft_kv_policy={self.draft_kv_policy!r}; {way_out}"
        )

    def _check_sources(self) -> None:
        if "" in self.draft_lookup_sources:
            raise ValueError("draft_lookup_sources names an empty path; remove it")
        if not self.draft_lookup_sources:
            raise ValueError(
                "draft_lookup_sources is empty; name 'context', 'served' or a datastore's path, or use "
                "draft_lookup='off'"
            )
        if self.draft_lookup == "off" and self.draft_lookup_sources != ("context",):
            raise ValueError(
                "draft_lookup_sources belongs to draft_lookup='on' or 'auto'; use one of them or remove it"
            )
        if len(set(self.draft_lookup_sources)) < len(self.draft_lookup_sources):
            raise ValueError("draft_lookup_sources names a source twice; remove one of them")

    @property
    @override
    def looks_up_on_host(self) -> bool:
        return self.draft_lookup == "on" and not self.looks_up_on_device

    @property
    def round_lengths(self) -> tuple[int, ...]:
        """Numbers of drafts of rounds that draft, except for vLLM's table by batch size."""
        return tuple(length for length in self.lengths if length) or (self.num_speculative_tokens,)

    def use_ngram(self) -> bool:
        """Whether vLLM's V2 runner keeps tokens on the device; it uses this name for nothing else here."""
        return self.looks_up_on_device

    @property
    def datastores(self) -> tuple[str, ...]:
        """Paths of the lookups' datastores."""
        return tuple(name for name in self.draft_lookup_sources if name not in ("context", "served"))

    def _resolve_adaptive(self) -> None:
        if self.profile is not None and not self.adaptive:
            raise ValueError("profile belongs to num_speculative_tokens='auto'; add that or remove it")
        if self.adaptive:
            self.num_speculative_tokens = self.max_num_speculative_tokens or DEFAULT_MAX_TOKENS
        elif self.max_num_speculative_tokens is not None:
            raise ValueError(
                "max_num_speculative_tokens belongs to num_speculative_tokens='auto'; add that or remove it"
            )
        if not self.adaptive or self.lengths:  # a copy has the lengths, and the table of them
            return
        if self.num_speculative_tokens_per_batch_size is not None:
            raise ValueError(
                "'auto' leaves no use for num_speculative_tokens_per_batch_size; remove one of them"
            )
        self.choose_among(nested_lengths(self.num_speculative_tokens))

    @override
    def budget_tokens(self, context: int) -> int:
        budget = self.draft_kv_budget
        return int(budget) if budget >= 1 else max(self.draft_kv_min_budget, int(budget * context))

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """0, because no draft pass has more tokens than vLLM schedules for the target."""
        return 0

    @property
    @override
    def name(self) -> str:
        return MODEL_METHOD if self.has_draft_model else METHOD

    def __repr__(self) -> str:
        model = f"model={self.model!r}, " if self.has_draft_model else ""
        most = "auto, at most " if self.adaptive else ""
        return (
            f"SpeculativeConfig(method={self.name!r}, {model}num_spec_tokens={most}"
            f"{self.num_speculative_tokens}, draft_kv_policy={self.draft_kv_policy!r}, "
            f"draft_kv_budget={self.draft_kv_budget:g}, draft_kv_sink={self.draft_kv_sink})"
        )
