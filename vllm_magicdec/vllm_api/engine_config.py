# SPDX-License-Identifier: Apache-2.0
"""What only the whole engine configuration shows: refused, or filled in, before any process starts.

`config.MagicDecSpeculativeConfig` judges a user's values by themselves. How they go with the model's
length, the KV cache's pages, the scheduler and a profile is judged here.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path

from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config, get_tokenizer

from vllm_magicdec.config import (
    DEFAULT_MAX_TOKENS,
    MagicDecSpeculativeConfig,
    default_of,
    nested_lengths,
)
from vllm_magicdec.errors import METHOD, MODEL_METHOD, MagicDecConfigError
from vllm_magicdec.lookup.datastore_files import Vocabulary
from vllm_magicdec.lookup.datastore_files import check as check_datastore
from vllm_magicdec.policies.base import PagePolicy
from vllm_magicdec.policies.sinks_and_window import SinksAndWindow
from vllm_magicdec.spire.settings import SpireSettings
from vllm_magicdec.vllm_api.cpu_products import why_products_are_slow
from vllm_magicdec.vllm_api.graph_sizes import (
    capture_every_length,
    captures_by_length,
    find_missing_graphs,
)
from vllm_magicdec.vllm_api.profiles import check_profile

logger = init_logger(f"vllm.{__name__}")

# Of `auto`: passes that read ahead make long rounds cheap, and those that are not worth it end early.
_MAX_TOKENS_WITH_LOOKUPS = 16


def are_tokens_on_device_alone(vllm_config: VllmConfig) -> bool:
    """Whether the host does not know the requests' latest tokens when drafting begins."""
    return vllm_config.use_v2_model_runner and vllm_config.device_config.device_type != "cpu"


class EngineSpeculativeConfig(MagicDecSpeculativeConfig):
    """The speculative configuration that vLLM's engine holds: it can judge the rest of the engine too."""

    def verify_engine(self, vllm_config: VllmConfig) -> None:
        """Refuse what only the whole engine configuration shows; called before any process starts.

        Raises:
            MagicDecConfigError: with the reason and the way out.
        """
        if vllm_config.model_config.use_mla:
            self._check_mla(vllm_config)
        if self.has_draft_model:
            self._check_draft_model(vllm_config)
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
        if self.policy.reads_generated_tokens(self):
            is_asynchronous = bool(vllm_config.scheduler_config.async_scheduling)
            check_refresh(is_asynchronous, vllm_config.use_v2_model_runner)
        self._check_budget(vllm_config)
        if self.adaptive:
            self._adapt(vllm_config)
        if not self.enable_adaptive_verification:  # whose graphs serve every length
            for sentence in find_missing_graphs(vllm_config):
                logger.info_once("%s: %s", METHOD, sentence)
        if (reason := why_products_are_slow(vllm_config)) is not None:
            logger.warning_once("%s: %s.", METHOD, reason)

    def _check_draft_model(self, vllm_config: VllmConfig) -> None:
        instead = f"draft with the target itself ({METHOD})"
        if self.spire is not None:
            self._check_spire(self.spire, vllm_config)
        if vllm_config.kv_transfer_config is not None:
            raise MagicDecConfigError(
                f"{MODEL_METHOD} does not work with a KV connector, which would not bring the draft "
                f"model's KV cache; remove --kv-transfer-config and --kv-offloading-size, or {instead}"
            )
        if not issubclass(self.policy, PagePolicy | SinksAndWindow):
            raise MagicDecConfigError(
                f"{MODEL_METHOD}: draft_kv_policy={self.draft_kv_policy!r} follows the attention of the "
                "target's prompts and verifications, and a draft model has layers and a cache of its own; "
                f"use draft_kv_policy='streamingllm', or {instead}"
            )
        self._check_tokenizers(vllm_config.model_config, self.draft_model_config)

    def _check_spire(self, fields: SpireSettings, vllm_config: VllmConfig) -> None:
        """What a SPIRe draft cannot do."""
        # Only where the host looks up may looked-up tokens go to the target unread.
        goes_unread = self.adaptive and not are_tokens_on_device_alone(vllm_config)
        if self.draft_lookup == "on" and not goes_unread and fields.feedback_memory:
            is_cpu = vllm_config.device_config.device_type == "cpu"
            with_auto = (
                ", or num_speculative_tokens='auto', which may have looked-up tokens verified unread"
            )
            instead = with_auto if is_cpu and not vllm_config.use_v2_model_runner else ""
            raise MagicDecConfigError(
                f"{MODEL_METHOD}: draft_lookup='on' makes no pass of a SPIRe draft longer, because every "
                f"token needs the memory of the one before; use draft_lookup='off'{instead}"
            )

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
        except Exception:  # of whatever library reads it
            logger.warning(
                "%s: %s has no tokenizer that vLLM can read; its tokens are taken for the target's.",
                MODEL_METHOD,
                draft.model,
            )
            return
        targets = cached_tokenizer_from_config(target)
        theirs, own = targets.get_vocab(), tokenizer.get_vocab()
        # Of families whose models differ in what they use of the reserved ids, one may lack the other's: a
        # draft that does not know a token is wrong where it comes, no more.
        added: dict[str, int] = getattr(targets, "get_added_vocab", dict)()
        differing = sum(
            own.get(token) != index for token, index in theirs.items() if token in own or token not in added
        )
        if differing or not own.keys() & theirs.keys():
            raise MagicDecConfigError(
                f"{MODEL_METHOD}: the tokenizer of model={draft.model!r} gives {differing} tokens other "
                "ids than the target's; use a draft with the target's tokenizer, or vLLM's method "
                "'draft_model' with use_heterogeneous_vocab"
            )

    def _check_mla(self, vllm_config: VllmConfig) -> None:
        is_cpu = vllm_config.device_config.device_type == "cpu"
        rope = getattr(vllm_config.model_config.hf_text_config, "rope_parameters", None) or {}
        if is_cpu and rope.get("rope_type", "default") == "default":
            # Its kernel takes [tokens, heads, size] for as many tokens of one head.
            raise MagicDecConfigError(
                f"{METHOD}: on a CPU vLLM 0.32 turns queries of MLA models whose RoPE is not scaled by the "
                "positions of other tokens, so that their answers depend on the batch, with and without "
                "speculation; serve the model on a GPU"
            )
        if not issubclass(self.policy, PagePolicy):
            raise MagicDecConfigError(
                f"{METHOD}: draft_kv_policy={self.draft_kv_policy!r} reads keys of KV heads, and MLA "
                "models cache one latent vector per token instead; use draft_kv_policy='streamingllm'"
            )

    def _check_output_quantisation(self, vllm_config: VllmConfig) -> None:
        policy, device_type = self.policy, vllm_config.device_config.device_type
        if policy.granularity(self, device_type) != "token":
            return  # vLLM's own attention drafts
        if vllm_config.compilation_config.pass_config.fuse_attn_quant:
            # Layers then want their output in fp8 or fp4, by a scale of theirs.
            raise MagicDecConfigError(
                f"{METHOD}: attention to single tokens does not quantise its output, as vLLM's pass "
                "fuse_attn_quant wants it to; use -cc.pass_config.fuse_attn_quant=False, or "
                "draft_kv_granularity='page'"
            )

    def _resolve_lookups(self, vllm_config: VllmConfig) -> None:
        """Whether there are lookups, where `auto` leaves that to the engine."""
        if self.draft_lookup == "on":
            self._check_lookups(vllm_config)
        elif self.draft_lookup == "auto":
            self.draft_lookup = "off"
            # On GPUs it was not measured yet, so they look nothing up that they were not asked to.
            if self.adaptive and not are_tokens_on_device_alone(vllm_config):
                with suppress(MagicDecConfigError):
                    self._check_lookups(vllm_config)
                    self.draft_lookup = "on"
            if self.draft_lookup == "off" and self.draft_lookup_sources != ("context",):
                raise MagicDecConfigError(
                    f"{METHOD}: draft_lookup_sources has no use, because 'auto' looks nothing up here; use "
                    "draft_lookup='on', which says what it lacks, or remove it"
                )
        most = self._default_most
        if self.adaptive and self.max_num_speculative_tokens is None and most > self.num_speculative_tokens:
            self.num_speculative_tokens = self.max_num_speculative_tokens = most
        self._check_datastores(vllm_config)

    @property
    def _default_most(self) -> int:
        """Drafts of a round, at most, where the user does not say."""
        if not self.adaptive:
            return int(default_of("num_speculative_tokens"))
        is_synthetic = self.rejection_sample_method == "synthetic"  # by rates for each of vLLM's number
        looks_up = self.draft_lookup == "on" and not is_synthetic
        return _MAX_TOKENS_WITH_LOOKUPS if looks_up else DEFAULT_MAX_TOKENS

    def _check_datastores(self, vllm_config: VllmConfig) -> None:
        model = vllm_config.model_config
        if not self.datastores or self.draft_lookup == "off":
            return
        vocabulary = None
        if not model.skip_tokenizer_init:
            vocabulary = Vocabulary.of(cached_tokenizer_from_config(model).get_vocab())
        for path in self.datastores:
            try:
                check_datastore(Path(path), model.get_vocab_size(), vocabulary)
            except MagicDecConfigError as error:
                sentence = str(error).removeprefix(f"{METHOD}: ")
                raise MagicDecConfigError(f"{METHOD}: draft_lookup_sources: {sentence}") from None

    def _check_lookups(self, vllm_config: VllmConfig) -> None:
        name = f"{METHOD}: draft_lookup='on'"
        on_device = are_tokens_on_device_alone(vllm_config)
        if vllm_config.use_v2_model_runner and self.adaptive and not on_device:
            # There all requests have as many drafts, and the scheduler does not hear which were worth it.
            raise MagicDecConfigError(
                f"{name} does not work with num_speculative_tokens='auto' on the V2 model runner; give a "
                "number, set VLLM_USE_V2_MODEL_RUNNER=0, or use draft_lookup='off'"
            )
        if not on_device:
            if vllm_config.device_config.device_type != "cpu":
                raise MagicDecConfigError(
                    f"{name} works on GPUs with the V2 model runner alone; remove "
                    "VLLM_USE_V2_MODEL_RUNNER=0 where it is set, or use draft_lookup='off'"
                )
            return
        if self.num_speculative_tokens == 1:
            raise MagicDecConfigError(
                f"{name} makes several drafts of a pass; use num_speculative_tokens of 2 or more"
            )
        if self.draft_lookup_sources != ("context",):
            raise MagicDecConfigError(
                f"{METHOD}: draft_lookup_sources: on GPUs lookups search a request's own text "
                "alone, as its latest tokens are not on the host; use ['context'], or remove "
                "draft_lookup_sources"
            )
        if vllm_config.model_config.use_mla:
            raise MagicDecConfigError(
                f"{name} does not work with MLA models on GPUs; use draft_lookup='off'"
            )
        if self.enable_adaptive_verification:
            raise MagicDecConfigError(
                f"{name} does not work with enable_adaptive_verification, which hears of passes of one "
                "token alone; remove one of them"
            )
        if self.spire is not None:
            raise MagicDecConfigError(
                f"{name} reads pages on GPUs, and a SPIRe draft's view is of single tokens; use "
                "draft_lookup='off'"
            )
        granularity = self.policy.granularity(self, vllm_config.device_config.device_type)
        if granularity != "page" and not issubclass(self.policy, PagePolicy):
            raise MagicDecConfigError(
                f"{name} reads pages on GPUs, and draft_kv_policy={self.draft_kv_policy!r} chooses single "
                "tokens here; use draft_kv_granularity='page', or draft_lookup='off'"
            )
        self.looks_up_on_device = True

    def _check_budget(self, vllm_config: VllmConfig) -> None:
        """Refuse a budget that the policy cannot work with.

        Raises:
            MagicDecConfigError: with the way out.
        """
        limits = self.limits(vllm_config, vllm_config.cache_config.block_size)
        try:
            self.policy.parse_budget(self, limits, self.draft_kv_budget)
        except ValueError as error:
            others = self._find_room_takers(vllm_config)
            raise MagicDecConfigError(f"{self.name}: {error}{others}") from None

    def _find_room_takers(self, vllm_config: VllmConfig) -> str:
        """The fewest fields at whose defaults the policy could work with the budget."""
        names = ("draft_kv_sink", "snapkv_window", "snapkv_recent")
        defaults = {name: default_of(name) for name in names}
        defaults["num_speculative_tokens"] = self._default_most
        larger = [name for name, default in defaults.items() if getattr(self, name) > default]

        def would_do(at_default: Sequence[str]) -> bool:
            other = copy.copy(self)
            for name in at_default:
                setattr(other, name, defaults[name])
            limits = other.limits(vllm_config, vllm_config.cache_config.block_size)
            try:
                self.policy.parse_budget(other, limits, self.draft_kv_budget)
            except ValueError:
                return False
            return True

        def typed(name: str) -> str:
            is_most = self.adaptive and name == "num_speculative_tokens"
            return f"{'max_' if is_most else ''}{name}={defaults[name]}"

        for count in range(1, len(larger) + 1):
            if takers := [group for group in combinations(larger, count) if would_do(group)]:
                return "".join(f", or {' and '.join(map(typed, group))}" for group in takers)
        return ""

    def _adapt(self, vllm_config: VllmConfig) -> None:
        """Let a scheduler with a controller choose for every step."""
        scheduler = vllm_config.scheduler_config
        if scheduler.scheduler_cls is not None:
            raise MagicDecConfigError(
                f"{METHOD}: 'auto' brings its own scheduler; remove --scheduler-cls or give a number"
            )
        parallel = vllm_config.parallel_config
        if (
            parallel.distributed_executor_backend == "external_launcher"
            and parallel.world_size_across_dp > 1
        ):
            # Every process has a scheduler of its own then, and all of them have to schedule alike.
            raise MagicDecConfigError(
                f"{METHOD}: 'auto' chooses by times that each process measures for itself, and with the "
                "executor 'external_launcher' all have to choose alike; give a number"
            )
        if self.profile is not None:
            check_profile(self.profile, self, vllm_config, self._default_most)
        by_length, most = captures_by_length(vllm_config), self.num_speculative_tokens
        few = nested_lengths(most, max(2, scheduler.max_num_seqs))
        every = (0, most) if self.draft_lookup == "on" else tuple(range(most + 1))
        # Lookups on the device have graphs of their own for each.
        self.choose_among(few if by_length or self.looks_up_on_device else every)
        if by_length:
            capture_every_length(vllm_config)
        name = "MagicDecAsyncScheduler" if scheduler.async_scheduling else "MagicDecScheduler"
        scheduler.scheduler_cls = f"vllm_magicdec.adaptive.scheduler.{name}"


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
