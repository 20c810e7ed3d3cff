# SPDX-License-Identifier: Apache-2.0
"""What a user can set, checked once: the first file a value reaches and the last place it is judged.

`MagicDecSpeculativeConfig` *is* vLLM's `SpeculativeConfig` for the method `magicdec-self`: vLLM's own
fields that mean something for a draft that is the target, plus the `draft_kv_*` fields. To the rest of
vLLM it is a `draft_model` whose draft is the target itself, which brings lookahead slots, padded batches
and asynchronous scheduling without a change to the scheduler. With the method `magicdec` the draft is a
model of its own (`has_draft_model`), which vLLM loads as it does for `draft_model`.
"""

import difflib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields as dataclass_fields
from pathlib import Path
from traceback import walk_tb
from typing import Any, Literal

from pydantic import Field, ValidationError
from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
from vllm.config.utils import config

from vllm_magicdec import files
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError, quoted
from vllm_magicdec.policies import find_policy
from vllm_magicdec.policies.base import Limits, Policy
from vllm_magicdec.policies.sinks_and_window import SinksAndWindow
from vllm_magicdec.refusals import (
    check_adaptive_verification,
    check_draft_model,
    check_model,
    check_parallel,
    check_spire,
)
from vllm_magicdec.spire.serving import served_settings
from vllm_magicdec.spire.settings import SpireError, SpireSettings

DEFAULT_MAX_TOKENS = 8  # of `auto`
_DEFAULT_MAX_BUDGET = 1024
_MOST_TOKENS = 2**31 - 1  # positions are int32
_LONGEST_REASON = 240  # characters of a library's

# Fields of vLLM's SpeculativeConfig that keep their meaning when the draft is the target.
_SHARED_FIELDS = frozenset(
    {
        "method",
        "model",
        "num_speculative_tokens",
        "num_speculative_tokens_per_batch_size",
        "draft_sample_method",
        "enable_adaptive_verification",
        "rejection_sample_method",
        "synthetic_acceptance_rates",
        "synthetic_acceptance_length",
    }
)
# And those that say which model drafts, where it is another one.
MODEL_FIELDS = frozenset({"quantization", "revision", "code_revision", "attention_backend"})
# The plugin's own that take true or false, and all that do.
_OWN_SWITCHES = ("native_attention",)
_SWITCHES = (*_OWN_SWITCHES, "enable_adaptive_verification")
# What a SPIRe draft brings with it: it sees what it was trained to see.
_VIEW_FIELDS = ("draft_kv_policy", "draft_kv_budget", "draft_kv_sink")
# Fields that vLLM fills in, not the user.
_ENGINE_FIELDS = frozenset(
    {
        "target_model_config",
        "target_parallel_config",
        "draft_model_config",
        "draft_parallel_config",
        "draft_tensor_parallel_size",
        "has_draft_model",
        "looks_up_on_device",
        "adaptive",
        "adaptive_budget",
        "budgets",
        "lengths",
    }
)


# Of these, what the plugin itself fills in: only a copy has them, and it has all.
_PRIVATE_FIELDS = _ENGINE_FIELDS - {"target_model_config", "target_parallel_config"}


def selects_magicdec(speculative_fields: Mapping[str, Any]) -> bool:
    """Whether the keyword arguments of a `SpeculativeConfig` ask for this plugin."""
    method, model = speculative_fields.get("method"), speculative_fields.get("model")
    return METHOD in (method, model) or method == MODEL_METHOD


def refuse_misspelt_method(speculative_fields: Mapping[str, Any]) -> None:
    """vLLM would look for a model of that name.

    Raises:
        MagicDecConfigError: with the right name.
    """
    for name in ("method", "model"):
        value = speculative_fields.get(name)
        if not isinstance(value, str) or value == METHOD or len(value) > 2 * len(METHOD):
            continue
        if name == "method" and value == MODEL_METHOD:
            continue
        letters = "".join(filter(str.isalnum, value.lower()))
        if letters == "magicdec" or difflib.get_close_matches(letters, ["magicdecself"], cutoff=0.85):
            raise MagicDecConfigError(f"{name}={value!r} is unknown; did you mean {METHOD!r}?")


@config
class MagicDecFields(SpeculativeConfig):
    """The fields of `MagicDecSpeculativeConfig`; vLLM's decorator makes them a pydantic dataclass."""

    num_speculative_tokens: int = Field(default=4, gt=0, le=128)
    """Draft tokens per round (gamma), or `auto`: chosen for every step, 0 included, from the
    batch's size and contexts, the times measured and the acceptance seen."""
    max_num_speculative_tokens: int | None = Field(default=None, gt=0, le=128)
    """Most draft tokens per round when `num_speculative_tokens` is `auto`. Default: 8; 16 where drafts are
    looked up."""
    profile: str | None = None
    """Times to start `auto` with: a file written by `magicdec profile` for this model on this machine."""
    draft_kv_policy: str = "streamingllm"
    """Who chooses where the draft looks: `streamingllm` reads sinks and the recent window; `snapkv` adds
    the tokens that the prompt's last ones attend to, per layer and KV head; `verify-topk` adds, every
    round, the pages that the verification attended to, per layer. Other packages may add more
    (entry-point group `vllm_magicdec.policies`)."""
    draft_kv_budget: float = Field(default=512, gt=0, le=_MOST_TOKENS)
    """K/V entries that a draft step may read per request: tokens, or a fraction of the context
    when below 1. Rounded up to whole KV pages; drafted tokens count. `auto`: chosen for every step."""
    draft_kv_max_budget: int = Field(default=_DEFAULT_MAX_BUDGET, gt=0, le=_MOST_TOKENS)
    """Largest budget in tokens when `draft_kv_budget` is `auto`, at most the model length; the others are
    a half and a quarter of it, where the policy can work with them."""
    draft_kv_min_budget: int = Field(default=256, gt=0, le=_MOST_TOKENS)
    """Least budget in tokens when `draft_kv_budget` is a fraction."""
    draft_kv_sink: int = Field(default=4, ge=0, le=_MOST_TOKENS)
    """Tokens at the start of the context that stay in view (attention sinks), within the budget; 4 are
    StreamingLLM's. Rounded up to whole KV pages where the policy chooses pages."""
    draft_kv_cache: Literal["whole", "ring"] = "whole"
    """What the KV cache of a draft model (`magicdec`) holds: `whole`, every token of a request, as the
    target's does; `ring`: sinks and window alone, where the policy reads no more and the target gets room
    for more tokens of requests that are as long as they may be."""
    draft_kv_refresh: int | None = Field(default=None, ge=0, le=_MOST_TOKENS)
    """When to select again. `snapkv`: after so many generated tokens (default 0: once per prompt);
    `verify-topk`: after so many verifications (default 1)."""
    draft_kv_granularity: Literal["page", "token"] | None = None
    """What `snapkv` and `verify-topk` choose: `page`s, the same for all heads of a layer, which vLLM's own
    attention reads; or `token`s per KV head, which need attention of the plugin's own. Default: pages,
    but tokens for `snapkv` on a GPU."""
    draft_lookup: Literal["auto", "on", "off"] = "auto"
    """Whether drafts are looked up: what followed the request's latest tokens before, in its own prompt
    and output. A draft pass reads it ahead and makes several drafts where the draft agrees; under
    `num_speculative_tokens: auto` it may also be verified unread, where that promises more. `auto`: with
    that, where lookups work."""
    draft_lookup_sources: tuple[str, ...] = ("context",)
    """Where drafts are looked up: `context`, the request's own prompt and output; `served`, what other
    requests of this server were answered, which lets one user's text set how fast another's comes; or paths
    of datastores that `magicdec index` wrote."""
    native_attention: bool = True
    """On a CPU: whether the plugin's own kernel attends where no request has more than 32 tokens in a step
    and it is faster, where it was built and knows the layout of the KV cache. Off, vLLM's own does."""
    snapkv_window: int = Field(default=16, gt=0, le=1024)
    """Last tokens of the prompt whose attention `snapkv` follows; they stay in view themselves."""
    snapkv_recent: float = Field(default=0.375, ge=0, le=_MOST_TOKENS)
    """Latest tokens that `snapkv` keeps in view whatever their score: tokens, or a fraction of the budget
    when below 1, then at least three quarters of its first 64 tokens; at least `snapkv_window`. 0 is SnapKV
    as published."""
    snapkv_kernel: int = Field(default=7, gt=0, lt=1024)
    """Neighbouring tokens over which `snapkv` pools its scores; odd, below 1024."""
    snapkv_pooling: Literal["max", "avg"] = "max"
    """How it pools."""
    has_draft_model: bool = False
    """Whether `model` drafts, over a KV cache of its own, and not the target over the target's."""
    looks_up_on_device: bool = False
    """Whether lookups search where the latest tokens are, and the host does not know them."""
    adaptive: bool = False
    """Whether a controller sets the draft tokens of every round; `num_speculative_tokens` is the most."""
    adaptive_budget: bool = False
    """Whether a controller sets the budget of every round; `draft_kv_budget` is the largest."""
    budgets: tuple[float, ...] = ()
    """Budgets to prepare for, ascending; each as `draft_kv_budget`."""
    lengths: tuple[int, ...] = ()
    """Numbers of drafts that a controller chooses among, ascending; () without one."""


class MagicDecSpeculativeConfig(MagicDecFields):
    """vLLM's speculative configuration for the methods `magicdec-self` and `magicdec`.

    Raises:
        MagicDecConfigError: a field is unknown, has no meaning here, or its value is impossible.
    """

    def __init__(self, /, **user_fields: Any) -> None:  # whatever their names, `self` among them
        check_field_names(user_fields)
        has_draft_model = _check_method(user_fields)
        fields = {**_resolve_auto(user_fields), "has_draft_model": has_draft_model}
        try:
            super().__init__(**{**fields, "method": "draft_model"})
        except ValidationError as error:
            raise MagicDecConfigError(_first_problem(error, _name_of(user_fields))) from None
        if self.spire is not None:
            # The fields themselves have the draft's own values by now, and not what was given: the default.
            for name in (name for name in _VIEW_FIELDS if user_fields.get(name) == default_of(name)):
                if problem := self._differs_from(self.spire, name, default_of(name)):
                    raise MagicDecConfigError(f"{MODEL_METHOD}: {problem}")

    def __post_init__(self) -> "MagicDecSpeculativeConfig":
        self._check_granularity()
        self._check_sources()
        if self.draft_kv_cache != "whole" and not self.has_draft_model:
            raise ValueError(
                f"draft_kv_cache={self.draft_kv_cache!r} belongs to method={MODEL_METHOD!r}; a draft that "
                "is the target has no KV cache of its own: remove it"
            )
        if self.snapkv_kernel % 2 == 0:
            raise ValueError(f"snapkv_kernel={self.snapkv_kernel} is even; use {self.snapkv_kernel + 1}")
        self._resolve_adaptive()
        self._resolve_adaptive_budget()
        if not self.has_draft_model:
            self.model = self.target_model_config.model if self.target_model_config else METHOD
            self.draft_model_config = self.target_model_config
            self.draft_parallel_config = self.target_parallel_config
        if self.target_model_config is not None:
            check_model(self.target_model_config)
            check_parallel(self.target_parallel_config, self.target_model_config)
            if self.enable_adaptive_verification:
                check_adaptive_verification(self.target_model_config, has_controller=self.has_controller)
            if self.has_draft_model:
                self._configure_draft_model()
        return self

    def _configure_draft_model(self) -> None:
        """As vLLM does for `draft_model`; it may find that the model is a draft of another kind."""
        self._refuse_untrusted_folder()
        try:
            SpeculativeConfig.__post_init__(self)
        except Exception as error:  # of whatever reads config.json
            if not _is_of_reading(error):
                raise
            names = ("quantization", "revision", "code_revision")
            given = [name for name in names if getattr(self, name) is not None]
            beside = "".join(f", {name}={quoted(getattr(self, name))}," for name in given)
            # It may be damaged, or whole and nothing that this vLLM serves here: the reason says which.
            raise ValueError(
                f"vLLM cannot use model={self.model!r}{beside} as a draft ({_in_a_line(error)}); use "
                "another draft, or a folder with a whole config.json"
                f"{''.join(f', or remove {name}' for name in given)}"
                f"{', or add --trust-remote-code' if 'trust_remote_code' in str(error) else ''}"
            ) from None
        self.prompt_lookup_max = self.prompt_lookup_min = None  # vLLM's 0 is none that a copy may have
        if self.method != "draft_model":
            raise ValueError(
                f"model={self.model!r} drafts by vLLM's method {self.method!r}; use that method, or name a "
                "language model"
            )
        check_draft_model(self.draft_model_config, self.target_model_config)
        self._take_what_it_was_trained_for()
        check_parallel(self.target_parallel_config, self.draft_model_config)

    def _refuse_untrusted_folder(self) -> None:
        """Raises ValueError: the draft is a folder that any user may change, or holds such a file."""
        paths = [Path(self.model)] if os.path.isdir(self.model) else []
        with suppress(OSError):  # vLLM says what it cannot read
            paths += [file for folder in paths for file in folder.iterdir()]
        for path in paths:
            try:
                with suppress(OSError):
                    files.refuse_untrusted(path)
            except ValueError as error:
                raise ValueError(f"model={self.model!r} is not trusted: {error}") from None

    def verify_equal_vocab_size_if_draft_model(self) -> None:
        """vLLM's check, in a sentence that says what to do; raises ValueError."""
        if not self.has_draft_model or None in (self.target_model_config, self.draft_model_config):
            return
        targets, own = self.target_model_config.get_vocab_size(), self.draft_model_config.get_vocab_size()
        if targets != own:
            raise ValueError(
                f"model={self.model!r} has a vocab_size of {own} and the target one of {targets} (padding "
                "counts), and the probabilities of both are compared token by token; name a model of the "
                "target's vocab_size"
            )

    @property
    def spire(self) -> SpireSettings | None:
        """What a SPIRe draft says of itself; None: no such draft drafts."""
        if not self.has_draft_model or self.draft_model_config is None:
            return None
        return served_settings(self.draft_model_config.hf_config)

    @property
    def policy(self) -> type[Policy]:
        """Who chooses where the draft looks."""
        return find_policy(self.draft_kv_policy) if self.spire is None else SinksAndWindow

    def _take_what_it_was_trained_for(self) -> None:
        """A SPIRe draft has one target, and one view.

        Raises:
            ValueError: with the reason and the way out.
        """
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
        for name, value in zip(_VIEW_FIELDS, ("streamingllm", budget, fields.sinks), strict=True):
            given = "auto" if name == "draft_kv_budget" and self.adaptive_budget else getattr(self, name)
            setattr(self, name, value)
            if given != default_of(name) and (problem := self._differs_from(fields, name, given)):
                raise ValueError(problem)
        self.budgets = (budget,)

    def _differs_from(self, draft: SpireSettings, name: str, given: object) -> str | None:
        """What is wrong with a field that says otherwise than the draft was trained for; None: nothing."""
        trained = draft.sinks + draft.window
        # Of a model shorter than its view the draft sees less.
        if given == getattr(self, name) or (name == "draft_kv_budget" and given == trained):
            return None
        return (
            f"{name}={given!r} is not possible: model={self.model!r} was trained with {draft.sinks} sinks "
            f"and a window of {draft.window} tokens (a budget of {trained}), and drafts with these; remove "
            f"{name}"
        )

    def limits(self, vllm_config: VllmConfig, page_size: int) -> Limits:
        """What budgets are judged by.

        Args:
            vllm_config: the engine's.
            page_size: tokens per page of the block tables.
        """
        return Limits(
            page_size=page_size,
            max_model_len=vllm_config.model_config.max_model_len,
            num_speculative_tokens=self.num_speculative_tokens,
            device_type=vllm_config.device_config.device_type,
        )

    @property
    def has_controller(self) -> bool:
        """Whether something is chosen for every step."""
        return self.adaptive or self.adaptive_budget

    def _check_granularity(self) -> None:
        granularities = find_policy(self.draft_kv_policy).granularities
        if self.draft_kv_granularity in (None, *granularities):
            return
        way_out = f"use {granularities[0]!r}" if granularities else "remove it"
        raise ValueError(
            f"draft_kv_granularity={self.draft_kv_granularity!r} means nothing to "
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
    def round_lengths(self) -> tuple[int, ...]:
        """Numbers of drafts that rounds have, none apart, but for a table of vLLM's that says fewer."""
        return tuple(length for length in self.lengths if length) or (self.num_speculative_tokens,)

    def use_ngram(self) -> bool:
        """Whether vLLM's V2 runner keeps the requests' tokens in the device's memory, and not the host's.

        It asks nothing else by that name where a speculator of the plugin's drafts.
        """
        return self.looks_up_on_device

    @property
    def datastores(self) -> tuple[str, ...]:
        """Paths of datastores that lookups read."""
        return tuple(name for name in self.draft_lookup_sources if name not in ("context", "served"))

    def _resolve_adaptive(self) -> None:
        if self.profile is not None and not self.has_controller:
            raise ValueError(
                "profile belongs to num_speculative_tokens='auto' or draft_kv_budget='auto'; add one of "
                "them or remove it"
            )
        if self.adaptive:
            self.num_speculative_tokens = self.max_num_speculative_tokens or DEFAULT_MAX_TOKENS
        elif self.max_num_speculative_tokens is not None:
            raise ValueError(
                "max_num_speculative_tokens belongs to num_speculative_tokens='auto'; add that or remove it"
            )
        if not self.has_controller or self.lengths:  # a copy has the lengths, and the table of them
            return
        if self.num_speculative_tokens_per_batch_size is not None:
            raise ValueError(
                "'auto' leaves no use for num_speculative_tokens_per_batch_size; remove one of them"
            )
        most = self.num_speculative_tokens
        self.choose_among(nested_lengths(most, most + 1) if self.adaptive else (most,))

    def choose_among(self, lengths: tuple[int, ...]) -> None:
        """Let the controller choose among these numbers of drafts, and vLLM capture CUDA graphs for them.

        vLLM captures full graphs of the lengths that its table from batch size to drafts names for 1 to
        `max_num_seqs` requests. Each length gets one of these sizes, the largest first, so that the least
        go without where they do not suffice. 0 has all larger batches, because vLLM adds sizes of graphs
        for those: its usual ones, then. The scheduler's controller overrules the table.

        Args:
            lengths: ascending. Plain decoding is tried now and then even where 0 is not among them.
        """
        self.lengths = lengths
        *larger, least = sorted({0, *lengths}, reverse=True)
        table = [(size, size, length) for size, length in enumerate(larger, start=1)]
        self.num_speculative_tokens_per_batch_size = [*table, (len(larger) + 1, 2**20, least)]

    def _resolve_adaptive_budget(self) -> None:
        if self.adaptive_budget:
            self.draft_kv_budget = self.draft_kv_max_budget
            return
        if self.draft_kv_max_budget != _DEFAULT_MAX_BUDGET:
            raise ValueError("draft_kv_max_budget belongs to draft_kv_budget='auto'; add that or remove it")
        self.budgets = (self.draft_kv_budget,)

    def budget_tokens(self, budget: float, context: int) -> int:
        """K/V entries that a draft step reads of a request with `context` tokens, at most."""
        return int(budget) if budget >= 1 else max(self.draft_kv_min_budget, int(budget * context))

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """0: no pass of a draft has more tokens than vLLM's scheduler gives the target.

        A draft that is the target never re-reads a verified token, and a draft model reads them in passes
        of their own where they are many.
        """
        return 0

    @property
    def name(self) -> str:
        """The method, as users call it."""
        return MODEL_METHOD if self.has_draft_model else METHOD

    def __repr__(self) -> str:
        return (
            f"SpeculativeConfig(method={self.name!r}, "
            f"{f'model={self.model!r}, ' if self.has_draft_model else ''}num_spec_tokens="
            f"{'auto, at most ' if self.adaptive else ''}{self.num_speculative_tokens}, "
            f"draft_kv_policy={self.draft_kv_policy!r}, draft_kv_budget="
            f"{'auto, at most ' if self.adaptive_budget else ''}{self.draft_kv_budget:g}, "
            f"draft_kv_sink={self.draft_kv_sink})"
        )


def documented_fields() -> tuple[str, ...]:
    """The fields whose meaning or default is the plugin's own."""
    prefixes = ("draft_kv_", "draft_lookup", "snapkv_")
    own = (f.name for f in dataclass_fields(MagicDecFields) if f.name.startswith(prefixes))
    return ("num_speculative_tokens", "max_num_speculative_tokens", "profile", *own, *_OWN_SWITCHES)


def default_of(name: str) -> Any:
    """What a field is where the user does not give it."""
    (default,) = (field.default for field in dataclass_fields(MagicDecFields) if field.name == name)
    return getattr(default, "default", default)  # of pydantic's Field


def user_fields() -> tuple[str, ...]:
    """Every field that a user may give: the plugin's own first, then vLLM's."""
    own = documented_fields()
    return (*own, *sorted(_SHARED_FIELDS - set(own)))


def check_given(given: object, options: Mapping[str, object]) -> None:
    """Refuse what vLLM would not even look into.

    Args:
        given: for `speculative_config`.
        options: the same fields from options of the command line, by field; None where not given.

    Raises:
        MagicDecConfigError: with what to type instead.
    """
    if given is None:
        return
    example = f"{{'method': {METHOD!r}}}"
    if not isinstance(given, dict):
        raise MagicDecConfigError(
            f"speculative_config={quoted(given)} is no dictionary of fields; for {METHOD} use {example}"
        )
    named = {name: value for name, value in options.items() if value is not None}
    if not selects_magicdec({**given, **named}):
        return
    for name in given:
        if not isinstance(name, str):
            raise MagicDecConfigError(f"{METHOD}: the name of a field is text, not {quoted(name)}")
        if name in named:
            raise MagicDecConfigError(
                f"{METHOD}: {name} is given twice, as {quoted(named[name])} by an option and as "
                f"{quoted(given[name])} in the speculative config; remove one of them"
            )


def check_field_names(given: Mapping[str, Any]) -> None:
    """Refuse fields that are unknown or that mean nothing to the method.

    Raises:
        MagicDecConfigError: with the nearest name, or the names there are.
    """
    allowed = user_fields()
    if given.get("method") == MODEL_METHOD or given.get("has_draft_model"):
        allowed = (*allowed, *sorted(MODEL_FIELDS))
    known_to_vllm = {f.name for f in dataclass_fields(SpeculativeConfig)}
    defaults = {f.name: f.default for f in dataclass_fields(SpeculativeConfig)}
    is_copy = given.keys() >= _PRIVATE_FIELDS
    for name, value in given.items():
        if name in allowed and name not in _SWITCHES and isinstance(value, bool):
            raise MagicDecConfigError(
                f"{_name_of(given)}: {name}={value} is not possible: it takes no true or false"
            )
        if name in allowed or (name in _ENGINE_FIELDS and (is_copy or name not in _PRIVATE_FIELDS)):
            continue
        if name in known_to_vllm:
            default = getattr(defaults[name], "default", defaults[name])
            # vllm.config.utils.replace() hands back every field, most at their default.
            if value == default:
                continue
            raise MagicDecConfigError(
                f"{METHOD} has no use for '{name}' because the draft is the target model itself; "
                "remove it from the speculative config"
                if given.get("method") != MODEL_METHOD
                else f"{MODEL_METHOD} does not take '{name}'; remove it from the speculative config"
            )
        close = difflib.get_close_matches(name, allowed, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise MagicDecConfigError(
            f"{_name_of(given)} does not know the field '{name}'; {hint}It takes {', '.join(allowed)}"
        )


def _check_method(given: Mapping[str, Any]) -> bool:
    """Whether another model than the target drafts."""
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


def _resolve_auto(given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM wants a number where a user may type `auto`, and a list where one name will do."""
    flags = {"num_speculative_tokens": "adaptive", "draft_kv_budget": "adaptive_budget"}
    automatic = {name for name in flags if given.get(name) == "auto"}
    numbers = {name: value for name, value in given.items() if name not in automatic}
    if isinstance(given.get("draft_lookup_sources"), str):
        numbers["draft_lookup_sources"] = (given["draft_lookup_sources"],)
    return {**numbers, **{flags[name]: True for name in automatic}}


def nested_lengths(most: int, at_most: int) -> tuple[int, ...]:
    """Numbers of drafts to choose among where each has CUDA graphs of its own: 0, 1, 3, 7, 15, ...

    vLLM gives a batch the graphs of the next larger number of tokens that any was captured for, and none if
    that one is of another number of drafts. A verification of these has 1, 2, 4, 8, ... tokens per request,
    so that vLLM's sizes, multiples of 8, are graphs of all of them.

    Args:
        most: none is larger; at least 1.
        at_most: how many, at least 2; some between the first and the last are left out for it, evenly.
    """
    lengths = [2**power - 1 for power in range((most + 1).bit_length())]
    at_most = min(at_most, len(lengths))
    places = (round(i * (len(lengths) - 1) / (at_most - 1)) for i in range(at_most))
    return tuple(lengths[place] for place in places)


def _name_of(given: Mapping[str, Any]) -> str:
    """The method's, as users know it."""
    return MODEL_METHOD if given.get("method") == MODEL_METHOD else METHOD


def _is_of_reading(error: Exception) -> bool:
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


def _in_a_line(error: Exception) -> str:
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


def _first_problem(error: ValidationError, method: str) -> str:
    """One sentence for the first problem that pydantic found."""
    problem = error.errors(include_url=False)[0]
    # Where there is no such draft model, vLLM goes on with a page of advice.
    message = problem["msg"].removeprefix("Value error, ").split("\n")[0]
    if not problem["loc"]:
        return f"{method}: {message}"
    name = problem["loc"][0]
    value = quoted(problem["input"])
    return f"{method}: {name}={value} is not possible: {message[0].lower()}{message[1:]}"
