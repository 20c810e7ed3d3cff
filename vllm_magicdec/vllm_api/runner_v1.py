# SPDX-License-Identifier: Apache-2.0
"""Adapter to vLLM's V1 model runner (`GPUModelRunner`, `CPUModelRunner`)."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.utils import AttentionGroup

from vllm_magicdec.adaptive.metrics import Counts
from vllm_magicdec.attention.metadata import draft_metadata, observed_metadata
from vllm_magicdec.attention.observing import LayerObserver
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.drafting.drafter import Drafter
from vllm_magicdec.drafting.finite import make_finite
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.lookup.history import History
from vllm_magicdec.views.round import Batch, PageView, Pass, Queries, Sampled
from vllm_magicdec.views.tensors import PAD_SLOT, on_device
from vllm_magicdec.vllm_api import cpu_attention, cpu_llvmlite, cpu_sampling
from vllm_magicdec.vllm_api.adapters import Adapters
from vllm_magicdec.vllm_api.attention_groups import attention_groups_of, refuse_split_pages
from vllm_magicdec.vllm_api.drafts_v1 import Draft, ModelDraft, TargetDraft, draft_beyond_the_end
from vllm_magicdec.vllm_api.embeddings import blank_embedded_prompts
from vllm_magicdec.vllm_api.kv_cache import layer_groups
from vllm_magicdec.vllm_api.rope import positions_on_host
from vllm_magicdec.vllm_api.spire_draft_v1 import SpireDraft
from vllm_magicdec.vllm_api.verification_attention import refuse_if_inexact, warn_if_slow


def bypass_rejection_sampler(runner: Any, on_plain_step: Callable[[SchedulerOutput], None] | None) -> None:
    """Skip the rejection sampler on steps without draft tokens.

    With speculation configured, vLLM 0.32 sends every step through the rejection sampler and the padding of
    rejected tokens, 7 to 11 % of a short step on a CPU. It does so if `speculative_config` is set, which
    this hides during plain steps.

    Args:
        runner: a `GPUModelRunner` (or `CPUModelRunner`) under construction.
        on_plain_step: called after each such step; steps with prompt tokens then go to the proposer.
    """
    speculative_config, execute_model = runner.speculative_config, runner.execute_model

    @functools.wraps(execute_model)
    def execute(scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        verifies = bool(scheduler_output.scheduled_spec_decode_tokens)
        drafts = scheduler_output.num_spec_tokens_to_schedule > 0
        num_reqs = len(scheduler_output.num_scheduled_tokens)
        has_prompt = on_plain_step is not None and scheduler_output.total_num_scheduled_tokens > num_reqs
        is_plain = not (verifies or drafts or has_prompt)
        # Kept until the next step: the second half of this one, `sample_tokens`, reads it too.
        runner.speculative_config = None if is_plain else speculative_config
        output = execute_model(scheduler_output, *args, **kwargs)
        if is_plain and on_plain_step is not None:
            on_plain_step(scheduler_output)
        return output

    runner.execute_model = execute


def report_finished(runner: Any, on_finish: Callable[[str, Sequence[int]], None]) -> None:
    """Report finished requests with their answers before a V1 runner drops them.

    Args:
        runner: as for `bypass_rejection_sampler`.
        on_finish: called with a request's id and all tokens verified after its prompt, including those
            beyond the answer's end; in the same order on all tensor-parallel ranks.
    """
    execute_model = runner.execute_model

    @functools.wraps(execute_model)
    def execute(scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        for req_id in sorted(scheduler_output.finished_req_ids):
            if req_id in runner.requests:  # else it finished before its first step
                on_finish(req_id, runner.requests[req_id].output_token_ids)
        return execute_model(scheduler_output, *args, **kwargs)

    runner.execute_model = execute


class MagicDecProposer(DraftModelProposer):
    """A draft-model proposer whose draft attends to a view of a KV cache, the target's or its own.

    Inherited: the padded-batch bookkeeping of rejected tokens, draft sampling, attention groups and
    CUDA-graph dispatch. Replaced: the draft loop, and loading where the target drafts for itself.
    """

    speculative_config: MagicDecSpeculativeConfig

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, device=device, runner=runner)
        if device.type == "cpu":
            cpu_sampling.patch()
            cpu_sampling.rewind_generators(runner)
            cpu_attention.patch()
        if self.speculative_config.draft_lookup == "on":
            cpu_llvmlite.patch()
            report_finished(runner, lambda *finished: self._drafter.finish_request(*finished))
        self.target_runner = runner
        self._drafting: Draft
        if self.speculative_config.spire is not None:
            self._drafting = SpireDraft(self)
        elif self.speculative_config.has_draft_model:
            self._drafting = ModelDraft(self)
        else:
            self._drafting = TargetDraft(self)
        if self.speculative_config.adaptive and self._drafting.may_lag:
            follows = self._drafting.follows_plain_steps
            bypass_rejection_sampler(runner, self._follow_plain_step if follows else None)
        self.supports_mm_inputs = False  # drafts are text: no image inputs to gather
        self._drafter: Drafter  # created when the KV cache's page size is known
        # Of the round: metadata that all passes share, requests, and the target's sampling parameters.
        self.common: CommonAttentionMetadata
        self._batch: Batch
        self._sampling: SamplingMetadata
        self._adapters: Adapters | None = None
        self._draft_probs: list[torch.Tensor] = []  # gamma x [num_reqs, vocab_size]

    def _follow_plain_step(self, scheduler_output: SchedulerOutput) -> None:
        self._drafter.follow_plain_step(lambda: self._drafting.note_plain_step(scheduler_output))

    def _raise_if_mrope(self) -> None:
        """Accept M-RoPE: this draft takes the target's positions."""

    def _warn_if_multimodal(self) -> None:
        """Do not warn: drafts are text, and the prompt's images are in the KV cache."""

    @property
    def counts(self) -> Counts:
        """This worker's counts since they were last sent."""
        return self._drafter.counts

    @property
    def groups(self) -> Sequence[LayerGroup]:
        """The draft's attention layers."""
        return self._drafter.groups

    @property
    def attention_groups(self) -> Sequence[Sequence[AttentionGroup]]:
        """vLLM's attention groups, with their builders, by layer group."""
        return self._attention_groups

    @property
    def has_adapters(self) -> bool:
        """Whether the draft applies requests' LoRA adapters."""
        return self._adapters is not None

    def num_latest(self, num_steps: int) -> int:
        """Return `Drafter.num_latest`."""
        return self._drafter.num_latest(num_steps)

    def load_model(self, target_model: nn.Module) -> None:
        """Load the draft model, if the target does not draft for itself."""
        self._draft_attn_layer_names = self._drafting.load(target_model)
        # vLLM's adapters apply to the target only.
        if self.vllm_config.lora_config is not None and self.model is target_model:
            self._adapters = Adapters(target_model, self.vllm_config.lora_config)

    def initialize_attn_backend(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int] | None = None
    ) -> None:
        """Create the drafter, once vLLM has laid out the KV cache."""
        refuse_if_inexact(self.vllm_config, self.target_runner.attn_groups)
        warn_if_slow(self.vllm_config)
        groups = layer_groups(self.vllm_config, kv_cache_config, self._draft_attn_layer_names)
        # vLLM may lay out the KV cache twice, to measure memory: free the first drafter's buffers.
        self.__dict__.pop("_drafter", None)
        self._attention_groups, self.draft_attn_groups = [], []
        # vLLM's class shares a builder between layers that differ in windows and caches.
        self._attention_groups = [
            attention_groups_of(
                group,
                self.target_runner.attn_groups,
                self.vllm_config,
                self.device,
                # vLLM's drafts have separate builders, but each of MLA's allocates a workspace.
                share_builders=self.vllm_config.model_config.use_mla,
            )
            for group in groups
        ]
        self._drafting.lay_out(kv_cache_config, groups)
        self.draft_attn_groups = [own for of_view in self._attention_groups for own in of_view]
        num_groups, num_tokens = len(groups), self._slot_mapping_buffer.shape[0]
        self._slots = self._slot_mapping_buffer.new_full((num_groups, num_tokens), PAD_SLOT)
        self._drafter = Drafter(
            self,
            self.vllm_config,
            groups,
            kv_cache_config,
            self.device,
            own_cache=self._drafting.own_cache,
        )
        if self._drafter.has_pages:
            refuse_split_pages(self._attention_groups, are_of_layers=self._drafter.has_layer_pages)
        if self.speculative_config.draft_lookup == "on":
            # A round with lookups drafts as much for each request as it has room for.
            draft_beyond_the_end(self)

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """Warm up or capture the draft model, if there is one."""
        self._drafting.warm_up(*args, **kwargs)

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
            [num_reqs, num_speculative_tokens] int64; with lookups or after a failure a list per request,
            which vLLM's runner accepts under synchronous scheduling.
        """
        num_reqs = next_token_ids.shape[0]
        self._last_draft_probs = None
        self._draft_probs.clear()
        if num_speculative_tokens == 0 and self._drafting.own_cache is None:
            return self._drafter.draft_tokens[:num_reqs, :0]

        self._sampling = sampling_metadata

        def read_batch() -> Batch:
            self.common = self._with_one_query_each(common_attn_metadata, num_reqs)
            context_lens = common_attn_metadata.seq_lens[:num_reqs].long()
            if num_rejected_tokens_gpu is not None:
                context_lens -= num_rejected_tokens_gpu[:num_reqs]
            self._batch = self._make_batch(next_token_ids, context_lens)
            self._drafting.note_step(common_attn_metadata, target_token_ids)
            self._drafting.note_activations(target_positions, target_hidden_states, slot_mappings)
            if self._adapters is not None:
                self._adapters.take(self.target_runner.input_batch.request_lora_mapping[:num_reqs])
            if self.uses_mrope:
                self._rope_offsets = on_device(
                    [
                        self.target_runner.requests[req_id].mrope_position_delta
                        for req_id in self._batch.req_ids
                    ],
                    self.device,
                )
            return self._batch

        drafted = self._drafter.draft(
            num_reqs,
            num_speculative_tokens,
            read_batch,
            lambda batch: self._histories(batch, common_attn_metadata, target_token_ids),
        )
        if drafted and self._draft_probs:
            lists = self._drafter.draft_lists
            used = len(self._draft_probs) if lists is None else max(map(len, lists))
            if used:
                self._last_draft_probs = torch.stack(self._draft_probs[:used], dim=1).contiguous()
        if num_speculative_tokens and self._drafter.draft_lists is not None:
            return self._drafter.draft_lists
        if not drafted and not self.target_runner.use_async_scheduling:
            return [[] for _ in range(num_reqs)]  # nothing to verify
        # A copy: under asynchronous scheduling the next round may start before this one is read.
        return self._drafter.draft_tokens[:num_reqs, :num_speculative_tokens].clone()

    def _with_one_query_each(
        self, common: CommonAttentionMetadata, num_reqs: int
    ) -> CommonAttentionMetadata:
        return common.replace(
            query_start_loc=self.arange[: num_reqs + 1],
            query_start_loc_cpu=torch.from_numpy(self.token_arange_np[: num_reqs + 1]),
            num_reqs=num_reqs,
            num_actual_tokens=num_reqs,
            max_query_len=1,
            seq_lens_cpu_upper_bound=None,
            mm_req_doc_ranges=None,
            rswa_prefix_lens=None,
            is_prefilling=None,
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )

    def _make_batch(self, tokens: torch.Tensor, context_lens: torch.Tensor) -> Batch:
        num_reqs = tokens.shape[0]
        inputs = self.target_runner.input_batch
        # Without the tokens that this step sampled.
        known_lens = inputs.num_tokens_no_spec[:num_reqs].astype(np.int64)
        return Batch(
            req_ids=inputs.req_ids[:num_reqs],
            tokens=tokens,
            block_tables=[table.get_device_tensor(num_reqs) for table in inputs.block_table.block_tables],
            context_lens=context_lens,
            observable_lens=torch.from_numpy(known_lens).to(self.device, non_blocking=True),
            known_lens=known_lens,
            is_prefilling=self.target_runner.discard_request_mask.np[:num_reqs],
            is_first=known_lens == inputs.num_prompt_tokens[:num_reqs],
        )

    def _histories(
        self,
        batch: Batch,
        common: CommonAttentionMetadata,  # of the target's step
        target_token_ids: torch.Tensor,  # [num_tokens] int32, input of the target's step
    ) -> list[History]:
        """Return the requests' tokens, including those that vLLM has not recorded yet. On a CPU."""
        inputs, ends = self.target_runner.input_batch, batch.context_lens.tolist()
        # Index of a token in the step = its position - its request's offset.
        offsets = (common.seq_lens[: len(ends)] - common.query_start_loc_cpu[1 : len(ends) + 1]).tolist()
        return [
            History(
                inputs.token_ids_cpu[index, :known],
                # The accepted drafts and the token sampled after them.
                [*target_token_ids[known - offset : end - offset].tolist(), token],
            )
            for index, (known, end, offset, token) in enumerate(
                zip(batch.known_lens, ends, offsets, batch.tokens.tolist(), strict=True)
            )
        ]

    def run(self, draft_pass: Pass) -> Sampled:
        """Run a pass of the draft, and sample."""
        draft_pass = self._drafting.extend(draft_pass)
        queries, device = draft_pass.queries, self.device
        if self._adapters is not None:
            self._adapters.apply(queries.request_indices)
        hidden_states = self._forward(draft_pass)
        self._drafting.note_caught_up(queries)
        places = queries.request_indices
        if queries.firsts.min() < 0:
            places = places[queries.sampled]
            hidden_states = hidden_states[on_device(queries.sampled, device)]
        sampling = self._sampling if queries.uniform_len else self._sampling_of(places)
        if not draft_pass.is_weighed:
            drafted, probs = self._sample_draft_tokens(hidden_states, sampling)
            self._note_probs(queries, probs)
            return Sampled(drafted)
        logits = self.model.compute_logits(hidden_states)
        drafted, probs = self._sample_from_logits(logits, sampling)
        self._note_probs(queries, probs)
        if probs is None:
            return Sampled(drafted, _probabilities(logits, drafted))
        return Sampled(drafted, probs.gather(1, drafted.unsqueeze(1)).squeeze(1))

    @property
    def max_pass_tokens(self) -> int:
        """Maximum number of query tokens in a pass."""
        return int(self._slots.shape[1]) - self._drafting.num_catch_up_tokens

    @property
    def reads_ahead(self) -> bool:
        """Whether a pass may take several unverified tokens of a request."""
        return self._drafting.reads_ahead

    def note_unread(self, request: int, first: int, tokens: Sequence[int]) -> None:
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

    def _sampling_of(self, indices: np.ndarray) -> SamplingMetadata:
        """Return sampling metadata by query token; `indices` [num_tokens] of requests in the batch."""
        temperature = self._sampling.temperature
        if temperature is None:
            return self._sampling
        return replace(self._sampling, temperature=temperature[on_device(indices, self.device)])

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
            requests = on_device(indices[taken], self.device)
            self._draft_probs[step][requests] = probs[on_device(taken, self.device)]

    def _forward(self, draft_pass: Pass) -> torch.Tensor:
        """Run a pass; returns the hidden states of its queries, [num_tokens, hidden_size]."""
        queries, positions = draft_pass.queries, draft_pass.positions
        if self.uses_mrope:  # positions of generated text differ from the index by a constant per request
            positions = positions + self._rope_offsets[on_device(queries.request_indices, self.device)]
        starts = torch.from_numpy(queries.starts)
        common = self.common.replace(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            num_reqs=len(queries.lens),
            num_actual_tokens=len(draft_pass.tokens),
            max_query_len=int(queries.lens.max()),
        )
        attn_metadata: dict[str, Any] = {}
        for part, group, attention_groups in zip(
            draft_pass.parts, self.groups, self._attention_groups, strict=True
        ):
            of_pages = functools.partial(
                _page_metadata, common, part.slots, attention_groups, queries.first_sampled
            )
            attn_metadata |= draft_metadata(part.view, group.layer_names, of_pages)
        slots = [part.slots for part in draft_pass.parts]
        return self._drafting.forward(draft_pass.tokens, positions, slots, attn_metadata)

    def whole_metadata(
        self,
        tables: Sequence[torch.Tensor],  # [num_reqs, max_pages] int32 each, by layer group
        common: CommonAttentionMetadata,  # of the queries
        slots: Sequence[torch.Tensor],  # [num_tokens] int64 each, by layer group
    ) -> dict[str, Any]:
        """Build attention metadata, by layer, for a draft pass over all cached pages of some requests."""
        attn_metadata: dict[str, Any] = {}
        for table, own, attention_groups in zip(tables, slots, self._attention_groups, strict=True):
            of_group = common.replace(block_table_tensor=table, slot_mapping=own)
            for attention_group in attention_groups:
                built = attention_group.build_metadata(of_group)
                attn_metadata |= dict.fromkeys(attention_group.layer_names, built)
        return attn_metadata

    def observe(
        self, layer_names: Sequence[str], indices: Sequence[int], window: int, observer: LayerObserver
    ) -> None:
        """Run the target over the last `window` tokens of requests `indices`, with an observer."""
        num_reqs = len(indices)
        lens = np.asarray(self._batch.known_lens)[indices]
        positions_by_req = lens[:, None] - window + np.arange(window)
        positions, rows = positions_by_req.ravel(), np.repeat(indices, window)
        # Under asynchronous scheduling the host has -1 for tokens that only the device knows yet.
        tokens = self.target_runner.input_batch.token_ids_cpu[rows, positions].clip(min=0)
        slots = torch.full((num_reqs * window,), PAD_SLOT, dtype=torch.int64, device=self.device)
        common = self.common.replace(
            query_start_loc=self.arange[: num_reqs + 1] * window,
            query_start_loc_cpu=torch.arange(num_reqs + 1, dtype=torch.int32) * window,
            num_reqs=num_reqs,
            num_actual_tokens=num_reqs * window,
            max_query_len=window,
            seq_lens=on_device(lens, self.device).to(torch.int32),
            max_seq_len=int(lens.max()),
            slot_mapping=slots,
        )
        attn_metadata: dict[str, Any] = {}
        for table, attention_groups in zip(
            self._batch.block_tables, self.target_runner.attn_groups, strict=True
        ):
            own = common.replace(block_table_tensor=table[on_device(indices, self.device)])
            for attention_group in attention_groups:
                built = attention_group.build_metadata(own)
                attn_metadata |= dict.fromkeys(attention_group.layer_names, built)
        if self._adapters is not None:
            self._adapters.apply(indices, window)
        if self.uses_mrope:
            requests = [self.target_runner.requests[self._batch.req_ids[index]] for index in indices]
            query_positions = positions_on_host(requests, positions_by_req).to(self.device)
        else:
            query_positions = on_device(positions, self.device)
        self._drafting.forward(
            on_device(tokens, self.device),
            query_positions,
            [slots] * len(self._drafter.groups),
            observed_metadata(attn_metadata, layer_names, self._drafter.switched_layers, observer),
        )

    def pad_slots(self, num_padded: int, slots: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return padded slots by layer, [num_padded] int64; `slots` [num_tokens] int64, by layer group."""
        by_layer: dict[str, torch.Tensor] = {}
        for buffer, own, group in zip(self._slots, slots, self._drafter.groups, strict=True):
            buffer[: len(own)].copy_(own)
            buffer[len(own) : num_padded].fill_(PAD_SLOT)
            by_layer |= dict.fromkeys(group.layer_names, buffer[:num_padded])
        return by_layer


def _probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return probabilities of `tokens` under `logits` [num_tokens, vocab_size], [num_tokens] float32."""
    own = logits.gather(1, tokens.long().unsqueeze(1)).squeeze(1)
    return (own.float() - logits.float().logsumexp(dim=1)).exp()


def _page_metadata(
    common: CommonAttentionMetadata,
    slots: torch.Tensor,
    attention_groups: Sequence[AttentionGroup],
    index: int,
    view: PageView,
) -> dict[str, Any]:
    """Build attention metadata, by layer, for a pass over a view that begins at step `index`."""
    own = common.replace(
        seq_lens=view.lens,
        max_seq_len=view.max_len,
        block_table_tensor=view.block_table,
        slot_mapping=slots,
    )
    attn_metadata: dict[str, Any] = {}
    for group in attention_groups:
        attn_metadata |= dict.fromkeys(group.layer_names, group.build_metadata_for_drafting(own, index))
    return attn_metadata
