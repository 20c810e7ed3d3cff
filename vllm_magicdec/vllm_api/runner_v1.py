# SPDX-License-Identifier: Apache-2.0
"""Adapter to vLLM's V1 model runner on CPUs (`CPUModelRunner`), where scheduling is synchronous."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from typing_extensions import override
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import CommonAttentionMetadata
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
from vllm_magicdec.drafting.ports import Cache
from vllm_magicdec.lookup.history import History
from vllm_magicdec.views.round import Batch, PageView, Pass, Queries, Sampled, TargetStep
from vllm_magicdec.views.tensors import PAD_SLOT, on_device
from vllm_magicdec.vllm_api import cpu_attention, cpu_llvmlite, cpu_sampling
from vllm_magicdec.vllm_api.adapters import Adapters
from vllm_magicdec.vllm_api.attention_groups import attention_groups_of, refuse_split_pages
from vllm_magicdec.vllm_api.embeddings import (
    blank_embedded_prompts,
    embed,
    refuse_more_inputs,
    takes_embeddings,
)
from vllm_magicdec.vllm_api.kv_cache import layer_groups
from vllm_magicdec.vllm_api.kv_transfer import without_kv_connector
from vllm_magicdec.vllm_api.rope import positions_on_host
from vllm_magicdec.vllm_api.runner_wrappers import bypass_rejection_sampler, report_finished
from vllm_magicdec.vllm_api.verification_attention import refuse_if_inexact, warn_if_slow


class MagicDecProposer(DraftModelProposer):
    """A proposer whose draft is the target itself, over a view of the target's KV cache.

    Inherited: the padded-batch bookkeeping of rejected tokens, draft sampling and attention groups.
    Replaced: the draft loop, and the draft model, which subclasses in `draft_models_v1.py` load.
    """

    speculative_config: MagicDecSpeculativeConfig
    reads_ahead = True
    """Whether a pass may take several unverified tokens of a request."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, device=device, runner=runner)
        cpu_sampling.patch()
        cpu_sampling.rewind_generators(runner)
        cpu_attention.patch()
        if self.speculative_config.draft_lookup == "on":
            cpu_llvmlite.patch()
            report_finished(runner, lambda *finished: self._drafter.finish_request(*finished))
        self.target_runner = runner
        if self.speculative_config.adaptive:
            self._bypass_rejection_sampler()
        self.supports_mm_inputs = False  # drafts are text: no image inputs to gather
        self._drafter: Drafter  # created when the KV cache's page size is known
        # Of the round: metadata that all passes share, requests, and the target's sampling parameters.
        self._common: CommonAttentionMetadata
        self._step_common: CommonAttentionMetadata  # of the target's step
        self._target_token_ids: torch.Tensor  # [num_tokens] int32, inputs of the target's step
        self._batch: Batch
        self._sampling: SamplingMetadata
        self._adapters: Adapters | None = None
        self._draft_probs: list[torch.Tensor] = []  # gamma x [num_reqs, vocab_size]

    def _bypass_rejection_sampler(self) -> None:
        bypass_rejection_sampler(self.target_runner)

    def _raise_if_mrope(self) -> None:
        """Accept M-RoPE: this draft takes the target's positions."""

    def _warn_if_multimodal(self) -> None:
        """Do not warn: drafts are text, and the prompt's images are in the KV cache."""

    @property
    def counts(self) -> Counts:
        """This worker's counts since they were last sent."""
        return self._drafter.counts

    def load_model(self, target_model: nn.Module) -> None:
        """Take the target as the draft."""
        refuse_more_inputs(target_model)
        self.model = target_model
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        self._draft_attn_layer_names = {
            name for name, layer in layers.items() if layer.get_kv_cache_spec(self.vllm_config) is not None
        }
        if self.vllm_config.lora_config is not None:
            self._adapters = Adapters(target_model, self.vllm_config.lora_config)

    def update_weights(self) -> None:
        """Follow an update of the target's weights, for drafts that copy them."""

    def _make_cache(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> Cache:
        """Return the KV cache that the draft reads, once vLLM has allocated it."""
        return Cache()

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
        self._cache = self._make_cache(kv_cache_config, groups)
        self.draft_attn_groups = [own for of_view in self._attention_groups for own in of_view]
        self._drafter = Drafter(self, self.vllm_config, groups, kv_cache_config, self.device, self._cache)
        if self._drafter.has_pages:
            refuse_split_pages(self._attention_groups, are_of_layers=self._drafter.has_layer_pages)
        if self.speculative_config.draft_lookup == "on":
            # A round with lookups drafts as much for each request as it has room for.
            self._draft_beyond_the_end()

    def _draft_beyond_the_end(self) -> None:
        """Keep drafting for the whole batch when one request nears the model's maximum length.

        vLLM's runner would draft for no request then, and a draft's own cache would fall behind.
        """
        runner = self.target_runner
        runner.effective_drafter_max_model_len = runner.max_model_len + self.num_speculative_tokens

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the target has a dummy run of its own."""

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
            self._step_common = common_attn_metadata
            self._common = self._with_one_query_each(common_attn_metadata, num_reqs)
            context_lens = common_attn_metadata.seq_lens[:num_reqs].long()
            if num_rejected_tokens_gpu is not None:
                context_lens -= num_rejected_tokens_gpu[:num_reqs]
            self._batch = self._make_batch(next_token_ids, context_lens, common_attn_metadata)
            self._note_activations(target_positions, target_hidden_states, slot_mappings)
            if self._adapters is not None:
                self._adapters.take(self.target_runner.input_batch.request_lora_mapping[:num_reqs])
            if self.uses_mrope:
                requests = [self.target_runner.requests[req_id] for req_id in self._batch.req_ids]
                deltas = [request.mrope_position_delta for request in requests]
                self._rope_offsets = on_device(deltas, self.device)
            return self._batch

        drafts = self._drafter.draft(num_speculative_tokens, read_batch, self._histories)
        if drafts is None:
            return [[] for _ in range(num_reqs)]  # nothing to verify
        used = len(self._draft_probs) if drafts.lists is None else max(map(len, drafts.lists))
        if self._draft_probs and used:
            self._last_draft_probs = torch.stack(self._draft_probs[:used], dim=1).contiguous()
        return drafts.tokens

    def _note_activations(
        self, positions: torch.Tensor, activations: torch.Tensor, slots: Mapping[str, torch.Tensor]
    ) -> None:
        """Record the target's activations in its step, for drafts that use them.

        Args:
            positions: [num_tokens] int64, or [num_dims, num_tokens] under M-RoPE.
            activations: [num_tokens, hidden_size] of the last layer, or vLLM's auxiliary hidden states, if
                requested, concatenated over layers.
            slots: [num_tokens or more] int64, slots of the tokens' K/V, by layer, including the draft's.
        """

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
        # Of a position in the step, the index of its token among the step's.
        self._step_offsets = (query_starts[1:] - seq_lens).long()
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
        inputs, common = self.target_runner.input_batch, self._step_common
        ends = batch.context_lens.tolist()
        # Index of a token in the step = its position - its request's offset.
        offsets = (common.seq_lens[: len(ends)] - common.query_start_loc_cpu[1 : len(ends) + 1]).tolist()
        return [
            History(
                inputs.token_ids_cpu[index, :known],
                # The accepted drafts and the token sampled after them.
                [*self._target_token_ids[known - offset : end - offset].tolist(), token],
            )
            for index, (known, end, offset, token) in enumerate(
                zip(batch.known_lens, ends, offsets, batch.tokens.tolist(), strict=True)
            )
        ]

    def run(self, draft_pass: Pass) -> Sampled:
        """Run a pass of the draft, and sample."""
        queries, device = draft_pass.queries, self.device
        if self._adapters is not None:
            self._adapters.apply(queries.request_indices)
        hidden_states = self._forward(draft_pass)
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
        probs = logits.float().softmax(dim=1) if probs is None else probs
        return Sampled(drafted, probs.gather(1, drafted.long().unsqueeze(1)).squeeze(1))

    def read(self, draft_pass: Pass) -> None:
        """Run a pass for the K/V alone."""
        self._forward(draft_pass)

    @property
    def max_pass_tokens(self) -> int:
        """Maximum number of query tokens in a pass."""
        return self.max_num_tokens

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
        common = self._common.replace(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            num_reqs=len(queries.lens),
            num_actual_tokens=len(draft_pass.tokens),
            max_query_len=int(queries.lens.max()),
        )
        attn_metadata: dict[str, Any] = {}
        for part, group, attention_groups in zip(
            draft_pass.parts, self._drafter.groups, self._attention_groups, strict=True
        ):
            of_pages = functools.partial(
                _page_metadata, common, part.slots, attention_groups, queries.first_sampled
            )
            attn_metadata |= draft_metadata(part.view, group.layer_names, of_pages)
        slots = [part.slots for part in draft_pass.parts]
        return self.forward(draft_pass.tokens, positions, slots, attn_metadata)

    def forward(
        self,
        tokens: torch.Tensor,  # [num_tokens] int32
        positions: torch.Tensor,  # [num_tokens] int64, or [num_dims, num_tokens] under M-RoPE
        slots: Sequence[torch.Tensor],  # [num_tokens] int64 each, destination of K/V, by layer group
        attn_metadata: Mapping[str, Any],  # by layer
    ) -> torch.Tensor:
        """Run the draft and return its hidden states, [num_tokens, hidden_size]."""
        num_tokens, runner = tokens.shape[0], self.target_runner
        # In the runner's buffers, whose strides and alignment the compiled model expects.
        target_positions = runner.mrope_positions.gpu if self.uses_mrope else runner.positions
        target_positions = target_positions[..., :num_tokens].copy_(positions)
        inputs: dict[str, torch.Tensor | None]
        if takes_embeddings(runner.model_config):
            embeddings = embed(self.model, tokens, runner.model_config.get_vocab_size())
            inputs = {"inputs_embeds": runner.inputs_embeds.gpu[:num_tokens].copy_(embeddings)}
            inputs["input_ids"] = None
        else:
            inputs = {"input_ids": runner.input_ids.gpu[:num_tokens].copy_(tokens), "inputs_embeds": None}
        with self._in_pass(num_tokens, slots, attn_metadata):
            hidden_states: torch.Tensor = self.model(positions=target_positions, **inputs)
        return hidden_states

    @contextmanager
    def _in_pass(
        self, num_tokens: int, slots: Sequence[torch.Tensor], attn_metadata: Mapping[str, Any]
    ) -> Iterator[None]:
        """Enter vLLM's forward context; `slots` as for `forward`."""
        _, _, num_across_dp = self._determine_batch_execution_and_padding(num_tokens, use_cudagraphs=False)
        by_layer: dict[str, torch.Tensor] = {}
        for own, group in zip(slots, self._drafter.groups, strict=True):
            by_layer |= dict.fromkeys(group.layer_names, own)
        with (
            without_kv_connector(),
            set_forward_context(
                attn_metadata,
                self.vllm_config,
                num_tokens=num_tokens,
                num_tokens_across_dp=num_across_dp,
                slot_mapping=by_layer,
            ),
        ):
            yield

    def observe(
        self, layer_names: Sequence[str], indices: Sequence[int], window: int, observer: LayerObserver
    ) -> None:
        """Run the target over the last `window` tokens of requests `indices`, with an observer."""
        num_reqs = len(indices)
        lens = np.asarray(self._batch.known_lens)[indices]
        positions_by_req = lens[:, None] - window + np.arange(window)
        positions, rows = positions_by_req.ravel(), np.repeat(indices, window)
        tokens = self.target_runner.input_batch.token_ids_cpu[rows, positions]
        slots = torch.full((num_reqs * window,), PAD_SLOT, dtype=torch.int64, device=self.device)
        common = self._common.replace(
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
        self.forward(
            on_device(tokens, self.device),
            query_positions,
            [slots] * len(self._drafter.groups),
            observed_metadata(attn_metadata, layer_names, self._drafter.switched_layers, observer),
        )


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
