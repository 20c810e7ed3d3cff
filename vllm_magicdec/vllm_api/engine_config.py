# SPDX-License-Identifier: Apache-2.0
"""What only the whole engine configuration shows: refused, or filled in, before any process starts.

`config.MagicDecSpeculativeConfig` judges a user's values by themselves. How they go with the model's
length, the KV cache's pages, the scheduler and a profile is judged here.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vllm.config import VllmConfig

from vllm_magicdec.adaptive.draft_plan import BUDGET_DIVISORS
from vllm_magicdec.adaptive.metrics import open_metrics_dir
from vllm_magicdec.adaptive.step_times import StepTimes
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.errors import METHOD, MagicDecConfigError
from vllm_magicdec.policies import find_policy


class EngineSpeculativeConfig(MagicDecSpeculativeConfig):
    """The speculative configuration that vLLM's engine holds: it can judge the rest of the engine too."""

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
        if self.adaptive_budget:
            self.draft_kv_budget = min(self.draft_kv_budget, max_model_len)
        if self.draft_kv_budget > max_model_len:
            raise MagicDecConfigError(
                f"{METHOD}: draft_kv_budget={self.draft_kv_budget:g} is above the model length; "
                f"use at most {max_model_len} (the whole context)"
            )
        self.metrics_dir = open_metrics_dir()
        if find_policy(self.draft_kv_policy).reads_generated_tokens(self):
            check_refresh(vllm_config.scheduler_config.async_scheduling, vllm_config.use_v2_model_runner)
        self.budgets = self._find_budgets(vllm_config)
        if self.has_controller:
            self._adapt(vllm_config)

    def _find_budgets(self, vllm_config: VllmConfig) -> tuple[float, ...]:
        """The budgets to prepare for, ascending.

        Raises:
            MagicDecConfigError: the policy cannot work with the largest one.
        """
        try:
            self._effective_tokens(vllm_config, self.draft_kv_budget)
        except MagicDecConfigError as error:
            if not self.adaptive_budget:
                raise
            sentence = str(error).replace("draft_kv_budget=", "draft_kv_max_budget=")  # what the user typed
            raise MagicDecConfigError(sentence) from None
        if not self.adaptive_budget:
            return (self.draft_kv_budget,)
        budgets = set()
        for divisor in BUDGET_DIVISORS:
            with suppress(MagicDecConfigError):
                tokens = max(1, self.draft_kv_budget // divisor)
                # What a worker is given is the rounded budget, so that has to do as well.
                tokens = self._effective_tokens(vllm_config, tokens)
                budgets.add(self._effective_tokens(vllm_config, tokens))
        return tuple(sorted(budgets))

    def _effective_tokens(self, vllm_config: VllmConfig, budget: float) -> int:
        """What comes of a budget when the policy has rounded it up, in tokens.

        Raises:
            MagicDecConfigError: the policy cannot work with it.
        """
        limits = self.limits(vllm_config, vllm_config.cache_config.block_size)
        try:
            parsed = find_policy(self.draft_kv_policy).parse_budget(self, limits, budget)
        except ValueError as error:
            raise MagicDecConfigError(f"{METHOD}: {error}") from None
        return min(parsed.max_tokens, limits.max_model_len)

    def _adapt(self, vllm_config: VllmConfig) -> None:
        """Let a scheduler with a controller choose for every step."""
        scheduler = vllm_config.scheduler_config
        if scheduler.scheduler_cls is not None:
            raise MagicDecConfigError(
                f"{METHOD}: 'auto' brings its own scheduler; remove --scheduler-cls or give a number"
            )
        if vllm_config.parallel_config.data_parallel_size > 1:
            raise MagicDecConfigError(
                f"{METHOD}: 'auto' does not work with data parallelism in one engine; give a number, or "
                "start one server per rank"
            )
        if self.profile is not None:
            self._check_profile(self.profile)
        name = "MagicDecAsyncScheduler" if scheduler.async_scheduling else "MagicDecScheduler"
        scheduler.scheduler_cls = f"vllm_magicdec.adaptive.scheduler.{name}"

    def _check_profile(self, path: str) -> None:
        try:
            measured = StepTimes.load(Path(path)).budgets
        except ValueError as error:
            raise MagicDecConfigError(f"{METHOD}: {error}") from None
        # A fraction is of this engine's model length, which may differ from the profile's.
        if self.draft_kv_budget >= 1 and not set(self.budgets) <= set(measured):
            raise MagicDecConfigError(
                f"{METHOD}: {path} was measured with draft_kv_budget={_and(measured)}, not "
                f"{_and(self.budgets)}; use what was measured, or measure again with 'magicdec profile'"
            )


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


def _and(budgets: Sequence[float]) -> str:
    *first, last = (f"{budget:g}" for budget in budgets)
    return f"{', '.join(first)} and {last}" if first else last
