# SPDX-License-Identifier: Apache-2.0
"""Declarations of the user's fields."""

from dataclasses import fields as dataclass_fields
from typing import Any, Literal

from pydantic import Field
from vllm.config import SpeculativeConfig
from vllm.config.utils import config

DEFAULT_MAX_TOKENS = 8  # of `auto`
_MOST_TOKENS = 2**31 - 1  # positions are int32

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
# Further fields of vLLM for a draft model.
MODEL_FIELDS = frozenset({"quantization", "revision", "code_revision", "attention_backend"})
# Boolean fields: the plugin's own, and all.
_OWN_SWITCHES = ("native_attention",)
SWITCHES = (*_OWN_SWITCHES, "enable_adaptive_verification")
# Fields set by a SPIRe draft, which needs the view it was trained with.
VIEW_FIELDS = ("draft_kv_policy", "draft_kv_budget", "draft_kv_sink")
# Fields that the user cannot set.
ENGINE_FIELDS = frozenset(
    {
        "target_model_config",
        "target_parallel_config",
        "draft_model_config",
        "draft_parallel_config",
        "draft_tensor_parallel_size",
        "has_draft_model",
        "looks_up_on_device",
        "adaptive",
        "lengths",
    }
)
# Of these, fields set by the plugin; a copied config passes all of them.
PRIVATE_FIELDS = ENGINE_FIELDS - {"target_model_config", "target_parallel_config"}


@config
class MagicDecFields(SpeculativeConfig):
    """Fields of `MagicDecSpeculativeConfig`, as a pydantic dataclass."""

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
    when below 1. Rounded up to whole KV pages; drafted tokens count."""
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
    """What `snapkv` chooses: `page`s, the same for all heads of a layer, which vLLM's own attention reads;
    or `token`s per KV head, which need attention of the plugin's own. Default: pages on a CPU, tokens on a
    GPU. `verify-topk` chooses pages."""
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
    """Whether `model` drafts over its own KV cache."""
    looks_up_on_device: bool = False
    """Whether lookups run on the device, because the host does not know the latest tokens."""
    adaptive: bool = False
    """Whether a controller sets the draft tokens of every round, up to `num_speculative_tokens`."""
    lengths: tuple[int, ...] = ()
    """Numbers of drafts that the controller chooses from, ascending; empty without a controller."""


def documented_fields() -> tuple[str, ...]:
    """Return the fields that the plugin defines or whose default it changes."""
    prefixes = ("draft_kv_", "draft_lookup", "snapkv_")
    own = (f.name for f in dataclass_fields(MagicDecFields) if f.name.startswith(prefixes))
    return ("num_speculative_tokens", "max_num_speculative_tokens", "profile", *own, *_OWN_SWITCHES)


def default_of(name: str) -> Any:
    """Return a field's default."""
    (default,) = (field.default for field in dataclass_fields(MagicDecFields) if field.name == name)
    return getattr(default, "default", default)  # of pydantic's Field


def user_fields() -> tuple[str, ...]:
    """Return the fields that a user may set: the plugin's first, then vLLM's."""
    own = documented_fields()
    return (*own, *sorted(_SHARED_FIELDS - set(own)))
