# SPDX-License-Identifier: Apache-2.0
"""Adapter to vLLM's V1 model runner on CPUs (`CPUModelRunner`), where scheduling is synchronous."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_magicdec.attention.metadata import observed_metadata
from vllm_magicdec.attention.observing import LayerObserver
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.drafting.finite import make_finite
from vllm_magicdec.lookup.history import History
from vllm_magicdec.views.round import Batch, Pass, Queries, Sampled, TargetStep
from vllm_magicdec.views.tensors import PAD_SLOT
from vllm_magicdec.vllm_api import cpu_llvmlite, cpu_sampling
from vllm_magicdec.vllm_api.draft_runner import DraftRunner, without_kv_connector
from vllm_magicdec.vllm_api.embeddings import (
    blank_embedded_prompts,
    embed,
    refuse_more_inputs,
    takes_embeddings,
)
from vllm_magicdec.vllm_api.rope import positions_on_host
from vllm_magicdec.vllm_api.runner_wrappers import bypass_rejection_sampler, report_finished
from vllm_magicdec.vllm_api.verification_attention import refuse_if_inexact


class MagicDecProposer(DraftRunner, DraftModelProposer):
    """A proposer whose draft is the target or its copy, over a view of the target's KV cache.

    Inherited: the padded-batch bookkeeping of rejected tokens, draft sampling and attention groups.
    Replaced: the draft loop, and the draft model, which subclasses in `draft_models_v1.py` load.
    """

    speculative_config: MagicDecSpeculativeConfig

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, device=device, runner=runner)
        cpu_sampling.patch()
        cpu_sampling.rewind_generators(runner)
        if self.speculative_config.draft_lookup == "on":
            cpu_llvmlite.patch()
            report_finished(runner, lambda *finished: self._drafter.finish_request(*finished))
        self.target_runner = runner
        if self.speculative_config.adaptive:
            self._bypass_rejection_sampler()
        self.supports_mm_inputs = False  # drafts are text: no image inputs to gather
        # Of the round, with the target's sampling parameters.
        self._target_token_ids: torch.Tensor  # [num_tokens] int32, inputs of the target's step
        self._step_offsets: torch.Tensor  # [num_reqs] int64, index of a token in them less its position
        self._batch: Batch
        self._sampling: SamplingMetadata
        self._draft_probs: list[torch.Tensor] = []  # gamma x [num_reqs, vocab_size]

    def _bypass_rejection_sampler(self) -> None:
        bypass_rejection_sampler(self.target_runner)

    def _raise_if_mrope(self) -> None:
        """Accept M-RoPE: this draft takes the target's positions."""

    def _warn_if_multimodal(self) -> None:
        """Do not warn: drafts are text, and the prompt's images are in the KV cache."""

    def load_model(self, target_model: nn.Module) -> None:
        """Take the target or its copy as the draft."""
        refuse_more_inputs(target_model)
        self.model = self._drafting_model(target_model)
        self._draft_attn_layer_names = set()  # its attention layers are the target's
        self._take_adapters_of(target_model)

    def initialize_attn_backend(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int] | None = None
    ) -> None:
        """Create the drafter, once vLLM has laid out the KV cache."""
        refuse_if_inexact(self.vllm_config, self.target_runner.attn_groups)
        names = self._draft_attn_layer_names or None
        target_groups = self.target_runner.attn_groups
        self._lay_out(kv_cache_config, names, target_groups, target_groups)
        if self.speculative_config.draft_lookup == "on" or self._cache.is_own:
            # vLLM's runner drafts for no request when one nears the model's maximum length. A draft's own
            # cache would fall behind, and rounds with lookups draft as much as each request has room for.
            runner = self.target_runner
            runner.effective_drafter_max_model_len = runner.max_model_len + self.num_speculative_tokens

    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Run the draft, unless it is the target, which has a dummy run of its own."""
        if self.speculative_config.has_draft_model or self._copy is not None:
            super().dummy_run(num_tokens, *args, **kwargs)

    @override
    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: dict[str, CachedRequestState],
        gpu_input_batch: InputBatch,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if gpu_input_batch.req_prompt_embeds:
            requests = blank_embedded_prompts(requests, gpu_input_batch)
        return super().prepare_next_token_ids_padded(
            sampled_token_ids, requests, gpu_input_batch, discard_request_mask
        )

    @torch.inference_mode()
    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,  # [num_reqs] int32
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,  # [num_reqs] int32
        slot_mappings: Any = None,
    ) -> torch.Tensor | list[list[int]]:
        """Draft for every request of the batch.

        Returns:
            [num_reqs, num_speculative_tokens] int64; with lookups or after a failure a list per request.
        """
        num_reqs = next_token_ids.shape[0]
        self._last_draft_probs = None
        self._draft_probs.clear()
        if num_speculative_tokens == 0 and not self._cache.is_own:
            return self._drafter.draft_tokens[:num_reqs, :0]

        self._sampling, self._target_token_ids = sampling_metadata, target_token_ids

        def read_batch() -> Batch:
            ends = common_attn_metadata.query_start_loc_cpu[1 : num_reqs + 1]
            self._step_offsets = (ends - common_attn_metadata.seq_lens[:num_reqs]).long()
            context_lens = common_attn_metadata.seq_lens[:num_reqs].long()
            if num_rejected_tokens_gpu is not None:
                context_lens -= num_rejected_tokens_gpu[:num_reqs]
            self._batch = self._make_batch(next_token_ids, context_lens, common_attn_metadata)
            self._note_step(target_token_ids, target_positions, target_hidden_states, slot_mappings)
            if self.adapters is not None:
                self.adapters.take(self.target_runner.input_batch.request_lora_mapping[:num_reqs])
            if self.uses_mrope:
                requests = [self.target_runner.requests[req_id] for req_id in self._batch.req_ids]
                self._rope_offsets = torch.tensor([own.mrope_position_delta for own in requests])
            return self._batch

        drafts = self._drafter.draft(num_speculative_tokens, read_batch, self._histories)
        if drafts is None:
            return [[] for _ in range(num_reqs)]  # nothing to verify
        used = len(self._draft_probs) if drafts.lists is None else max(map(len, drafts.lists))
        if self._draft_probs and used:
            self._last_draft_probs = torch.stack(self._draft_probs[:used], dim=1).contiguous()
        return drafts.tokens

    def _make_batch(
        self, tokens: torch.Tensor, context_lens: torch.Tensor, common: CommonAttentionMetadata
    ) -> Batch:
        """Return the round's requests; `common` is the metadata of the target's step."""
        num_reqs = tokens.shape[0]
        inputs = self.target_runner.input_batch
        # Without the tokens that this step sampled.
        known_lens = inputs.num_tokens_no_spec[:num_reqs].astype(np.int64)
        return Batch(
            req_ids=inputs.req_ids[:num_reqs],
            tokens=tokens,
            block_tables=[table.get_device_tensor(num_reqs) for table in inputs.block_table.block_tables],
            context_lens=context_lens,
            observable_lens=torch.from_numpy(known_lens),
            known_lens=known_lens,
            is_prefilling=self.target_runner.discard_request_mask.np[:num_reqs],
            is_first=known_lens == inputs.num_prompt_tokens[:num_reqs],
            step=self._describe_step(context_lens, common, known_lens) if self._cache.is_own else None,
        )

    def _describe_step(
        self, context_lens: torch.Tensor, common: CommonAttentionMetadata, known_lens: np.ndarray
    ) -> TargetStep:
        """Describe the target's step, whose result is known on a CPU."""
        num_reqs = len(known_lens)
        seq_lens, query_starts = common.seq_lens[:num_reqs], common.query_start_loc_cpu[: num_reqs + 1]
        starts = (seq_lens - query_starts.diff()).numpy()
        ends = context_lens.numpy()
        return TargetStep(
            ends=ends,
            num_tokens=ends - starts,
            num_unsure=np.zeros(num_reqs, dtype=np.int64),
            has_prompt=known_lens > starts + 1,
            seq_lens=seq_lens,
            query_starts=query_starts,
        )

    def token_ids(self, indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return verified tokens at positions of the batch's requests, [num_tokens] int32."""
        step = self._batch.step
        assert step is not None
        known = self.target_runner.input_batch.token_ids_cpu_tensor[indices, positions]
        of_step = (positions + self._step_offsets[indices]).clamp(0, len(self._target_token_ids) - 1)
        is_old = positions < step.starts[indices]
        return torch.where(is_old, known, self._target_token_ids[of_step]).to(torch.int32)

    def _histories(self, batch: Batch) -> list[History]:
        """Return the requests' tokens, including those that vLLM has not recorded yet. On a CPU."""
        known, of_step = self.target_runner.input_batch.token_ids_cpu, self._target_token_ids
        starts = (batch.observable_lens + self._step_offsets).tolist()
        ends = (batch.context_lens + self._step_offsets).tolist()
        # The accepted drafts and the token sampled after them.
        latest = [
            [*of_step[start:end].tolist(), token]
            for start, end, token in zip(starts, ends, batch.tokens.tolist(), strict=True)
        ]
        return [
            History(known[index, :length], tokens)
            for index, (length, tokens) in enumerate(zip(batch.known_lens, latest, strict=True))
        ]

    def run(self, draft_pass: Pass) -> Sampled:
        """Run a pass of the draft, and sample."""
        queries = draft_pass.queries
        rows = queries.request_indices
        if self.adapters is not None:
            self.adapters.apply(rows)
        hidden_states = self._forward(draft_pass)
        if queries.has_verified:
            rows = rows[queries.sampled]
            hidden_states = hidden_states[queries.sampled]
        sampling = self._sampling
        if sampling.temperature is not None:
            sampling = replace(sampling, temperature=sampling.temperature[rows])
        if not draft_pass.is_weighed:
            drafted, probs = self._sample_draft_tokens(hidden_states, sampling)
            self._note_probs(queries, probs)
            return Sampled(drafted)
        logits = self.model.compute_logits(hidden_states)
        drafted, probs = self._sample_from_logits(logits, sampling)
        self._note_probs(queries, probs)
        probs = logits.float().softmax(dim=1) if probs is None else probs
        return Sampled(drafted, probs.gather(1, drafted.long().unsqueeze(1)).squeeze(1))

    def read(self, draft_pass: Pass) -> None:
        """Run a pass for the K/V alone."""
        self._forward(draft_pass)

    def note_unchecked(self, request: int, first: int, tokens: Sequence[int]) -> None:
        """Record that a request's last drafts were looked up, which the draft proposes with certainty."""
        if not self._draft_probs:  # greedy drafts
            return
        self._draft_probs += [
            torch.zeros_like(self._draft_probs[0])
            for _ in range(first + len(tokens) - len(self._draft_probs))
        ]
        for probs, token in zip(self._draft_probs[first:], tokens, strict=False):
            probs[request] = 0.0  # a pass may have sampled at this step
            probs[request, token] = 1.0

    def _sample_from_logits(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Without NaN and infinite logits, which the rejection sampler does not handle.
        if self._enable_probabilistic_draft_probs:
            make_finite(logits)
        return super()._sample_from_logits(logits, sampling_metadata)

    def _note_probs(self, queries: Queries, probs: torch.Tensor | None) -> None:
        """Record a pass's draft probabilities, [num_sampled, vocab_size]; later passes may repeat steps."""
        if probs is None:
            return
        if queries.num_sampled == 1 and queries.uniform_len is not None:
            self._draft_probs.append(probs)
            return
        steps, indices = queries.steps[queries.sampled], queries.request_indices[queries.sampled]
        num_reqs, vocab_size = len(self._batch.req_ids), probs.shape[1]
        self._draft_probs += [
            probs.new_zeros(num_reqs, vocab_size)
            for _ in range(int(steps.max()) + 1 - len(self._draft_probs))
        ]
        for step in np.unique(steps).tolist():
            taken = np.flatnonzero(steps == step)
            self._draft_probs[step][indices[taken]] = probs[taken]

    def _forward(self, draft_pass: Pass) -> torch.Tensor:
        """Run a pass; returns the hidden states of its queries, [num_tokens, hidden_size]."""
        queries, positions = draft_pass.queries, draft_pass.positions
        if self.uses_mrope:  # positions of generated text differ from the index by a constant per request
            positions = positions + self._rope_offsets[queries.request_indices]
        slots = [part.slots for part in draft_pass.parts]
        return self.forward(draft_pass.tokens, positions, slots, self.page_metadata.of_pass(draft_pass))

    def forward(
        self,
        tokens: torch.Tensor,  # [num_tokens] int32
        positions: torch.Tensor,  # [num_tokens] int64, or [num_dims, num_tokens] under M-RoPE
        slots: Sequence[torch.Tensor],  # [num_tokens] int64 each, destination of K/V, by layer group
        attn_metadata: Mapping[str, Any],  # by layer
    ) -> Any:
        """Run the draft; returns [num_tokens, hidden_size], a SPIRe draft also its activations."""
        num_tokens, model_config = len(tokens), self.vllm_config.model_config
        # In vLLM's buffers, whose strides and alignment the compiled model expects.
        inputs: dict[str, torch.Tensor | None]
        if takes_embeddings(model_config):
            embeddings = embed(self.model, tokens, model_config.get_vocab_size())
            inputs = {"input_ids": None, "inputs_embeds": self.inputs_embeds[:num_tokens].copy_(embeddings)}
        else:
            inputs = {"input_ids": self.input_ids[:num_tokens].copy_(tokens), "inputs_embeds": None}
        own_positions = self._get_positions(num_tokens).copy_(positions)
        _, _, num_across_dp = self._determine_batch_execution_and_padding(num_tokens, use_cudagraphs=False)
        with (
            without_kv_connector(),
            set_forward_context(
                attn_metadata,
                self.vllm_config,
                num_tokens=num_tokens,
                num_tokens_across_dp=num_across_dp,
                slot_mapping=self._slots_by_layer(slots),
            ),
        ):
            return self.model(positions=own_positions, **inputs)

    def observe(
        self, layer_names: Sequence[str], indices: Sequence[int], window: int, observer: LayerObserver
    ) -> None:
        """Run the target over the last `window` tokens of requests `indices`, with an observer."""
        requests, known_lens = np.asarray(indices), np.asarray(self._batch.known_lens)
        queries = Queries(requests, np.full_like(requests, -window), np.full_like(requests, window))
        rows, lens = queries.request_indices, known_lens[requests]
        positions = known_lens[rows] + queries.steps
        slots = torch.full((len(rows),), PAD_SLOT, dtype=torch.int64)
        starts = torch.from_numpy(queries.starts)
        attn_metadata = self.page_metadata.of_target(
            [table[requests] for table in self._batch.block_tables],
            slots,
            positions=torch.from_numpy(positions),
            query_start_loc_gpu=starts,
            query_start_loc_cpu=starts,
            max_query_len=window,
            seq_lens=torch.from_numpy(lens).int(),
            max_seq_len=int(lens.max()),
        )
        if self.adapters is not None:
            self.adapters.apply(indices, window)
        query_positions = torch.from_numpy(positions)
        if self.uses_mrope:
            of_batch = [self.target_runner.requests[self._batch.req_ids[index]] for index in indices]
            query_positions = positions_on_host(of_batch, positions.reshape(-1, window))
        self.forward(
            torch.from_numpy(self.target_runner.input_batch.token_ids_cpu[rows, positions]),
            query_positions,
            [slots] * len(self._drafter.groups),
            observed_metadata(attn_metadata, layer_names, self._drafter.switched_layers, observer),
        )
