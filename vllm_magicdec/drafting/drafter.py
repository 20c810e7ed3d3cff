# SPDX-License-Identifier: Apache-2.0
"""The draft loop: view -> forward -> sample, gamma times, with the target's own weights and KV cache.

Drafted tokens write their K/V into the request's own lookahead slots. Verification recomputes and
overwrites every one of them, so nothing approximate survives in the cache.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_magicdec import envs
from vllm_magicdec.adaptive.draft_plan import DraftPlan
from vllm_magicdec.adaptive.metrics import DraftFailures
from vllm_magicdec.attention.plans import CommonLengthPlans
from vllm_magicdec.attention.switch import install_switches
from vllm_magicdec.config import MagicDecSpeculativeConfig, page_budget, token_budget
from vllm_magicdec.errors import METHOD
from vllm_magicdec.policies import PagePolicy, TokenPolicy, VerifyTopK, find_policy
from vllm_magicdec.policies.observing import ObservingRunner, Selector
from vllm_magicdec.policies.verify_topk import (
    PageScores,
    PageSummaries,
    Verification,
    VerificationSelector,
    VerificationViews,
)
from vllm_magicdec.views.base import Batch, DraftSlots, DraftStep, View, Views
from vllm_magicdec.views.pages import PageBudget, PageViews
from vllm_magicdec.views.tokens import Selections, TokenViews, budget_to_select

logger = init_logger(f"vllm.{__name__}")


class Runner(ObservingRunner, Protocol):
    """What the loop needs from a vLLM model runner; implemented by vLLM's adapters."""

    def draft_step(self, tokens: torch.Tensor, step: DraftStep) -> torch.Tensor:
        """Run the target over the step's view and sample, as `draft_sample_method` says.

        Args:
            tokens: [num_reqs] int32, the query tokens.
            step: where they look and where their K/V goes.

        Returns:
            [num_reqs] int32 or int64, the next tokens; valid until the next step.
        """
        ...


class Drafter:
    """Drafts gamma tokens per request; one per worker, shared by both model runners.

    Args:
        vllm_config: the engine's configuration; its speculative config is ours.
        kv_cache_config: the target's attention layers, in one group, and what their KV cache looks like.
        page_size: tokens per page of the block tables that `draft` will be given.
        device: where the target runs.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        page_size: int,
        device: torch.device,
    ) -> None:
        spec = vllm_config.speculative_config
        assert isinstance(spec, MagicDecSpeculativeConfig)
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.draft_tokens = torch.zeros(
            (max_num_reqs, spec.num_speculative_tokens), dtype=torch.int64, device=device
        )
        (group,) = kv_cache_config.kv_cache_groups
        self.layer_names = group.layer_names
        self._cache = group.kv_cache_spec
        # Block tables may count in smaller pages than the cache was allocated in.
        self._num_blocks = kv_cache_config.num_blocks * self._cache.block_size // page_size
        self._vllm_config = vllm_config
        self._spec = spec
        self._page_size = page_size
        self._device = device
        self._selector: Selector | VerificationSelector | None = None
        self._plans: Sequence[CommonLengthPlans] = ()
        self._views = self._make_views()
        # Every tensor-parallel rank drafts the same round: one of them counts.
        self._failures = DraftFailures(spec.metrics_dir if get_tp_group().is_first_rank else None)

    def _make_views(self) -> Views:
        config, spec = self._vllm_config, self._spec
        max_num_reqs = config.scheduler_config.max_num_seqs
        draft_slots = DraftSlots(
            page_size=self._page_size,
            max_num_reqs=max_num_reqs,
            max_num_steps=spec.num_speculative_tokens,
            max_model_len=config.model_config.max_model_len,
            device=self._device,
        )
        policy_class = find_policy(spec.draft_kv_policy)
        if issubclass(policy_class, PagePolicy):
            pages = self._page_budgets()
            self._log(pages)
            return PageViews(
                [policy_class(spec, budget, self._device) for budget in pages],
                draft_slots,
                page_size=self._page_size,
                max_num_reqs=max_num_reqs,
                max_num_steps=spec.num_speculative_tokens,
                device=self._device,
            )
        if issubclass(policy_class, TokenPolicy):
            return self._make_token_views(policy_class(spec), draft_slots)
        policy = policy_class(spec)
        scores, summary_bytes = self._make_page_scores()
        if policy.granularity == "token":
            return self._make_token_views(policy, draft_slots, scores, summary_bytes)
        pages = self._page_budgets()
        views = VerificationViews(
            pages,
            scores,
            draft_slots,
            num_layers=len(self.layer_names),
            refresh=policy.refresh,
            max_num_reqs=max_num_reqs,
            max_num_steps=spec.num_speculative_tokens,
            device=self._device,
        )
        self._log(pages, {"lists of pages": views.index_bytes, "page summaries": summary_bytes})
        return views

    def _page_budgets(self) -> list[PageBudget]:
        return [page_budget(self._vllm_config, self._page_size, budget) for budget in self._spec.budgets]

    def _make_token_views(
        self,
        policy: TokenPolicy | VerifyTopK,
        draft_slots: DraftSlots,
        scores: PageScores | None = None,
        summary_bytes: int = 0,
    ) -> TokenViews:
        scheduler = self._vllm_config.scheduler_config
        budgets = [token_budget(self._vllm_config, policy, budget) for budget in self._spec.budgets]
        to_select = budget_to_select(budgets)
        selections = Selections(
            num_layers=len(self.layer_names),
            num_kv_heads=self._cache.num_kv_heads,
            max_num_reqs=scheduler.max_num_seqs,
            max_selected=to_select.max_selected,
            device=self._device,
        )
        if scores is not None:
            self._selector = VerificationSelector(
                scores, to_select, selections, page_size=self._page_size, refresh=policy.refresh
            )
        else:
            assert isinstance(policy, TokenPolicy)
            self._plans = install_switches(self._vllm_config, self.layer_names, self._device)
            self._selector = Selector(
                policy,
                budgets,
                selections,
                page_size=self._page_size,
                max_batched_tokens=scheduler.max_num_batched_tokens,
            )
        views = TokenViews(
            selections,
            budgets,
            draft_slots,
            page_size=self._page_size,
            max_num_reqs=scheduler.max_num_seqs,
            max_num_steps=self._spec.num_speculative_tokens,
        )
        self._log(budgets, {"lists of slots": views.index_bytes, "page summaries": summary_bytes})
        return views

    def _make_page_scores(self) -> tuple[PageScores, int]:
        """What scores pages, and the device memory of its summaries in bytes."""
        verification = Verification(
            num_layers=len(self.layer_names),
            max_num_reqs=self._vllm_config.scheduler_config.max_num_seqs,
            num_queries=self._spec.num_speculative_tokens + 1,
            device=self._device,
        )
        summaries = PageSummaries(
            num_layers=len(self.layer_names),
            num_blocks=self._num_blocks,
            num_kv_heads=self._cache.num_kv_heads,
            head_size=self._cache.head_size,
            dtype=self._cache.dtype,
            device=self._device,
        )
        self._plans = install_switches(self._vllm_config, self.layer_names, self._device, verification)
        return PageScores(verification, summaries, self._page_size), summaries.num_bytes

    def _log(self, budgets: Sequence[object], extra_bytes: Mapping[str, int] | None = None) -> None:
        extra = ", ".join(f"{n / 2**20:.1f} MiB for {what}" for what, n in (extra_bytes or {}).items() if n)
        logger.info_once(
            "%s drafts %s%d tokens a round with policy %s; each draft step reads at most %s of a "
            "request's KV cache. No weights and no KV cache were added%s.",
            METHOD,
            "up to " if self._spec.adaptive else "",
            self._spec.num_speculative_tokens,
            self._spec.draft_kv_policy,
            " or ".join(map(str, budgets)),
            f"; {extra}" if extra else "",
        )

    @property
    def common_lens(self) -> Sequence[int | None]:
        """`TokenView.common_len`s for which a draft step runs other kernels; None is one."""
        full_lens = self._views.full_lens if isinstance(self._views, TokenViews) and self._plans else []
        return (None, *full_lens)

    def capture_view(self, num_reqs: int, lens: torch.Tensor, common_len: int | None) -> View:
        """`Views.view`, for a step that may be captured in a CUDA graph."""
        if common_len is not None:
            assert isinstance(self._views, TokenViews)
            for plans in self._plans:
                plans.prepare_capture(num_reqs, common_len, self._views.width)
        return self._views.view(num_reqs, lens, common_len)

    def draft(self, runner: Runner, batch: Batch, num_steps: int) -> bool:
        """Fill `draft_tokens[:num_reqs, :num_steps]`.

        Args:
            runner: makes the passes.
            batch: the round's requests.
            num_steps: drafts of each; a `DraftPlan` says with which budget, else it is the largest.

        Returns:
            False if drafting failed. The failure is counted and logged, and the drafts are token 0 for
            every request: the caller must let the target verify them as drawn from a one-hot draft.
        """
        tokens = batch.tokens
        drafts = self.draft_tokens[: tokens.shape[0], :num_steps]
        try:
            if self._selector is not None:
                self._selector.update(runner, batch)
            for step in self._views.prepare(batch, num_steps, self._size_of(num_steps)):
                tokens = runner.draft_step(tokens.to(torch.int32), step)
                drafts[:, step.index] = tokens
        except Exception:
            if envs.strict():
                raise
            self._failures.count()
            drafts.zero_()
            return False
        return True

    def _size_of(self, num_steps: int) -> int:
        """Which budget to draft with."""
        if self._spec.adaptive_budget and isinstance(num_steps, DraftPlan):
            return self._spec.budgets.index(num_steps.budget)
        return -1
