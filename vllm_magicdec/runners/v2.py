# SPDX-License-Identifier: Apache-2.0
"""Adapter to vLLM's V2 model runner (`vllm.v1.worker.gpu`)."""

from typing import Any

import torch
import torch.nn as nn
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_magicdec.drafting import Drafter
from vllm_magicdec.runners.kv_cache import require_one_full_attention_group
from vllm_magicdec.view import DraftStep


class MagicDecSpeculator(StandaloneARSpeculator):
    """A draft-model speculator whose draft model is the target, over a view of the target's KV cache.

    Kept from the base class: request buffers, draft sampling and the forward call. Replaced: loading
    (nothing is loaded), attention metadata (the target's groups over the view) and the draft loop.
    """

    # The draft never re-reads a verified token, so it needs no query slot beyond the target's.
    num_extra_query_per_req = 0

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """The target itself; no attention layer is added."""
        return target_model

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
        target_input_buffers: Any,
        target_attn_groups: Any,
    ) -> None:
        """Called once the KV cache is laid out."""
        require_one_full_attention_group(kv_cache_config)
        super().set_attn(
            model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups
        )
        self._drafter = Drafter(self.vllm_config, block_tables.block_sizes[0], self.device)
        self._query_start_loc_cpu = torch.arange(self.max_num_reqs + 1, dtype=torch.int32)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,  # [num_reqs]
        num_rejected: torch.Tensor,  # [num_reqs]
        last_sampled: torch.Tensor,  # [max_num_reqs]
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,  # [max_num_reqs]
        seeds: torch.Tensor,  # [max_num_reqs]
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Draft for every request of the batch. Returns [num_reqs, gamma] int64."""
        num_reqs = input_batch.num_reqs
        if dummy_run:  # the target's own dummy run has warmed this model up
            return self.draft_tokens[:num_reqs]
        num_steps = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        self._copy_request_inputs(num_reqs, input_batch.idx_mapping, temperature, seeds)
        if num_steps > 0:
            drafted = self._drafter.draft(
                self,
                last_sampled[input_batch.idx_mapping].view(-1),
                self.block_tables.input_block_tables[0][:num_reqs],
                input_batch.seq_lens[:num_reqs].long() - num_rejected[:num_reqs],
                num_steps,
            )
            if not drafted:
                self._make_drafts_one_hot(num_reqs)
        return self._drafter.draft_tokens[:num_reqs]

    def draft_forward(self, tokens: torch.Tensor, step: DraftStep) -> torch.Tensor:
        """See `drafting.Runner`."""
        num_reqs = tokens.shape[0]
        slot_mappings = step.slots.unsqueeze(0)  # one KV cache group
        attn_metadata = build_attn_metadata(
            attn_groups=self.target_attn_groups,
            num_reqs=num_reqs,
            num_tokens=num_reqs,
            query_start_loc_gpu=self.arange_gpu[: num_reqs + 1],
            query_start_loc_cpu=self._query_start_loc_cpu[: num_reqs + 1],
            max_query_len=1,
            seq_lens=step.seq_lens,
            max_seq_len=step.max_seq_len,
            block_tables=[step.block_table],
            slot_mappings=slot_mappings,
            kv_cache_config=self.kv_cache_config,
            positions=step.positions,
            is_prefilling=self.draft_is_prefilling[:num_reqs],
        )
        return self._run_model(
            tokens,
            step.positions,
            attn_metadata,
            build_slot_mappings_by_layer(slot_mappings, self.kv_cache_config),
            num_tokens_across_dp=None,
        )

    def draft_sample(self, hidden_states: torch.Tensor, step: DraftStep) -> torch.Tensor:
        """See `drafting.Runner`."""
        num_reqs = hidden_states.shape[0]
        self.current_draft_step.fill_(step.index)
        return self.sample_draft(
            hidden_states,
            step.positions,
            self.idx_mapping[:num_reqs],
            self.temperature,
            self.seeds,
            self.current_draft_step,
            self.draft_logits,
        )

    def _make_drafts_one_hot(self, num_reqs: int) -> None:
        """Tell the rejection sampler that the drafts are token 0 with certainty."""
        if self.draft_logits is not None:
            rows = self.idx_mapping[:num_reqs]
            self.draft_logits[rows] = float("-inf")
            self.draft_logits[rows, :, 0] = 0.0
