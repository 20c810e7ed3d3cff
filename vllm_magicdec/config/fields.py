# SPDX-License-Identifier: Apache-2.0
"""Fields of the speculative configuration, with the meanings that `--help=magicdec` prints."""

from dataclasses import fields as dataclass_fields
from typing import Any, Literal

from pydantic import Field
from vllm.config.utils import config

from vllm_magicdec.config.adaptive import MOST_DRAFTS, AdaptiveConfig

_MOST_TOKENS = 2**31 - 1  # positions are int32

# Fields of vLLM's SpeculativeConfig that also apply to self-speculation.
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
# Fields of vLLM's SpeculativeConfig that apply to a draft model only.
MODEL_FIELDS = frozenset({"quantization", "revision", "code_revision", "attention_backend"})
# Boolean fields: those of the plugin, then all of them.
_OWN_SWITCHES = ("native_attention",)
SWITCHES = (*_OWN_SWITCHES, "enable_adaptive_verification")
# A SPIRe draft sets these fields to the view that it was trained with.
VIEW_FIELDS = ("draft_kv_policy", "draft_kv_budget", "draft_kv_sink")
# Fields that vLLM adds to the user's.
TARGET_FIELDS = frozenset({"target_model_config", "target_parallel_config"})
# Fields that the plugin sets; copying a configuration passes them to the constructor.
PRIVATE_FIELDS = frozenset(
    {
        "draft_model_config",
        "draft_parallel_config",
        "draft_tensor_parallel_size",
        "has_draft_model",
        "looks_up_on_device",
        "adaptive",
        "lengths",
    }
)


@config
class VllmMethodFields(AdaptiveConfig):
    """Fields that the plugin adds to vLLM's own methods."""

    draft_kv_budget: float | None = Field(default=None, gt=0, le=_MOST_TOKENS)
    """As for the plugin's methods, for a draft with a KV cache of its own: attention sinks and the recent
    window. None: the whole cache."""
    draft_kv_sink: int = Field(default=4, ge=0, le=_MOST_TOKENS)
    """As for the plugin's methods."""


@config
class MagicDecFields(AdaptiveConfig):
    """Fields of `MagicDecSpeculativeConfig`, as a pydantic dataclass."""

    num_speculative_tokens: int = Field(default=4, gt=0, le=MOST_DRAFTS)
    """Draft tokens per round (gamma), or `auto`: a controller chooses a number for every step, possibly 0,
    from the batch size, the context lengths, measured step times and observed acceptance."""
    profile: str | None = None
    """Initial step times for `auto`: a file that `magicdec profile` wrote for this model on this
    machine."""
    draft_kv_policy: str = "streamingllm"
    """Policy that selects the K/V entries that the draft reads. `streamingllm`: attention sinks and the
    recent window. `snapkv`: also the tokens that the last tokens of the prompt attend to most, per layer
    and KV head. `verify-topk`: also the pages that the last verification attended to most, per layer,
    selected again every round. Other packages can add policies (entry-point group
    `vllm_magicdec.policies`)."""
    draft_kv_budget: float = Field(default=512, gt=0, le=_MOST_TOKENS)
    """Maximum number of K/V entries that a draft step reads per request: tokens, or a fraction of the
    context if below 1. Rounded up to whole KV pages; draft tokens count."""
    draft_kv_min_budget: int = Field(default=256, gt=0, le=_MOST_TOKENS)
    """Minimum budget in tokens when `draft_kv_budget` is a fraction."""
    draft_kv_sink: int = Field(default=4, ge=0, le=_MOST_TOKENS)
    """Tokens at the start of the context that the draft always reads (attention sinks), within the budget.
    StreamingLLM uses 4. Rounded up to whole KV pages if the policy selects pages."""
    draft_kv_refresh: int | None = Field(default=None, ge=0, le=_MOST_TOKENS)
    """Interval between selections. `snapkv`: in generated tokens (default 0: select once per prompt).
    `verify-topk`: in verifications (default 1)."""
    draft_kv_granularity: Literal["page", "token"] | None = None
    """Unit that `snapkv` selects. `page`: KV pages, the same for all heads of a layer, read by vLLM's
    attention. `token`: tokens per KV head, read by the plugin's attention. Default: `page` on CPUs, `token`
    on GPUs. `verify-topk` always selects pages."""
    draft_weights: str = "target"
    """Weights that the draft reads. `target`: the target's own. On CPUs `int8` and `int4`, on GPUs the
    names of vLLM's online quantisations (`fp8_per_tensor`, `mxfp4`, ...): quantised copies of the target's
    linear layers, for faster draft steps. The output does not change."""
    draft_lookup: Literal["auto", "on", "off"] = "auto"
    """Whether to look up draft tokens: the tokens that followed an earlier occurrence of the latest tokens
    in the request's prompt and output. One draft pass checks several of them. Under
    `num_speculative_tokens: auto` the target may also verify them unchecked by the draft, where that is
    expected to be faster. `auto`: on with `num_speculative_tokens: auto` on CPUs where lookups are
    supported, else off."""
    draft_lookup_sources: tuple[str, ...] = ("context",)
    """Sources of lookups. `context`: the request's own prompt and output. `served`: outputs of other
    requests to this server, so that the text of one user affects the speed of another. Other values are
    paths of datastores that `magicdec index` wrote."""
    native_attention: bool = True
    """On CPUs: use the plugin's attention kernel for steps with at most 32 tokens per request where it is
    faster, if it was built and supports the layout of the KV cache. Otherwise use vLLM's attention."""
    snapkv_window: int = Field(default=16, gt=0, le=1024)
    """Number of last tokens of the prompt whose attention scores the others for `snapkv`; they are always
    read."""
    snapkv_recent: float = Field(default=0.375, ge=0, le=_MOST_TOKENS)
    """Latest tokens that `snapkv` selects regardless of their score: tokens, or a fraction of the budget if
    below 1, then at least three quarters of the first 64 tokens of the budget. At least `snapkv_window`; 0
    is the published SnapKV."""
    snapkv_kernel: int = Field(default=7, gt=0, lt=1024)
    """Number of neighbouring tokens over which `snapkv` pools scores; odd, below 1024."""
    snapkv_pooling: Literal["max", "avg"] = "max"
    """Pooling of the scores of `snapkv`: the maximum or the average."""
    has_draft_model: bool = False
    """Whether `model` is a draft model with its own KV cache."""
    looks_up_on_device: bool = False
    """Whether lookups run on the device because the latest tokens are not on the host."""


def documented_fields() -> tuple[str, ...]:
    """Return the fields that the plugin defines or whose default it changes."""
    prefixes = ("draft_kv_", "draft_weights", "draft_lookup", "snapkv_")
    own = (f.name for f in dataclass_fields(MagicDecFields) if f.name.startswith(prefixes))
    return ("num_speculative_tokens", "max_num_speculative_tokens", "profile", *own, *_OWN_SWITCHES)


def default_of(name: str) -> Any:
    """Return a field's default."""
    (default,) = (field.default for field in dataclass_fields(MagicDecFields) if field.name == name)
    return getattr(default, "default", default)  # unwraps a pydantic Field


def user_fields() -> tuple[str, ...]:
    """Return the fields that a user may set: the plugin's first, then vLLM's."""
    own = documented_fields()
    return (*own, *sorted(_SHARED_FIELDS - set(own)))
