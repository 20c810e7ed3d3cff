# SPDX-License-Identifier: Apache-2.0
"""Adapter to vLLM's V2 model runner (`vllm.v1.worker.gpu`)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_magicdec.attention.metadata import observed_metadata
from vllm_magicdec.attention.observing import LayerObserver
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.drafting.finite import make_finite
from vllm_magicdec.drafting.wide_passes import MAX_WIDE_TOKENS
from vllm_magicdec.errors import METHOD
from vllm_magicdec.lookup.history import History, Texts
from vllm_magicdec.views.round import Batch, Pass, Queries, Sampled, TargetStep
from vllm_magicdec.views.tensors import PAD_SLOT, on_device
from vllm_magicdec.vllm_api import cpu_llvmlite
from vllm_magicdec.vllm_api.attention_groups import find_weakest_graphs
from vllm_magicdec.vllm_api.draft_graphs import DraftGraphs, dummy_step, why_no_draft_graphs
from vllm_magicdec.vllm_api.draft_runner import DraftRunner, without_kv_connector
from vllm_magicdec.vllm_api.embeddings import embed, refuse_more_inputs, takes_embeddings
from vllm_magicdec.vllm_api.rope import positions_on_device
from vllm_magicdec.vllm_api.runner_wrappers import report_removed
from vllm_magicdec.vllm_api.verification_attention import refuse_if_inexact, warn_if_slow

logger = init_logger(f"vllm.{__name__}")


class MagicDecSpeculator(DraftRunner, StandaloneARSpeculator):
    """A speculator whose draft is the target or its copy, over a view of the target's KV cache.

    Inherited: request buffers and draft sampling. Replaced: attention metadata (by layer group, over the
    view), the draft loop, and the draft model, which subclasses in `draft_models_v2.py` load.
    Added: CUDA graphs.
    """

    speculative_config: MagicDecSpeculativeConfig
    # No draft pass has more tokens than the target's step.
    num_extra_query_per_req = 0

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> None:
        super().__init__(vllm_config, device)
        spec = self.speculative_config
        if spec.draft_lookup == "on" and not spec.looks_up_on_device:
            cpu_llvmlite.patch()
            report_removed(req_states, lambda *ended: self._drafter.finish_request(*ended))
        self.req_states = req_states
        self._batch: Batch | None = None
        # By queries and samples of each request in a pass.
        self._graphs: dict[tuple[int | None, int], DraftGraphs] = {}
        self._is_timed = False  # vLLM is measuring the time of dummy rounds
        self._rope: RopeState | None = None  # of targets with M-RoPE
        # The runner returns a step's tokens before it drafts, so vLLM could free the blocks that drafting
        # still writes, and a KV connector could fill them: that is not ordered after the GPU's work.
        transfer = vllm_config.kv_transfer_config
        is_consumer = transfer is not None and transfer.is_kv_consumer
        self._drafts_are_awaited = device.type == "cuda" and is_consumer
        self._takes_embeddings = takes_embeddings(vllm_config.model_config)

    def load_model(self, target_model: nn.Module) -> None:
        """Load the draft model, if the target does not draft for itself."""
        super().load_model(target_model)
        self.supports_mm_inputs = False  # drafts are text: no image inputs to gather
        if self.model is target_model:
            self._take_adapters_of(target_model)

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """Return the drafting model."""
        return self._drafting_model(target_model)

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
        target_input_buffers: Any,
        target_attn_groups: Any,
    ) -> None:
        """Create the drafter, once vLLM has laid out the KV cache."""
        # vLLM may lay out the KV cache twice, to measure memory: free what belongs to the first layout.
        self._graphs, self._is_timed = {}, False
        self._attention_groups = []
        for name in ("_drafter", "page_metadata"):
            self.__dict__.pop(name, None)
        refuse_if_inexact(self.vllm_config, target_attn_groups)
        warn_if_slow(self.vllm_config)
        if self.speculative_config.has_draft_model:  # takes text only
            refuse_more_inputs(self.model)
        else:
            refuse_more_inputs(self.model, model_state)
            self._rope = model_state.rope_state
        self._steps = torch.arange(self.num_speculative_steps, device=self.device)
        self._rope_offsets = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=self.device)
        super().set_attn(
            model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups
        )
        if self.speculative_config.has_draft_model:
            names, builders = self.draft_attn_layer_names, self.attn_groups
        else:
            names, builders = None, target_attn_groups
        self._lay_out(kv_cache_config, names, builders, target_attn_groups)
        if self.speculative_config.looks_up_on_device:
            ones = torch.ones(1, dtype=torch.int64, device=self.device)
            self._drafter.warm_up_lookups(
                Texts(self.req_states.all_token_ids.gpu, self.idx_mapping[:1], ones, max_len=1)
            )
        if self._drafts_are_awaited:
            logger.info_once(
                "%s: every step waits for its drafts, because the KV connector may load into the blocks of "
                "finished requests.",
                METHOD,
            )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Create the managers of the draft's CUDA graphs; called after `set_attn`."""
        if self.device.type == "cuda" and not self.vllm_config.model_config.enforce_eager:
            weakest, _ = find_weakest_graphs(self.target_attn_groups, self.vllm_config)
            if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
                # vLLM captures FlexAttention's verifications, which says nothing about draft steps.
                own, support = find_weakest_graphs(self._attention_groups, self.vllm_config)
                if support.value < AttentionCGSupport.UNIFORM_BATCH.value:
                    weakest, cudagraph_mode = own, CUDAGraphMode.NONE
            reason = why_no_draft_graphs(cudagraph_mode, weakest)
            if reason is not None:
                logger.warning_once("%s: draft steps run without CUDA graphs, slower: %s.", METHOD, reason)
        kinds = [(length, 1) for length in self._queries_of_steps]
        if self.speculative_config.looks_up_on_device:
            kinds += [(length, length) for length in self.speculative_config.round_lengths if length > 1]
        make = partial(
            DraftGraphs,
            self.vllm_config,
            self.device,
            cudagraph_mode,
            self._drafter,
            self.page_metadata,
            self.adapters,
            self.forward_and_sample,
            self.current_draft_step,
        )
        self._graphs = {kind: make(*kind) for kind in kinds}

    def capture(self) -> None:
        """Capture the draft's CUDA graphs, after the target's."""
        try:
            for graphs in self._graphs.values():
                graphs.capture_passes()
        except Exception:
            self._drafter.record_failure("capture")
            self._graphs = {}
            logger.exception("%s: draft steps run without CUDA graphs, slower: capturing failed.", METHOD)
        self._is_timed = self.enable_adaptive_verification  # dummy runs come next

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
        if dummy_run:
            if skip_attn_for_dummy_run:
                self._warm_up(input_batch)
            elif self._is_timed:
                self._copy_request_inputs(
                    num_reqs, input_batch.idx_mapping, temperature, seeds, dummy_run=True
                )
                try:
                    self._draft_dummies(num_reqs)
                except Exception:
                    self._is_timed = False  # larger batches come next
                    self._drafter.record_failure("timing")
                    logger.exception(
                        "%s: adaptive verification underestimates drafts: timing failed.", METHOD
                    )
            return self.draft_tokens[:num_reqs]
        self._is_timed = False
        num_steps = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        self._copy_request_inputs(num_reqs, input_batch.idx_mapping, temperature, seeds)
        if num_steps == 0 and not self._cache.is_own:
            return self._drafter.draft_tokens[:num_reqs]

        def read_batch() -> Batch:
            self._batch = self._make_batch(input_batch, num_rejected, last_sampled)
            taken = slice(input_batch.num_tokens)
            tokens, positions = input_batch.input_ids[taken], input_batch.positions[taken]
            self._note_step(tokens, positions, aux_hidden_states, slot_mappings)
            if self._rope is not None:
                # M-RoPE positions of generated text differ from the index by a constant per request.
                self._rope_offsets.zero_()
                self._rope_offsets[:num_reqs] = self._rope.prefill_delta.gpu[input_batch.idx_mapping]
            return self._batch

        drafts = self._drafter.draft(num_steps, read_batch, self._histories)
        own = self._drafter.draft_tokens[:num_reqs]
        if drafts is None or (not drafts.num_passes and num_steps > 0):
            own[:, :num_steps] = 0
            # Drafts of unfinished prompts are dropped. Others are verified, as certain drafts.
            batch = self._batch
            are_dropped = drafts is not None and batch is not None and all(batch.is_prefilling)
            if not are_dropped:
                self._make_drafts_one_hot(num_reqs)
            # Adaptive verification skips drafts that are unlikely to be accepted; 1 is its default.
            self.draft_token_confidence_probs[:num_reqs] = float(are_dropped)
        elif drafts.lists is not None and num_steps > 0:
            self._fill_up(drafts.lists, num_steps)
        if self._drafts_are_awaited:
            torch.accelerator.current_stream().synchronize()
        return own

    def _warm_up(self, inputs: InputBatch) -> None:
        """Run the draft without KV cache, for vLLM to measure its memory, unless it is the target."""
        if self.speculative_config.has_draft_model or self._copy is not None:
            hidden_states = self.forward(inputs.input_ids, inputs.positions, (), None)
            self.compute_draft_logits(hidden_states[: inputs.num_reqs], 0)

    def _draft_dummies(self, num_reqs: int) -> None:
        """Run the steps of a round over full views, for vLLM's timing."""
        step = dummy_step(self._drafter, num_reqs, self.kv_cache_config.num_blocks, self.device)
        for _ in range(self.num_speculative_steps):
            self.run(step)

    def _make_batch(
        self, batch: InputBatch, num_rejected: torch.Tensor, last_sampled: torch.Tensor
    ) -> Batch:
        num_reqs = batch.num_reqs
        context_lens = batch.seq_lens[:num_reqs].long() - num_rejected[:num_reqs]
        # Upper bounds, as if every scheduled draft had been accepted.
        known_lens = batch.num_computed_tokens_np[:num_reqs] + batch.num_scheduled_tokens[:num_reqs]
        return Batch(
            req_ids=batch.req_ids[:num_reqs],
            tokens=last_sampled[batch.idx_mapping].view(-1),
            block_tables=[table[:num_reqs] for table in self.block_tables.input_block_tables],
            context_lens=context_lens,
            observable_lens=context_lens,
            known_lens=known_lens,
            is_prefilling=known_lens < batch.prefill_len_np[:num_reqs],
            is_first=known_lens == batch.prefill_len_np[:num_reqs],
            step=self._describe_step(batch, known_lens) if self._cache.is_own else None,
        )

    @staticmethod
    def _describe_step(batch: InputBatch, known_lens: np.ndarray) -> TargetStep:
        num_reqs, drafts = batch.num_reqs, batch.num_draft_tokens_per_req
        num_unsure = np.zeros(num_reqs) if drafts is None else drafts[:num_reqs]
        return TargetStep(
            ends=known_lens.astype(np.int64),
            num_tokens=batch.num_scheduled_tokens[:num_reqs].astype(np.int64),
            num_unsure=num_unsure.astype(np.int64),
            has_prompt=np.asarray(batch.is_prefilling_np[:num_reqs], dtype=bool),
            seq_lens=batch.seq_lens[:num_reqs],
            query_starts=batch.query_start_loc[: num_reqs + 1],
        )

    def token_ids(self, indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return verified tokens at positions of the batch's requests, [num_tokens] int32."""
        known = self.req_states.all_token_ids.gpu  # [max_num_reqs, max_model_len] int32
        return known[self.idx_mapping[indices], positions].to(torch.int32)

    def _histories(self, batch: Batch) -> list[History]:
        """Return the requests' tokens. On a CPU."""
        token_ids = self.req_states.all_token_ids.gpu.numpy()
        ends = (batch.context_lens + 1).tolist()
        rows = self.idx_mapping[: len(ends)].tolist()
        return [History(token_ids[row, :end], ()) for row, end in zip(rows, ends, strict=True)]

    def max_wide_reqs(self, num_steps: int) -> int:
        """Maximum number of requests in a pass of a round's `num_steps` tokens; 0: unsupported."""
        if not self.reads_ahead:
            return 0
        if not any(graphs.graphs for graphs in self._graphs.values()):
            return min(self.max_num_tokens, MAX_WIDE_TOKENS) // num_steps
        # An eager pass would be slower than steps with graphs.
        return self._graphs[num_steps, num_steps].max_captured_reqs

    def texts(self, batch: Batch) -> Texts:
        """Return the verified tokens of a round's requests, including those that this step sampled."""
        token_ids = self.req_states.all_token_ids.gpu
        most = min(int(max(batch.known_lens)) + 1, token_ids.shape[1])
        lens = (batch.context_lens + 1).clamp(max=most)
        return Texts(token_ids, self.idx_mapping[: len(batch.req_ids)], lens, most)

    def _fill_up(self, lists: list[list[int]], num_steps: int) -> None:
        """Pad lists of drafts with token 0, as vLLM's runner expects equally many of each request."""
        padded = [[*drafts, *[0] * (num_steps - len(drafts))] for drafts in lists]
        self._drafter.draft_tokens[: len(lists), :num_steps] = torch.tensor(padded)
        for index, drafts in enumerate(lists):
            self._make_drafts_one_hot(index + 1, first=index, first_step=len(drafts))

    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        """Compute logits, finite where the rejection sampler needs a distribution."""
        logits = super().compute_draft_logits(hidden_states, spec_step_idx)
        return logits if self.draft_logits is None else make_finite(logits)

    def note_unchecked(self, request: int, first: int, tokens: Sequence[int]) -> None:
        """Raise: this runner verifies equally many drafts of every request, all from passes."""
        raise AssertionError("this runner does not verify drafts that no pass has sampled")

    def run(self, draft_pass: Pass) -> Sampled:
        """Run a pass of the draft, and sample."""
        queries, num_adapters = draft_pass.queries, 0
        if self.adapters is not None:
            self.adapters.apply(queries.request_indices)
            num_adapters = self.adapters.num_active
        if draft_pass.is_weighed:
            return self._run_weighed(draft_pass)
        graphs = self._graphs.get((queries.uniform_len, queries.num_sampled))
        sampled = None if graphs is None else graphs.replay(draft_pass, num_adapters)
        if sampled is None:
            self.current_draft_step.fill_(queries.first_sampled)
            sampled = self.forward_and_sample(draft_pass, self.page_metadata.of_pass(draft_pass))
        return Sampled(sampled)

    def read(self, draft_pass: Pass) -> None:
        """Run a pass for the K/V alone."""
        self._forward_pass(draft_pass, self.page_metadata.of_pass(draft_pass))

    def _run_weighed(self, draft_pass: Pass) -> Sampled:
        hidden_states = self._forward_pass(draft_pass, self.page_metadata.of_pass(draft_pass))
        sampled, logits, rows = self._sample_each(draft_pass, hidden_states)
        temperature: torch.Tensor | float = 1.0
        if self.draft_logits is not None:
            temperature = self.temperature[rows].unsqueeze(1)
            temperature = temperature.masked_fill(temperature == 0, 1.0)
        log_probs = (logits.float() / temperature).log_softmax(dim=-1)
        return Sampled(sampled, log_probs.gather(1, sampled.unsqueeze(1)).squeeze(1).exp())

    def forward_and_sample(self, draft_pass: Pass, attn_metadata: Mapping[str, Any]) -> torch.Tensor:
        """Run a pass and sample after every query of `Queries.sampled`, [num_sampled] int64."""
        hidden_states = self._forward_pass(draft_pass, attn_metadata)
        queries, length = draft_pass.queries, draft_pass.queries.uniform_len
        if length is None or queries.num_sampled > 1:
            return self._sample_each(draft_pass, hidden_states)[0]
        last = slice(length - 1, None, length)
        return self.sample_draft(
            hidden_states[last].contiguous(),  # as kernels of quantised heads require
            draft_pass.positions[last],
            self.idx_mapping[: len(queries.lens)],
            self.temperature,
            self.seeds,
            self.current_draft_step,
            self.draft_logits,
        )

    def _forward_pass(self, draft_pass: Pass, attn_metadata: Mapping[str, Any]) -> torch.Tensor:
        """Run the drafting model; returns [num_tokens, hidden_size]."""
        positions = draft_pass.positions
        if self._rope is not None:
            if draft_pass.queries.uniform_len == 1:
                offsets = self._rope_offsets[: len(positions)]
            else:
                offsets = self._rope_offsets[self._sources_of(draft_pass.queries)[0]]
            positions = positions + offsets
        slots = [part.slots for part in draft_pass.parts]
        return self.forward(draft_pass.tokens, positions, slots, attn_metadata, draft_pass.is_padding)

    def _sources_of(self, queries: Queries) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each query's index in the batch and step of the round, [num_tokens] int64 each."""
        if queries.uniform_len is None:
            return on_device(queries.request_indices, self.device), on_device(queries.steps, self.device)
        # Without copies from the host, which a CUDA graph cannot record.
        num_reqs, length = len(queries.lens), queries.uniform_len
        steps = self._steps[:length] + int(queries.firsts[0])
        return self.arange_gpu[:num_reqs].long().repeat_interleave(length), steps.repeat(num_reqs)

    def _sample_each(
        self, draft_pass: Pass, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sample after every query of `Queries.sampled`.

        Args:
            hidden_states: [num_tokens, hidden_size], its result.

        Returns:
            [num_sampled] int64 samples, [num_sampled, vocab_size] logits, and [num_sampled] rows of the
            requests in vLLM's request states.
        """
        queries, positions = draft_pass.queries, draft_pass.positions
        indices, steps = self._sources_of(queries)
        if queries.has_verified:
            taken = on_device(queries.sampled, self.device)
            hidden_states, positions = hidden_states[taken], positions[taken]
            indices, steps = indices[taken], steps[taken]
        logits, rows = self.compute_draft_logits(hidden_states, 0), self.idx_mapping[indices]
        if self.draft_logits is None:
            return logits.argmax(dim=-1), logits, rows
        # The noise and the column in the logits cache are those of each token's own step.
        sampled = gumbel_sample(
            logits,
            rows,
            self.temperature,
            self.seeds,
            positions,
            apply_temperature=True,
            is_drafting=True,
            logits_cache=self.draft_logits,
            logits_cache_col=steps,
            use_fp64=self.use_fp64_gumbel,
        )
        return sampled, logits, rows

    def observe(
        self, layer_names: Sequence[str], indices: Sequence[int], window: int, observer: LayerObserver
    ) -> None:
        """Run the target over the last `window` tokens of requests `indices`, with an observer."""
        assert self._batch is not None
        num_reqs = len(indices)
        chosen = on_device(indices, self.device)
        lens = self._batch.observable_lens[chosen]
        positions = lens.unsqueeze(1) + torch.arange(window, device=self.device) - window
        rows = self.idx_mapping[chosen].long().unsqueeze(1)
        tokens = self.req_states.all_token_ids.gpu[rows, positions].flatten().to(torch.int32)
        slots = torch.full((num_reqs * window,), PAD_SLOT, dtype=torch.int64, device=self.device)
        starts = torch.arange(num_reqs + 1, dtype=torch.int32) * window
        attn_metadata = self.page_metadata.of_target(
            [table[chosen] for table in self._batch.block_tables],
            slots,
            positions=positions.flatten(),
            query_start_loc_gpu=self.arange_gpu[: num_reqs + 1] * window,
            query_start_loc_cpu=starts,
            max_query_len=window,
            seq_lens=lens.to(torch.int32),
            max_seq_len=max(int(self._batch.known_lens[i]) for i in indices),
        )
        observed = observed_metadata(attn_metadata, layer_names, self._drafter.switched_layers, observer)
        if self.adapters is not None:
            self.adapters.apply(indices, window)
        if self._rope is None:
            positions = positions.flatten()
        else:
            prompt_lens = self.req_states.prefill_len.gpu[rows]
            positions = positions_on_device(self._rope, rows, positions, prompt_lens)
        self.forward(tokens, positions, [slots] * len(self._drafter.groups), observed)

    def forward(
        self,
        tokens: torch.Tensor,  # [num_tokens] int32
        positions: torch.Tensor,  # [num_tokens] int64, or [num_dims, num_tokens] under M-RoPE
        slots: Sequence[torch.Tensor],  # [num_tokens] int64 each, destination of K/V, by layer group
        attn_metadata: Mapping[str, Any] | None,  # by layer; None: there is no KV cache yet, and no slots
        is_padding: torch.Tensor | None = None,  # see `Pass`; vLLM chooses no experts for padding
    ) -> Any:
        """Run the drafting model; returns [num_tokens, hidden_size], a SPIRe draft also its activations."""
        num_tokens = tokens.shape[0]
        if self._rope is not None:
            # Compiled code expects the strides of the runner's buffer.
            self._rope.positions[:, :num_tokens] = positions
            positions = self._rope.positions[:, :num_tokens]
        inputs: dict[str, torch.Tensor | None] = {"input_ids": tokens}
        if self._takes_embeddings:
            inputs = {"input_ids": None, "inputs_embeds": embed(self.model, tokens, self.vocab_size)}
        with (
            without_kv_connector(),
            set_forward_context(
                attn_metadata,
                self.vllm_config,
                num_tokens=num_tokens,
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                slot_mapping=self._slots_by_layer(slots) if slots else {},
                batch_descriptor=BatchDescriptor(num_tokens=num_tokens),
                is_padding=is_padding,
            ),
        ):
            return self.model(positions=positions, **inputs)

    def _make_drafts_one_hot(self, end: int, *, first: int = 0, first_step: int = 0) -> None:
        """Set the draft distribution to token 0 with certainty, for requests `first` to `end` of the batch
        from `first_step` on.
        """
        if self.draft_logits is not None:
            rows = self.idx_mapping[first:end].long()
            # Assigning a number by index would wait for the device.
            self.draft_logits[:, first_step:].index_fill_(0, rows, float("-inf"))
            self.draft_logits[:, first_step:, 0].index_fill_(0, rows, 0.0)
