# SPDX-License-Identifier: Apache-2.0
"""Checks and defaults that depend on the whole engine configuration, applied before any process starts.

`config.MagicDecSpeculativeConfig` checks the fields by themselves. This module checks them against the
model length, the KV pages, the scheduler and the profile.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config, get_tokenizer

from vllm_magicdec.adaptive.profiles import check_profile
from vllm_magicdec.config import AdaptiveConfig, MagicDecSpeculativeConfig, VllmMethodConfig
from vllm_magicdec.config.adaptive import DEFAULT_MAX_TOKENS, nested_lengths
from vllm_magicdec.config.fields import default_of
from vllm_magicdec.config.given import name_of, selects_magicdec
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.lookup import datastore_files
from vllm_magicdec.lookup.datastore_files import Vocabulary
from vllm_magicdec.machine import multiplies_many_at_once
from vllm_magicdec.policies.base import PagePolicy
from vllm_magicdec.policies.sinks_and_window import SinksAndWindow
from vllm_magicdec.vllm_api.draft_weights import check_draft_weights
from vllm_magicdec.vllm_api.graph_sizes import capture_every_length, captures_by_length, find_missing_graphs

logger = init_logger(f"vllm.{__name__}")

# Under `auto`, passes that check looked-up tokens make long rounds cheap, and other rounds end early.
_MAX_TOKENS_WITH_LOOKUPS = 16
# Methods of which vLLM's V2 runner makes all drafts, however many are chosen.
_FIXED_ON_V2 = ("draft_model", "ngram", "dflash")


def host_lacks_latest_tokens(vllm_config: VllmConfig) -> bool:
    """Return whether the latest tokens are only on the device when drafting begins."""
    return vllm_config.device_config.device_type != "cpu"


def reads_activations(spec: MagicDecSpeculativeConfig) -> bool:
    """Return whether the draft reads activations (vLLM: auxiliary hidden states) of the target."""
    return spec.spire is not None


class EngineSpeculativeConfig(MagicDecSpeculativeConfig):
    """Speculative configuration of an engine; also checks the rest of the engine configuration."""

    def verify_engine(self, vllm_config: VllmConfig) -> None:
        """Check the fields against the engine, resolve those it decides, or raise MagicDecConfigError."""
        if vllm_config.device_config.device_type != "cpu" and not vllm_config.use_v2_model_runner:
            raise MagicDecConfigError(
                f"{METHOD} needs vLLM's V2 model runner on GPUs; remove VLLM_USE_V2_MODEL_RUNNER=0 if it "
                "is set, and otherwise the features for which vLLM's log says that it uses V1"
            )
        if vllm_config.model_config.use_mla:
            self._check_mla(vllm_config)
        if self.has_draft_model:
            self._check_draft_model(vllm_config)
        if self.draft_weights != "target":
            check_draft_weights(self.draft_weights, vllm_config)
        if vllm_config.cache_config.kv_sharing_fast_prefill:
            raise MagicDecConfigError(
                f"{METHOD} does not work with --kv-sharing-fast-prefill; remove that option"
            )
        self._check_output_quantisation(vllm_config)
        self._resolve_lookups(vllm_config)
        max_model_len = vllm_config.model_config.max_model_len
        if self.draft_kv_budget > max_model_len:
            raise MagicDecConfigError(
                f"{METHOD}: draft_kv_budget={self.draft_kv_budget:g} is above the model length; "
                f"use at most {max_model_len} (the whole context)"
            )
        self._check_budget(vllm_config)
        if self.adaptive:
            if self.profile is not None:
                check_profile(self.profile, self)
            most = self.num_speculative_tokens
            lengths = (0, most) if self.draft_lookup == "on" else range(most + 1)
            _use_controller(self, vllm_config, lengths, needs_graphs=self.looks_up_on_device)
        if self.adaptive or (self.draft_lookup == "on" and not self.looks_up_on_device):
            logger.info_once(
                "%s: with %s, a request with a seed may get another answer when it is repeated, because "
                "its draws depend on how many tokens were drafted.",
                self.name,
                "num_speculative_tokens='auto'" if self.adaptive else "draft_lookup='on'",
            )
        if not self.enable_adaptive_verification:  # its graphs serve every length
            for sentence in find_missing_graphs(vllm_config):
                logger.info_once("%s: %s", METHOD, sentence)
        model, is_cpu = vllm_config.model_config, vllm_config.device_config.device_type == "cpu"
        if is_cpu and model.quantization is None and not multiplies_many_at_once(model.dtype):
            logger.warning_once(
                "%s: this CPU has no instructions for %s, so vLLM multiplies dense weights token by token "
                "and verifying several tokens costs as many plain steps; --dtype float32 is several times "
                "faster at that and at prompts, for twice the memory of weights and KV cache.",
                METHOD,
                str(model.dtype).removeprefix("torch."),
            )

    def _check_draft_model(self, vllm_config: VllmConfig) -> None:
        instead = f"draft with the target itself ({METHOD})"
        has_memory = self.spire is not None and self.spire.feedback_memory
        if has_memory and self.draft_lookup == "on" and not self.adaptive:
            unchecked = ", or num_speculative_tokens='auto', which can verify looked-up tokens unchecked"
            raise MagicDecConfigError(
                f"{MODEL_METHOD}: draft_lookup='on' is not supported with a SPIRe draft, whose feedback "
                "memory allows one token per pass; use draft_lookup='off'"
                f"{'' if vllm_config.use_v2_model_runner else unchecked}"
            )
        if vllm_config.kv_transfer_config is not None:
            raise MagicDecConfigError(
                f"{MODEL_METHOD} does not work with a KV connector, which does not transfer the KV cache "
                f"of the draft model; remove --kv-transfer-config and --kv-offloading-size, or {instead}"
            )
        if not issubclass(self.policy, PagePolicy | SinksAndWindow):
            raise MagicDecConfigError(
                f"{MODEL_METHOD}: draft_kv_policy={self.draft_kv_policy!r} needs the attention of the "
                "target, and a draft model has its own layers and KV cache; use "
                f"draft_kv_policy='streamingllm', or {instead}"
            )
        self._check_tokenizers(vllm_config.model_config, self.draft_model_config)

    def _check_tokenizers(self, target: ModelConfig, draft: ModelConfig) -> None:
        if target.skip_tokenizer_init:
            return
        try:
            tokenizer = get_tokenizer(
                draft.model,
                tokenizer_mode=target.tokenizer_mode,
                trust_remote_code=draft.trust_remote_code,
                revision=draft.revision,
            )
        except Exception:  # the tokenizer's library may raise any type
            logger.warning(
                "%s: %s has no tokenizer that vLLM can read; assuming the target's tokenizer.",
                MODEL_METHOD,
                draft.model,
            )
            return
        targets = cached_tokenizer_from_config(target)
        theirs, own = targets.get_vocab(), tokenizer.get_vocab()
        # Models of one family may use different reserved ids. A token that the draft does not know only
        # costs acceptance where it occurs.
        added: dict[str, int] = getattr(targets, "get_added_vocab", dict)()
        differing = sum(
            own.get(token) != index for token, index in theirs.items() if token in own or token not in added
        )
        if differing or not own.keys() & theirs.keys():
            raise MagicDecConfigError(
                f"{MODEL_METHOD}: {differing} tokens have other ids in the tokenizer of "
                f"model={draft.model!r} than in the target's; use a draft with the target's tokenizer, "
                "or vLLM's method 'draft_model' with use_heterogeneous_vocab"
            )

    def _check_mla(self, vllm_config: VllmConfig) -> None:
        is_cpu = vllm_config.device_config.device_type == "cpu"
        rope = getattr(vllm_config.model_config.hf_text_config, "rope_parameters", None) or {}
        if is_cpu and rope.get("rope_type", "default") == "default":
            # Its kernel interprets queries [tokens, heads, size] as tokens of a single head.
            raise MagicDecConfigError(
                f"{METHOD}: on CPUs, vLLM 0.32 rotates queries of MLA models without RoPE scaling by "
                "positions of other tokens, so that outputs depend on the batch, also without speculation; "
                "serve the model on a GPU"
            )
        if not issubclass(self.policy, PagePolicy):
            raise MagicDecConfigError(
                f"{METHOD}: draft_kv_policy={self.draft_kv_policy!r} reads keys of KV heads, and MLA "
                "models cache one latent vector per token instead; use draft_kv_policy='streamingllm'"
            )

    def _check_output_quantisation(self, vllm_config: VllmConfig) -> None:
        policy, device_type = self.policy, vllm_config.device_config.device_type
        if policy.granularity(self, device_type) != "token":
            return  # draft passes use vLLM's attention
        if vllm_config.compilation_config.pass_config.fuse_attn_quant:
            # Layers then expect attention output in fp8 or fp4.
            raise MagicDecConfigError(
                f"{METHOD}: attention to single tokens cannot quantise its output, as vLLM's pass "
                "fuse_attn_quant requires; use -cc.pass_config.fuse_attn_quant=False, or "
                "draft_kv_granularity='page'"
            )

    def _resolve_lookups(self, vllm_config: VllmConfig) -> None:
        """Resolve `draft_lookup="auto"`, the default of `max_num_speculative_tokens`, and datastores."""
        if self.draft_lookup == "on":
            self._check_lookups(vllm_config)
        elif self.draft_lookup == "auto":
            # The gain on GPUs is not measured yet, so lookups there need "on".
            are_on = self.adaptive and not vllm_config.use_v2_model_runner
            self.draft_lookup = "on" if are_on else "off"
            if not are_on and self.draft_lookup_sources != ("context",):
                raise MagicDecConfigError(
                    f"{METHOD}: draft_lookup_sources has no use, because draft_lookup='auto' means 'off' "
                    "here; use draft_lookup='on', or remove draft_lookup_sources"
                )
        most = self._default_max_tokens(vllm_config)
        if self.adaptive and self.max_num_speculative_tokens is None and most > self.num_speculative_tokens:
            self.num_speculative_tokens = self.max_num_speculative_tokens = most
        self._check_datastores(vllm_config)

    def _default_max_tokens(self, vllm_config: VllmConfig) -> int:
        """Return the maximum number of draft tokens per round if the user sets none."""
        if not self.adaptive:
            return int(default_of("num_speculative_tokens"))
        is_synthetic = self.rejection_sample_method == "synthetic"  # has one rate per draft token
        looks_up = self.draft_lookup == "on" and not is_synthetic
        most = _MAX_TOKENS_WITH_LOOKUPS if looks_up else DEFAULT_MAX_TOKENS
        if vllm_config.lora_config is None:
            return most
        scheduler = vllm_config.scheduler_config
        # With LoRA, vLLM demands that its limits of a step suffice for all drafts.
        return min(most, scheduler.max_num_batched_tokens // scheduler.max_num_seqs - 1)

    def _check_datastores(self, vllm_config: VllmConfig) -> None:
        model = vllm_config.model_config
        if not self.datastores:
            return
        vocabulary = None
        if not model.skip_tokenizer_init:
            vocabulary = Vocabulary.of(cached_tokenizer_from_config(model).get_vocab())
        for path in self.datastores:
            try:
                datastore_files.read(Path(path), model.get_vocab_size(), vocabulary)
            except MagicDecConfigError as error:
                sentence = str(error).removeprefix(f"{METHOD}: ")
                raise MagicDecConfigError(f"{METHOD}: draft_lookup_sources: {sentence}") from None

    def _check_lookups(self, vllm_config: VllmConfig) -> None:
        name = f"{METHOD}: draft_lookup='on'"
        on_device = host_lacks_latest_tokens(vllm_config)
        if vllm_config.use_v2_model_runner and self.adaptive and not on_device:
            # All requests then have the same number of drafts, without feedback per request.
            raise MagicDecConfigError(
                f"{name} does not work with num_speculative_tokens='auto' on the V2 model runner; use a "
                "number, set VLLM_USE_V2_MODEL_RUNNER=0, or use draft_lookup='off'"
            )
        if not on_device:
            return
        if self.num_speculative_tokens == 1:
            raise MagicDecConfigError(
                f"{name} drafts several tokens per pass; use num_speculative_tokens of 2 or more"
            )
        if self.draft_lookup_sources != ("context",):
            raise MagicDecConfigError(
                f"{METHOD}: draft_lookup_sources: on GPUs, lookups only search the request's own text, "
                "because its latest tokens are not on the host; use ['context'], or remove "
                "draft_lookup_sources"
            )
        if vllm_config.model_config.use_mla:
            raise MagicDecConfigError(
                f"{name} does not work with MLA models on GPUs; use draft_lookup='off'"
            )
        if self.enable_adaptive_verification:
            raise MagicDecConfigError(
                f"{name} does not work with enable_adaptive_verification, which supports only passes "
                "of one token; remove one of them"
            )
        if self.spire is not None:
            raise MagicDecConfigError(
                f"{name} needs KV pages on GPUs, and a SPIRe draft reads single tokens; use "
                "draft_lookup='off'"
            )
        granularity = self.policy.granularity(self, vllm_config.device_config.device_type)
        if granularity != "page" and not issubclass(self.policy, PagePolicy):
            raise MagicDecConfigError(
                f"{name} needs KV pages on GPUs, and draft_kv_policy={self.draft_kv_policy!r} selects "
                "single tokens; use draft_kv_granularity='page', or draft_lookup='off'"
            )
        self.looks_up_on_device = True

    def _check_budget(self, vllm_config: VllmConfig) -> None:
        """Refuse a budget that the policy cannot use."""
        limits = self.limits(vllm_config, vllm_config.cache_config.block_size)
        try:
            self.policy.parse_budget(self, limits, self.draft_kv_budget)
        except ValueError as error:
            drafts = "max_num_speculative_tokens" if self.adaptive else "num_speculative_tokens"
            usual = {name: default_of(name) for name in ("draft_kv_sink", "snapkv_window", "snapkv_recent")}
            larger = [
                f"{name}={default}" for name, default in usual.items() if getattr(self, name) > default
            ]
            if self.num_speculative_tokens > (default := self._default_max_tokens(vllm_config)):
                larger.append(f"{drafts}={default}")
            others = f", or values nearer to the defaults {', '.join(larger)}" if larger else ""
            raise MagicDecConfigError(f"{self.name}: {error}{others}") from None


def fit_adapters(
    engine_args: Any, given: dict[str, Any], options: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the given fields with as many drafts under `auto` as vLLM accepts with LoRA.

    `options` are command-line options by field, None if not given. The result is None if the number of
    drafts fits or is not one: vLLM then refused something else.

    Raises:
        MagicDecConfigError: it does not fit, and vLLM's own error names none of the values.
    """
    typed = {name: value for name, value in options.items() if value is not None}
    fields = {**{name.replace("-", "_"): value for name, value in given.items()}, **typed}
    max_num_seqs, max_tokens = engine_args.max_num_seqs, engine_args.max_num_batched_tokens
    if not engine_args.enable_lora or not max_num_seqs or not max_tokens or not selects_magicdec(fields):
        return None
    fitting, field = max_tokens // max_num_seqs - 1, "num_speculative_tokens"
    drafts = fields.get(field, default_of(field))
    if drafts == "auto":
        field = "max_num_speculative_tokens"
        drafts = fields.get(field)
        if drafts is None and 1 <= fitting < DEFAULT_MAX_TOKENS:
            logger.info_once(
                "With LoRA, 'auto' drafts at most %d tokens a round: a step of --max-num-seqs %d has room "
                "for no more in --max-num-batched-tokens %d.",
                fitting,
                max_num_seqs,
                max_tokens,
            )
            return {**given, field: fitting}
        drafts = 1 if drafts is None else drafts
    if not isinstance(drafts, int) or drafts <= fitting:
        return None
    fewer = f"{field}={fitting}, " if fitting > 0 else ""
    needed = max_num_seqs * (drafts + 1)
    raise MagicDecConfigError(
        f"{name_of(fields)}: with LoRA, {field}={drafts} needs --max-num-batched-tokens {needed} for "
        f"--max-num-seqs {max_num_seqs}, not {max_tokens}; use {fewer}--max-num-seqs "
        f"{max_tokens // (drafts + 1)}, or --max-num-batched-tokens {needed}"
    )


def adapt_vllm_method(spec: VllmMethodConfig, vllm_config: VllmConfig) -> None:
    """Check what the plugin adds to one of vLLM's methods, and let a controller choose the drafts.

    Raises:
        MagicDecConfigError: an addition is not possible with the engine.
    """
    parallel = vllm_config.parallel_config
    if spec.draft_kv_budget is not None:
        if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
            raise MagicDecConfigError(
                f"{spec.name}: draft_kv_budget is not possible with context parallelism, which splits KV "
                "pages between GPUs; remove it"
            )
        cache = vllm_config.cache_config
        if cache.user_specified_block_size:  # else vLLM may still choose
            spec.window(cache.block_size, vllm_config.model_config.max_model_len)
    if spec.adaptive:
        _choose_drafts(spec, vllm_config)


def _choose_drafts(spec: VllmMethodConfig, vllm_config: VllmConfig) -> None:
    if vllm_config.parallel_config.data_parallel_size > 1:
        raise MagicDecConfigError(
            f"{spec.name}: num_speculative_tokens='auto' is not possible with data parallelism, in which "
            "vLLM's drafters must draft the same number on all ranks; use a number"
        )
    is_v2 = vllm_config.use_v2_model_runner
    if is_v2 and spec.use_multi_module_mtp():
        raise MagicDecConfigError(
            f"{spec.name}: num_speculative_tokens='auto' is not possible with several MTP modules, whose "
            "KV caches assume that all drafts are verified; use a number"
        )
    _use_controller(spec, vllm_config, range(spec.num_speculative_tokens + 1))
    # More drafts than those with graphs are of no use.
    spec.num_speculative_tokens = spec.lengths[-1]
    if spec.drafts_all or (is_v2 and spec.method in _FIXED_ON_V2):
        logger.info_once(
            "%s: vLLM makes %d drafts in every step with this method; 'auto' chooses how many it verifies.",
            spec.name,
            spec.num_speculative_tokens,
        )
    elif spec.budget_tokens(1):
        logger.info_once(
            "%s: also a step without drafts runs vLLM's drafter once, to fill its KV cache.", spec.name
        )
    for sentence in find_missing_graphs(vllm_config):
        logger.info_once("%s: %s", spec.name, sentence)


def _use_controller(
    spec: AdaptiveConfig, vllm_config: VllmConfig, lengths: Sequence[int], *, needs_graphs: bool = False
) -> None:
    """Use a scheduler whose controller chooses the number of draft tokens of every step.

    Args:
        lengths: numbers to choose from, ascending, where they cost nothing.
        needs_graphs: whether each number costs CUDA graphs of its own, beside vLLM's.
    """
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls is not None:
        raise MagicDecConfigError(
            f"{spec.name}: num_speculative_tokens='auto' needs its own scheduler; remove "
            "--scheduler-cls or use a number"
        )
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size_across_dp > 1:
        # Every process then has its own scheduler, and all of them must make the same decisions.
        raise MagicDecConfigError(
            f"{spec.name}: num_speculative_tokens='auto' depends on times that each process measures, "
            "and with the executor 'external_launcher' all processes must choose the same; use a number"
        )
    by_length = captures_by_length(vllm_config)
    if by_length or needs_graphs:
        lengths = nested_lengths(spec.num_speculative_tokens, max(2, scheduler.max_num_seqs))
    spec.choose_among(tuple(lengths))
    if by_length:
        capture_every_length(vllm_config)
    name = "MagicDecAsyncScheduler" if scheduler.async_scheduling else "MagicDecScheduler"
    scheduler.scheduler_cls = f"vllm_magicdec.adaptive.scheduler.{name}"
