# SPDX-License-Identifier: Apache-2.0
"""What a user can set, checked once: the first file a value reaches and the last place it is judged.

`MagicDecSpeculativeConfig` *is* vLLM's `SpeculativeConfig` for the method `magicdec-self`: vLLM's own
fields that mean something for a draft that is the target, plus the `draft_kv_*` fields. To the rest of
vLLM it is a `draft_model` whose draft is the target itself, which brings lookahead slots, padded batches
and asynchronous scheduling without a change to the scheduler.
"""

import difflib
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
from vllm.config.utils import config

from vllm_magicdec.metrics import open_metrics_dir
from vllm_magicdec.policies import PagePolicy, TokenPolicy, VerifyTopK, find_policy
from vllm_magicdec.step_times import StepTimes
from vllm_magicdec.token_view import TokenBudget
from vllm_magicdec.verification import num_recent_pages
from vllm_magicdec.view import PageBudget

METHOD = "magicdec-self"
_DEFAULT_MAX_TOKENS = 8

# Fields of vLLM's SpeculativeConfig that keep their meaning when the draft is the target.
_SHARED_FIELDS = frozenset(
    {
        "method",
        "model",
        "num_speculative_tokens",
        "num_speculative_tokens_per_batch_size",
        "draft_sample_method",
        "rejection_sample_method",
        "synthetic_acceptance_rates",
        "synthetic_acceptance_length",
    }
)
# Fields that vLLM fills in, not the user.
_ENGINE_FIELDS = frozenset(
    {
        "target_model_config",
        "target_parallel_config",
        "draft_model_config",
        "draft_parallel_config",
        "metrics_dir",
        "adaptive",
    }
)


class MagicDecConfigError(ValueError):
    """A setting that cannot work, in one sentence that says what to type instead."""


def selects_magicdec(speculative_fields: Mapping[str, Any]) -> bool:
    """Whether the keyword arguments of a `SpeculativeConfig` ask for this plugin."""
    return METHOD in (speculative_fields.get("method"), speculative_fields.get("model"))


@config
class MagicDecFields(SpeculativeConfig):
    """The fields of `MagicDecSpeculativeConfig`; vLLM's decorator makes them a pydantic dataclass."""

    num_speculative_tokens: int = Field(default=4, gt=0, le=128)
    """Draft tokens per round (gamma), or `auto`: chosen for every step, 0 included, from the
    batch's size and contexts, the times measured and the acceptance seen."""
    max_num_speculative_tokens: int = Field(default=_DEFAULT_MAX_TOKENS, gt=0, le=128)
    """Most draft tokens per round when `num_speculative_tokens` is `auto`."""
    profile: str | None = None
    """Times to start `auto` with: a file written by `magicdec profile` for this model on this machine."""
    draft_kv_policy: str = "streamingllm"
    """Who chooses where the draft looks: `streamingllm` reads sinks and the recent window; `snapkv` adds
    the tokens that the prompt's last ones attend to, per layer and KV head; `verify-topk` adds, every
    round, the pages that the verification attended to, per layer. Other packages may add more
    (entry-point group `vllm_magicdec.policies`)."""
    draft_kv_budget: float = Field(default=512, gt=0)
    """K/V entries that a draft step may read per request: tokens, or a fraction of the context
    when below 1. Rounded up to whole KV pages; drafted tokens count."""
    draft_kv_min_budget: int = Field(default=256, gt=0)
    """Least budget in tokens when `draft_kv_budget` is a fraction."""
    draft_kv_sink: int = Field(default=4, ge=0)
    """Tokens at the start of the context that stay in view (attention sinks), within the budget; 4 are
    StreamingLLM's. Rounded up to whole KV pages where the policy chooses pages."""
    draft_kv_refresh: int | None = Field(default=None, ge=0)
    """When to select again. `snapkv`: after so many generated tokens (default 0: once per prompt);
    `verify-topk`: after so many verifications (default 1)."""
    draft_kv_granularity: Literal["page", "token"] = "page"
    """What `verify-topk` chooses: `page`s, the same for all heads of a layer, which vLLM's own attention
    reads; or `token`s per KV head, which need attention of the plugin's own."""
    snapkv_window: int = Field(default=32, gt=0, le=1024)
    """Last tokens of the prompt whose attention `snapkv` follows; they stay in view themselves."""
    snapkv_recent: float = Field(default=0.375, ge=0)
    """Latest tokens that `snapkv` keeps in view whatever their score: tokens, or a fraction of the budget
    when below 1, then at least three quarters of its first 64 tokens; at least `snapkv_window`. 0 is SnapKV
    as published."""
    snapkv_kernel: int = Field(default=7, gt=0)
    """Neighbouring tokens over which `snapkv` pools its scores; odd."""
    snapkv_pooling: Literal["max", "avg"] = "max"
    """How it pools."""
    adaptive: bool = False
    """Whether a controller sets the draft tokens of every round; `num_speculative_tokens` is the most."""
    metrics_dir: str | None = None
    """Directory through which workers report counters to the front end (see metrics.py)."""


class MagicDecSpeculativeConfig(MagicDecFields):
    """vLLM's speculative configuration for the method `magicdec-self`.

    Raises:
        MagicDecConfigError: a field is unknown, has no meaning here, or its value is impossible.
    """

    def __init__(self, **user_fields: Any) -> None:
        check_field_names(user_fields)
        _check_method(user_fields)
        try:
            super().__init__(**{**_resolve_auto(user_fields), "method": "draft_model"})
        except ValidationError as error:
            raise MagicDecConfigError(_first_problem(error)) from None

    def __post_init__(self) -> "MagicDecSpeculativeConfig":
        find_policy(self.draft_kv_policy)
        if self.snapkv_kernel % 2 == 0:
            raise ValueError(f"snapkv_kernel={self.snapkv_kernel} is even; use {self.snapkv_kernel + 1}")
        self._resolve_adaptive()
        self.model = self.target_model_config.model if self.target_model_config else METHOD
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config
        if self.target_model_config is not None:
            check_model(self.target_model_config)
            check_parallel(self.target_parallel_config, self.target_model_config)
        return self

    def _resolve_adaptive(self) -> None:
        if not self.adaptive:
            if self.profile is not None or self.max_num_speculative_tokens != _DEFAULT_MAX_TOKENS:
                raise ValueError(
                    "profile and max_num_speculative_tokens belong to num_speculative_tokens='auto'; add "
                    "that or remove them"
                )
            return
        table: Any = _any_number_of_drafts(self.max_num_speculative_tokens)
        if self.num_speculative_tokens_per_batch_size not in (None, table):  # type: ignore[has-type]
            raise ValueError(
                "num_speculative_tokens='auto' leaves no use for num_speculative_tokens_per_batch_size; "
                "remove one of them"
            )
        self.num_speculative_tokens = self.max_num_speculative_tokens
        self.num_speculative_tokens_per_batch_size = table

    def verify_engine(self, vllm_config: VllmConfig) -> None:
        """Refuse what only the whole engine configuration shows; called before any process starts.

        Raises:
            MagicDecConfigError: with the reason and the way out.
        """
        if vllm_config.lora_config is not None:
            raise MagicDecConfigError(
                f"{METHOD} does not support LoRA adapters; remove --enable-lora or the speculative method"
            )
        if vllm_config.cache_config.kv_sharing_fast_prefill:
            raise MagicDecConfigError(
                f"{METHOD} does not work with --kv-sharing-fast-prefill; remove that option"
            )
        max_model_len = vllm_config.model_config.max_model_len
        if self.draft_kv_budget > max_model_len:
            raise MagicDecConfigError(
                f"{METHOD}: draft_kv_budget={self.draft_kv_budget:g} is above the model length; "
                f"use at most {max_model_len} (the whole context)"
            )
        if self.adaptive:
            self._adapt(vllm_config)
        self.metrics_dir = open_metrics_dir()
        policy_class = find_policy(self.draft_kv_policy)
        if issubclass(policy_class, PagePolicy):
            page_budget(vllm_config, vllm_config.cache_config.block_size)
            return
        policy = policy_class(self)
        if isinstance(policy, TokenPolicy) and policy.refresh:
            check_refresh(vllm_config.scheduler_config.async_scheduling, vllm_config.use_v2_model_runner)
        if isinstance(policy, VerifyTopK) and policy.granularity == "page":
            self._check_room_to_choose(vllm_config)
        else:
            token_budget(vllm_config, policy)

    def _adapt(self, vllm_config: VllmConfig) -> None:
        """Let a scheduler with a controller choose the drafts of every step."""
        scheduler = vllm_config.scheduler_config
        if scheduler.scheduler_cls is not None:
            raise MagicDecConfigError(
                f"{METHOD}: num_speculative_tokens='auto' brings its own scheduler; remove --scheduler-cls "
                "or give a number"
            )
        if vllm_config.parallel_config.data_parallel_size > 1:
            raise MagicDecConfigError(
                f"{METHOD}: num_speculative_tokens='auto' does not work with data parallelism in one "
                "engine; give a number, or start one server per rank"
            )
        if self.profile is not None:
            self._check_profile(self.profile)
        name = "MagicDecAsyncScheduler" if scheduler.async_scheduling else "MagicDecScheduler"
        scheduler.scheduler_cls = f"vllm_magicdec.scheduler.{name}"

    def _check_profile(self, path: str) -> None:
        try:
            budget = StepTimes.load(Path(path)).budget
        except ValueError as error:
            raise MagicDecConfigError(f"{METHOD}: {error}") from None
        # A fraction is of this engine's model length, which may differ from the profile's.
        if self.draft_kv_budget >= 1 and budget != int(self.draft_kv_budget):
            raise MagicDecConfigError(
                f"{METHOD}: {path} was measured with draft_kv_budget={budget}, not "
                f"{self.draft_kv_budget:g}; use {budget}, or measure again with 'magicdec profile'"
            )

    def budget_tokens(self, context: int) -> int:
        """K/V entries that a draft step reads of a request with `context` tokens, at most."""
        if self.draft_kv_budget >= 1:
            return int(self.draft_kv_budget)
        return max(self.draft_kv_min_budget, int(self.draft_kv_budget * context))

    def _check_room_to_choose(self, vllm_config: VllmConfig) -> None:
        page = vllm_config.cache_config.block_size
        budget = page_budget(vllm_config, page)
        fixed = budget.sink_pages + num_recent_pages(page, self.num_speculative_tokens)
        if fixed < budget.min_pages or budget.min_pages * page >= vllm_config.model_config.max_model_len:
            return
        raise MagicDecConfigError(
            f"{METHOD}: draft_kv_budget={self.draft_kv_budget:g} leaves no page to choose beside {fixed} "
            f"pages of {page} tokens for sinks and recent tokens; use at least {(fixed + 1) * page}, a "
            "smaller --block-size, or draft_kv_granularity='token'"
        )

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """0: the draft reuses the target's own K/V, so it never re-reads a verified token."""
        return 0

    def __repr__(self) -> str:
        return (
            f"SpeculativeConfig(method={METHOD!r}, num_spec_tokens="
            f"{'auto, at most ' if self.adaptive else ''}{self.num_speculative_tokens}, "
            f"draft_kv_policy={self.draft_kv_policy!r}, draft_kv_budget={self.draft_kv_budget:g}, "
            f"draft_kv_sink={self.draft_kv_sink})"
        )


def documented_fields() -> tuple[str, ...]:
    """The fields whose meaning or default is the plugin's own."""
    prefixes = ("draft_kv_", "snapkv_")
    own = (f.name for f in dataclass_fields(MagicDecFields) if f.name.startswith(prefixes))
    return ("num_speculative_tokens", "max_num_speculative_tokens", "profile", *own)


def user_fields() -> tuple[str, ...]:
    """Every field that a user may give: the plugin's own first, then vLLM's."""
    own = documented_fields()
    return (*own, *sorted(_SHARED_FIELDS - set(own)))


def check_field_names(given: Mapping[str, Any]) -> None:
    """Refuse fields that are unknown or that mean nothing when the draft is the target.

    Raises:
        MagicDecConfigError: with the nearest name, or the names there are.
    """
    allowed = user_fields()
    known_to_vllm = {f.name for f in dataclass_fields(SpeculativeConfig)}
    defaults = {f.name: f.default for f in dataclass_fields(SpeculativeConfig)}
    for name, value in given.items():
        if name in allowed or name in _ENGINE_FIELDS:
            continue
        if name in known_to_vllm:
            default = getattr(defaults[name], "default", defaults[name])
            # vllm.config.utils.replace() hands back every field, most at their default.
            if value == default:
                continue
            raise MagicDecConfigError(
                f"{METHOD} has no use for '{name}' because the draft is the target model itself; "
                "remove it from the speculative config"
            )
        close = difflib.get_close_matches(name, allowed, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise MagicDecConfigError(
            f"{METHOD} does not know the field '{name}'; {hint}It takes {', '.join(allowed)}"
        )


def _check_method(given: Mapping[str, Any]) -> None:
    method, model = given.get("method"), given.get("model")
    if method not in (None, METHOD, "draft_model"):
        raise MagicDecConfigError(
            f"model={METHOD!r} drafts with the target itself; remove method={method!r}"
        )
    target = given.get("target_model_config")
    if model not in (None, METHOD, target and target.model):
        raise MagicDecConfigError(
            f"method={METHOD!r} drafts with the target itself; remove model={model!r}, or remove the "
            "method to draft with that model"
        )


def _resolve_auto(given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM wants a number where a user may type `auto`."""
    if given.get("num_speculative_tokens") != "auto":
        return dict(given)
    numbers = {name: value for name, value in given.items() if name != "num_speculative_tokens"}
    return {**numbers, "adaptive": True}


def _any_number_of_drafts(most: int) -> list[tuple[int, int, int]]:
    """vLLM's table from batch size to drafts with every number up to `most` in it.

    The scheduler's controller overrules the table; vLLM captures CUDA graphs for the numbers in it.
    """
    return [*((drafts + 1, drafts + 1, drafts) for drafts in range(most)), (most + 1, 2**20, most)]


def _first_problem(error: ValidationError) -> str:
    """One sentence for the first problem that pydantic found."""
    problem = error.errors(include_url=False)[0]
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return f"{METHOD}: {message}"
    name = problem["loc"][0]
    return f"{METHOD}: {name}={problem['input']!r} is not possible: {message[0].lower()}{message[1:]}"


def check_model(model: ModelConfig) -> None:
    """Refuse targets whose state a draft step would destroy or could not reach.

    Raises:
        ValueError: with the reason and the way out.
    """
    if model.is_encoder_decoder:
        raise ValueError("encoder-decoder models are not supported; serve it without speculation")
    if model.is_attention_free or model.is_hybrid or model.has_inner_state:
        raise ValueError(
            "models with recurrent state (Mamba, linear attention) are not supported because a draft "
            "step would overwrite that state; serve it without speculation"
        )
    if model.uses_mrope:
        raise ValueError("M-RoPE multimodal models are not supported; serve it without speculation")
    if model.use_mla:
        raise ValueError("MLA models are not supported; use vLLM's 'mtp' method where the model has it")


def check_parallel(parallel: ParallelConfig, model: ModelConfig) -> None:
    """Refuse layouts in which one worker does not hold a whole request in all layers.

    Raises:
        ValueError: with the reason and the way out.
    """
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size} is not supported because a draft "
            "step needs all layers in one place; use --tensor-parallel-size instead"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ValueError(
            "context parallelism (DCP, PCP) is not supported; set both context parallel sizes to 1"
        )
    if model.is_moe and parallel.data_parallel_size > 1:
        raise ValueError(
            "data parallelism is not supported for mixture-of-experts models because their ranks must "
            "draft in step; use --tensor-parallel-size instead"
        )
    if parallel.enable_eplb:
        raise ValueError("expert load balancing is not supported; remove --enable-eplb")
    if parallel.use_ubatching:
        raise ValueError("dual batch overlap is not supported; remove --enable-dbo")


def check_refresh(async_scheduling: bool, v2_model_runner: bool) -> None:
    """Refuse selecting again where the latest token ids are not on the host yet.

    Raises:
        MagicDecConfigError: with the way out.
    """
    if async_scheduling and not v2_model_runner:
        raise MagicDecConfigError(
            f"{METHOD}: draft_kv_refresh needs the V2 model runner under asynchronous scheduling; use "
            "--no-async-scheduling or draft_kv_refresh=0"
        )


def page_budget(vllm_config: VllmConfig, page_size: int) -> PageBudget:
    """The budget in whole pages of `page_size` tokens.

    Raises:
        MagicDecConfigError: it is below one page.
    """
    spec = vllm_config.speculative_config
    assert isinstance(spec, MagicDecSpeculativeConfig)
    try:
        return PageBudget.from_tokens(
            budget=spec.draft_kv_budget,
            min_budget=spec.draft_kv_min_budget,
            sink=spec.draft_kv_sink,
            page_size=page_size,
            num_speculative_tokens=spec.num_speculative_tokens,
            max_model_len=vllm_config.model_config.max_model_len,
        )
    except ValueError as error:
        raise MagicDecConfigError(f"{METHOD}: {error}") from None


def token_budget(vllm_config: VllmConfig, policy: TokenPolicy | VerifyTopK) -> TokenBudget:
    """The budget in tokens, for a policy that selects tokens and keeps the latest in view.

    Raises:
        MagicDecConfigError: it cannot hold the sinks and the policy's window.
    """
    spec = vllm_config.speculative_config
    assert isinstance(spec, MagicDecSpeculativeConfig)
    try:
        return TokenBudget.from_fields(
            budget=spec.draft_kv_budget,
            min_budget=spec.draft_kv_min_budget,
            sink=spec.draft_kv_sink,
            window=policy.window,
            recent=policy.recent,
            num_speculative_tokens=spec.num_speculative_tokens,
            max_model_len=vllm_config.model_config.max_model_len,
        )
    except ValueError as error:
        raise MagicDecConfigError(f"{METHOD}: {error}") from None
