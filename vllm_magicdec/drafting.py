# SPDX-License-Identifier: Apache-2.0
"""The draft loop: view -> forward -> sample, gamma times, with the target's own weights and KV cache.

Drafted tokens write their K/V into the request's own lookahead slots. Verification recomputes and
overwrites every one of them, so nothing approximate survives in the cache.
"""

from typing import Protocol

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_magicdec import envs
from vllm_magicdec.config import METHOD, MagicDecSpeculativeConfig, effective_budget
from vllm_magicdec.metrics import DraftFailures
from vllm_magicdec.policies import make_policy
from vllm_magicdec.view import DraftStep, PageViews

logger = init_logger(f"vllm.{__name__}")


class Runner(Protocol):
    """What the loop needs from a vLLM model runner; implemented by the adapters in `runners/`."""

    def draft_forward(self, tokens: torch.Tensor, step: DraftStep) -> torch.Tensor:
        """Run the target over the step's view.

        Args:
            tokens: [num_reqs] int32, the query tokens.
            step: where they look and where their K/V goes.

        Returns:
            [num_reqs, hidden_size], the final hidden states.
        """
        ...

    def draft_sample(self, hidden_states: torch.Tensor, step: DraftStep) -> torch.Tensor:
        """Sample the next tokens, [num_reqs] int32 or int64, as `draft_sample_method` says."""
        ...


class Drafter:
    """Drafts gamma tokens per request; one per worker, shared by both model runners.

    Args:
        vllm_config: the engine's configuration; its speculative config is ours.
        page_size: tokens per page of the block tables that `draft` will be given.
        device: where the target runs.
    """

    def __init__(self, vllm_config: VllmConfig, page_size: int, device: torch.device) -> None:
        spec = vllm_config.speculative_config
        assert isinstance(spec, MagicDecSpeculativeConfig)
        budget = effective_budget(vllm_config, page_size)
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.draft_tokens = torch.zeros(
            (max_num_reqs, spec.num_speculative_tokens), dtype=torch.int64, device=device
        )
        self._views = PageViews(
            make_policy(spec.draft_kv_policy, budget, device),
            page_size=page_size,
            max_num_reqs=max_num_reqs,
            max_num_steps=spec.num_speculative_tokens,
            max_model_len=vllm_config.model_config.max_model_len,
            device=device,
        )
        # Every tensor-parallel rank drafts the same round: one of them counts.
        self._failures = DraftFailures(spec.metrics_dir if get_tp_group().is_first_rank else None)
        logger.info_once(
            "%s drafts %d tokens a round with policy %s; each draft step reads at most %s of a "
            "request's KV cache. No weights and no KV cache were added.",
            METHOD,
            spec.num_speculative_tokens,
            spec.draft_kv_policy,
            budget,
        )

    def draft(
        self,
        runner: Runner,
        tokens: torch.Tensor,  # [num_reqs], the last verified token of each request
        block_table: torch.Tensor,  # [num_reqs, max_blocks] int32
        context_lens: torch.Tensor,  # [num_reqs] int64, tokens before `tokens`
        num_steps: int,
    ) -> bool:
        """Fill `draft_tokens[:num_reqs, :num_steps]`.

        Returns:
            False if drafting failed. The failure is counted and logged, and the drafts are token 0 for
            every request: the caller must let the target verify them as drawn from a one-hot draft.
        """
        drafts = self.draft_tokens[: tokens.shape[0], :num_steps]
        try:
            for step in self._views.prepare(block_table, context_lens, num_steps):
                hidden_states = runner.draft_forward(tokens.to(torch.int32), step)
                tokens = runner.draft_sample(hidden_states, step)
                drafts[:, step.index] = tokens
        except Exception:
            if envs.strict():
                raise
            self._failures.count()
            drafts.zero_()
            return False
        return True
