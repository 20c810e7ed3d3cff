# SPDX-License-Identifier: Apache-2.0
"""Adapter to vLLM's V2 model runner (`vllm.v1.worker.gpu`)."""

import functools
from collections.abc import Callable, Mapping, Sequence
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
from vllm.v1.worker.utils import AttentionGroup

from vllm_magicdec.adaptive.metrics import Counts
from vllm_magicdec.attention.metadata import draft_metadata, observed_metadata
from vllm_magicdec.attention.observing import LayerObserver
from vllm_magicdec.config import MagicDecSpeculativeConfig
from vllm_magicdec.drafting.drafter import Drafter
from vllm_magicdec.drafting.finite import make_finite
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.drafting.wide_passes import MAX_WIDE_TOKENS
from vllm_magicdec.errors import METHOD
from vllm_magicdec.lookup.device_lookups import Texts
from vllm_magicdec.lookup.history import History
from vllm_magicdec.views.base import (
    PAD_SLOT,
    Batch,
    DraftStep,
    TokenView,
    View,
    on_device,
)
from vllm_magicdec.views.passes import DraftPass
from vllm_magicdec.vllm_api import cpu_attention, cpu_llvmlite
from vllm_magicdec.vllm_api.adapters import Adapters
from vllm_magicdec.vllm_api.attention_groups import (
    attention_groups_of,
    find_weakest_graphs,
    refuse_split_pages,
)
from vllm_magicdec.vllm_api.draft_graphs import (
    DraftGraphs,
    PassGraphs,
    RoundGraphs,
    step_of_nobody,
    why_no_draft_graphs,
)
from vllm_magicdec.vllm_api.drafts_v2 import Draft, ModelDraft, TargetDraft
from vllm_magicdec.vllm_api.embeddings import embed, takes_embeddings
from vllm_magicdec.vllm_api.kv_cache import layer_groups
from vllm_magicdec.vllm_api.kv_transfer import fills_freed_blocks, unseen_by_connector
from vllm_magicdec.vllm_api.page_metadata_v2 import PageMetadata
from vllm_magicdec.vllm_api.rope import positions_on_device
from vllm_magicdec.vllm_api.spire_draft_v2 import SpireDraft
from vllm_magicdec.vllm_api.verification_attention import refuse_if_inexact, say_if_slow

logger = init_logger(f"vllm.{__name__}")


def show_removed(req_states: Any, take: Callable[[str, Sequence[int]], None]) -> None:
    """Show which requests a V2 runner forgets: those that have ended, and those that are preempted.

    Args:
        req_states: the runner's `RequestState`, on a CPU.
        take: is called with a request's id and all tokens that were verified after its prompt.
    """
    remove_request = req_states.remove_request

    @functools.wraps(remove_request)
    def remove(req_id: str) -> int | None:
        row = req_states.req_id_to_index.get(req_id)
        if row is not None:
            begin, end = int(req_states.prompt_len.np[row]), int(req_states.total_len.gpu[row])
            take(req_id, req_states.all_token_ids.gpu[row, begin:end].tolist())
        return remove_request(req_id)

    req_states.remove_request = remove


class MagicDecSpeculator(StandaloneARSpeculator):
    """A draft-model speculator whose draft looks at a view of its KV cache: the target's, or its own.

    Kept from the base class: request buffers, draft sampling, and how a draft model is loaded. Replaced:
    attention metadata (of groups of layers over the view), the draft loop, and CUDA graphs, which the base
    class does not have.
    """

    # No pass of a draft has more tokens than the target's step.
    num_extra_query_per_req = 0
    speculative_config: MagicDecSpeculativeConfig

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> None:
        super().__init__(vllm_config, device)
        if device.type == "cpu":
            cpu_attention.mend()
        spec = self.speculative_config
        if spec.draft_lookup == "on" and not spec.looks_up_on_device:
            cpu_llvmlite.mend()
            show_removed(req_states, lambda *ended: self._drafter.finish_request(*ended))
        self.req_states = req_states
        self._drafting: Draft
        if self.speculative_config.spire is not None:
            self._drafting = SpireDraft(self)
        elif self.speculative_config.has_draft_model:
            self._drafting = ModelDraft(self)
        else:
            self._drafting = TargetDraft(self)
        self._batch: Batch | None = None
        self._graphs = RoundGraphs()
        self._is_timed = False  # vLLM wants to know what drafting takes
        self._adapters: Adapters | None = None
        self._rope: RopeState | None = None  # of targets with M-RoPE
        # This runner hands a step's tokens out before it drafts, so they do not say that the drafts' K/V is
        # written, and vLLM would free their blocks.
        self._drafts_are_awaited = device.type == "cuda" and fills_freed_blocks(vllm_config)
        # A draft model takes text alone, and so does its target then.
        is_target = not self.speculative_config.has_draft_model
        self._takes_embeddings = is_target and takes_embeddings(vllm_config.model_config)

    def load_model(self, target_model: nn.Module) -> None:
        """Called when the target has been loaded."""
        super().load_model(target_model)
        self.supports_mm_inputs = False  # drafted tokens are text: no image has to be gathered for them
        # A draft model has none: vLLM's adapters are the target's.
        if self.vllm_config.lora_config is not None and self.model is target_model:
            self._adapters = Adapters(target_model, self.vllm_config.lora_config)

    def take_adapters(self, ids: np.ndarray) -> None:
        """See `Adapters.take`; called before each of the target's steps, because only its runner knows."""
        if self._adapters is not None:
            self._adapters.take(ids)

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """What drafts."""
        return self._drafting.load(target_model, target_attn_layer_names)

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
        target_input_buffers: Any,
        target_attn_groups: Any,
    ) -> None:
        """Called once the KV cache is laid out."""
        refuse_if_inexact(self.vllm_config, target_attn_groups)
        say_if_slow(self.vllm_config)
        self._drafting.refuse_inputs(model_state)
        if self._drafting.layer_names is None:
            self._rope = model_state.rope_state
        self._steps = torch.arange(self.num_speculative_steps, device=self.device)
        self._rope_offsets = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=self.device)
        super().set_attn(
            model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups
        )
        groups = layer_groups(self.vllm_config, kv_cache_config, self._drafting.layer_names)
        # vLLM lays the KV cache out twice when it measures memory first: what the first drafter holds goes.
        self._attention_groups: list[list[AttentionGroup]] = []
        for name in ("_drafter", "page_metadata"):
            self.__dict__.pop(name, None)
        self._drafting.lay_out(kv_cache_config, groups)
        self._attention_groups = [
            attention_groups_of(
                group, self._drafting.attention_groups, self.vllm_config, self.device, share_builders=True
            )
            for group in groups
        ]
        self._drafter = Drafter(
            self,
            self.vllm_config,
            groups,
            kv_cache_config,
            self.device,
            pass_runner=self,
            wide_pass_runner=self,
            own_cache=self._drafting.own_cache,
        )
        if self.speculative_config.looks_up_on_device:
            ones = torch.ones(1, dtype=torch.int64, device=self.device)
            self._drafter.warm_up_lookups(
                Texts(self.req_states.all_token_ids.gpu, self.idx_mapping[:1], ones, max_len=1)
            )
        if self._drafter.has_pages:
            refuse_split_pages(self._attention_groups, are_of_layers=self._drafter.has_layer_pages)
        self.page_metadata = PageMetadata(
            self,
            self._attention_groups,
            [group.kv_cache_group for group in self._drafter.groups],
            {*self._drafting.queries_of_steps, *self.speculative_config.round_lengths},
        )
        if self._drafts_are_awaited:
            logger.info_once(
                "%s: every step waits for its drafts, because the KV connector may load into the blocks of "
                "requests that have ended.",
                METHOD,
            )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Called after `set_attn` with what the target's attention supports."""
        if self.device.type == "cuda" and not self.vllm_config.model_config.enforce_eager:
            weakest, _ = find_weakest_graphs(self.target_attn_groups, self.vllm_config)
            if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
                # vLLM has not asked the layers that have rings.
                own, support = find_weakest_graphs(self._attention_groups, self.vllm_config)
                if support.value < AttentionCGSupport.UNIFORM_BATCH.value:
                    weakest, cudagraph_mode = own, CUDAGraphMode.NONE
            reason = why_no_draft_graphs(cudagraph_mode, weakest)
            if reason is not None:
                logger.warning_once("%s: draft steps run without CUDA graphs, slower: %s.", METHOD, reason)
        of_device = (self.vllm_config, self.device, cudagraph_mode, self, self._drafter.common_lens)
        spec = self.speculative_config
        lengths = [n for n in spec.round_lengths if n > 1] if spec.looks_up_on_device else []
        self._graphs = RoundGraphs(
            {n: DraftGraphs(*of_device, n) for n in self._drafting.queries_of_steps},
            {n: PassGraphs(*of_device, n) for n in lengths},
        )

    @property
    def counts(self) -> Counts:
        """What this worker has counted since it last told."""
        return self._drafter.counts

    def capture(self) -> None:
        """Called when the target's own graphs have been captured."""
        try:
            self._graphs.capture()
        except Exception:
            self._drafter.record_failure("capture")
            self._graphs = RoundGraphs()
            logger.exception("%s: draft steps run without CUDA graphs, slower: capturing failed.", METHOD)
        self._is_timed = self.enable_adaptive_verification  # by dummy steps, which come next

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
                self._drafting.warm_up(input_batch)
            elif self._is_timed:
                self._copy_request_inputs(
                    num_reqs, input_batch.idx_mapping, temperature, seeds, dummy_run=True
                )
                self._draft_for_nobody(num_reqs)
            return self.draft_tokens[:num_reqs]
        self._is_timed = False
        num_steps = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        self._copy_request_inputs(num_reqs, input_batch.idx_mapping, temperature, seeds)
        if num_steps > 0 or self._drafting.own_cache is not None:

            def read_batch() -> Batch:
                self._batch = self._make_batch(input_batch, num_rejected, last_sampled)
                self._drafting.note_step(input_batch, slot_mappings, aux_hidden_states)
                if self._rope is not None:
                    # In all channels, drafted tokens are as far from their index as all generated text is.
                    self._rope_offsets.zero_()
                    self._rope_offsets[:num_reqs] = self._rope.prefill_delta.gpu[input_batch.idx_mapping]
                return self._batch

            drafted = self._drafter.draft(
                num_reqs,
                num_steps,
                read_batch,
                lambda batch: self._histories(batch, input_batch.idx_mapping_np),
            )
            if not drafted:
                self._make_drafts_one_hot(num_reqs)
                # For vLLM's adaptive verification, which leaves out what will not stand.
                self.draft_token_confidence_probs[:num_reqs] = 0.0
            elif self._drafter.draft_lists is not None and num_steps > 0:
                self._fill_up(self._drafter.draft_lists, num_steps)
            if drafted and self._batch is not None and all(self._batch.is_prefilling):
                # No pass has told any. As vLLM has it of new requests.
                self.draft_token_confidence_probs[:num_reqs] = 1.0
            if self._drafts_are_awaited:
                torch.accelerator.current_stream().synchronize()
        return self._drafter.draft_tokens[:num_reqs]

    def _draft_for_nobody(self, num_reqs: int) -> None:
        """What the steps of a round take, over full views of as many requests."""
        step = step_of_nobody(
            self,
            num_reqs,
            num_blocks=self.kv_cache_config.num_blocks,
            page_sizes=[group.cache.block_size for group in self.groups],
            common_lens=self._drafter.common_lens,
            device=self.device,
        )
        tokens = torch.zeros(num_reqs, dtype=torch.int32, device=self.device)
        for _ in range(self.num_speculative_steps):
            self.draft_step(tokens, step)

    def _make_batch(
        self, batch: InputBatch, num_rejected: torch.Tensor, last_sampled: torch.Tensor
    ) -> Batch:
        num_reqs = batch.num_reqs
        context_lens = batch.seq_lens[:num_reqs].long() - num_rejected[:num_reqs]
        # What the host knows: as if every scheduled draft had been accepted.
        known_lens = batch.num_computed_tokens_np[:num_reqs] + batch.num_scheduled_tokens[:num_reqs]
        return Batch(
            req_ids=batch.req_ids[:num_reqs],
            tokens=last_sampled[batch.idx_mapping].view(-1),
            block_tables=self._drafting.tables(
                [table[:num_reqs] for table in self.block_tables.input_block_tables]
            ),
            context_lens=context_lens,
            observable_lens=context_lens,
            known_lens=known_lens,
            is_prefilling=known_lens < batch.prefill_len_np[:num_reqs],
            is_first=known_lens == batch.prefill_len_np[:num_reqs],
        )

    def _histories(self, batch: Batch, rows: np.ndarray) -> list[History]:
        """The requests' tokens; `rows` [num_reqs] int, among vLLM's. On a CPU."""
        # With those that this step sampled.
        token_ids = self.req_states.all_token_ids.gpu.numpy()
        ends = (batch.context_lens + 1).tolist()
        return [History(token_ids[row, :end], ()) for row, end in zip(rows, ends, strict=True)]

    def max_wide_reqs(self, num_steps: int) -> int:
        """See `drafting.wide_passes.WidePassRunner`."""
        if not self._drafting.reads_ahead:
            return 0
        captured = self._graphs.max_wide_reqs(num_steps)
        return min(self.max_num_tokens, MAX_WIDE_TOKENS) // num_steps if captured is None else captured

    def texts(self, batch: Batch) -> Texts:
        """See `drafting.wide_passes.WidePassRunner`."""
        token_ids = self.req_states.all_token_ids.gpu
        most = min(int(max(batch.known_lens)) + 1, token_ids.shape[1])
        # What this step sampled is among them.
        lens = (batch.context_lens + 1).clamp(max=most)
        return Texts(token_ids, self.idx_mapping[: len(batch.req_ids)], lens, most)

    def _fill_up(self, lists: list[list[int]], num_steps: int) -> None:
        """Hand on lists as vLLM's runner takes drafts: as many of each request, some of them never used."""
        filled = [[*drafts, *[0] * (num_steps - len(drafts))] for drafts in lists]
        self._drafter.draft_tokens[: len(lists), :num_steps] = torch.tensor(filled)
        for index, drafts in enumerate(lists):
            self._make_drafts_one_hot(index + 1, first=index, first_step=len(drafts))

    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        """vLLM's, of which the rejection sampler can make a distribution."""
        logits = super().compute_draft_logits(hidden_states, spec_step_idx)
        return logits if self.draft_logits is None else make_finite(logits)

    def draft_step(self, tokens: torch.Tensor, step: DraftStep) -> torch.Tensor:
        """See `drafting.drafter.Runner`."""
        self.current_draft_step.fill_(step.index)
        if self._adapters is not None:
            self._adapters.apply()
        num_reqs = len(tokens)
        tokens, step = self._drafting.lead(tokens, step)
        sampled = self._graphs.replay_step(tokens, step, num_reqs, self._num_adapters)
        if sampled is None:
            sampled = self.forward_and_sample(tokens, step, self.step_metadata(step))
        return sampled

    @property
    def reads_ahead(self) -> bool:
        """See `drafting.staged.PassRunner`."""
        return self._drafting.reads_ahead

    @property
    def max_pass_tokens(self) -> int:
        """See `drafting.staged.PassRunner`."""
        return self.max_num_tokens

    def note_unread(self, request: int, first: int, tokens: Sequence[int]) -> None:
        """See `drafting.staged.PassRunner`."""
        raise AssertionError("this runner verifies as many drafts of every request, all from passes")

    def draft_pass(
        self, tokens: torch.Tensor, draft_pass: DraftPass
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `drafting.staged.PassRunner`."""
        queries = draft_pass.queries
        if self._adapters is not None:
            self._adapters.apply(queries.places.tolist())  # every token is drawn after
        drawn = self._graphs.replay_pass(tokens, draft_pass, self._num_adapters)
        if drawn is not None:
            return drawn, None
        places, steps = on_device(queries.places, self.device), on_device(queries.steps, self.device)
        attn_metadata: dict[str, Any] = {}
        for index, (part, group) in enumerate(zip(draft_pass.parts, self._drafter.groups, strict=True)):
            of_pages = partial(self.page_metadata.of_pass, index, part, queries)
            attn_metadata |= draft_metadata(part.view, group.layer_names, of_pages)
        hidden_states = self._forward_at(
            tokens, draft_pass.positions, places, [part.slots for part in draft_pass.parts], attn_metadata
        )
        rows = self.idx_mapping[places]
        drawn, logits = self._draw_after_all(hidden_states, draft_pass.positions, rows, steps)
        if not draft_pass.is_weighed:
            return drawn, None
        temperature: torch.Tensor | float = 1.0
        if self.draft_logits is not None:
            temperature = self.temperature[rows].unsqueeze(1)
            temperature = temperature.masked_fill(temperature == 0, 1.0)
        log_probs = (logits.float() / temperature).log_softmax(dim=-1)
        return drawn, log_probs.gather(1, drawn.unsqueeze(1)).squeeze(1).exp()

    @property
    def _num_adapters(self) -> int:
        """Of the round, when they have been applied."""
        return 0 if self._adapters is None else self._adapters.num_active

    def _forward_at(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        slots: Sequence[torch.Tensor],
        attn_metadata: Mapping[str, Any],
    ) -> torch.Tensor:
        """See `Draft.forward`; `places` [num_tokens] int64, of each token's request in the batch."""
        if self._rope is not None:
            positions = positions + self._rope_offsets[places]
        return self._drafting.forward(tokens, positions, slots, attn_metadata)

    def _draw_after_all(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        steps: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The token after each, and the logits that it was drawn from.

        Args:
            hidden_states: [num_tokens, hidden_size].
            positions: [num_tokens] int64.
            rows: [num_tokens] int, of each token's request among vLLM's.
            steps: [num_tokens] int64, the step of the round that each token is.
        """
        logits = self.compute_draft_logits(hidden_states, 0)
        if self.draft_logits is None:
            return logits.argmax(dim=-1), logits
        # A token's noise and its place among the logits are those that its own step has.
        drawn = gumbel_sample(
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
        return drawn, logits

    @property
    def batch(self) -> Batch:
        """Of the round."""
        assert self._batch is not None
        return self._batch

    @property
    def groups(self) -> Sequence[LayerGroup]:
        """The draft's attention layers."""
        return self._drafter.groups

    @property
    def takes_passes(self) -> bool:
        """See `drafting.drafter.Drafter`."""
        return self._drafter.takes_passes

    def num_latest(self, num_steps: int) -> int:
        """See `drafting.drafter.Drafter`."""
        return self._drafter.num_latest(num_steps)

    @property
    def num_views(self) -> int:
        """See `draft_graphs.Capturable`."""
        return len(self._drafter.groups)

    def capture_view(self, index: int, num_reqs: int, lens: torch.Tensor, common_len: int | None) -> View:
        """See `draft_graphs.Capturable`."""
        return self._drafter.capture_view(index, num_reqs, lens, common_len)

    def step_metadata(self, step: DraftStep, *, for_capture: bool = False) -> Mapping[str, Any]:
        """See `draft_graphs.Capturable`."""
        attn_metadata: dict[str, Any] = {}
        for index, (part, group) in enumerate(zip(step.parts, self._drafter.groups, strict=True)):
            of_pages = partial(self.page_metadata.of_step, index, part, for_capture=for_capture)
            attn_metadata |= draft_metadata(part.view, group.layer_names, of_pages)
        return attn_metadata

    def refresh_metadata(self, step: DraftStep) -> None:
        """See `draft_graphs.Capturable`. No backend reads token views."""
        for index, part in enumerate(step.parts):
            if not isinstance(part.view, TokenView):
                self.page_metadata.of_step(index, part, part.view.of_layer(0))

    def select_adapters(self, num_active: int, num_reqs: int) -> None:
        """See `draft_graphs.Capturable`."""
        if self._adapters is not None:
            self._adapters.apply_dummies(num_active, num_reqs)

    def forward_and_sample(
        self, tokens: torch.Tensor, step: DraftStep, attn_metadata: Mapping[str, Any]
    ) -> torch.Tensor:
        """See `draft_graphs.Capturable`."""
        slots, positions = [part.slots for part in step.parts], step.positions
        num_reqs = step.parts[0].view.lens.shape[0]
        if self._rope is not None:
            positions = positions + self._rope_offsets[: len(positions)]
        hidden_states = self._drafting.forward(tokens, positions, slots, attn_metadata)
        last = slice(len(tokens) // num_reqs - 1, None, len(tokens) // num_reqs)
        return self.sample_draft(
            hidden_states[last].contiguous(),  # kernels of quantised heads take no other
            step.positions[last],
            self.idx_mapping[:num_reqs],
            self.temperature,
            self.seeds,
            self.current_draft_step,
            self.draft_logits,
        )

    def forward_and_draw(
        self, tokens: torch.Tensor, step: DraftStep, attn_metadata: Mapping[str, Any]
    ) -> torch.Tensor:
        """See `draft_graphs.Capturable`."""
        num_reqs = step.parts[0].view.lens.shape[0]
        num_queries = len(tokens) // num_reqs
        places = self.arange_gpu[:num_reqs].long().repeat_interleave(num_queries)
        steps = self._steps[:num_queries].repeat(num_reqs)
        hidden_states = self._forward_at(
            tokens, step.positions, places, [part.slots for part in step.parts], attn_metadata
        )
        drawn, _ = self._draw_after_all(hidden_states, step.positions, self.idx_mapping[places], steps)
        return drawn

    def observe(
        self, layer_names: Sequence[str], indices: Sequence[int], window: int, observer: LayerObserver
    ) -> None:
        """See `drafting.drafter.Runner`."""
        assert self._batch is not None
        num_reqs = len(indices)
        chosen = on_device(indices, self.device)
        lens = self._batch.observable_lens[chosen]
        places = torch.arange(window, device=self.device) - window
        positions = lens.unsqueeze(1) + places
        rows = self.idx_mapping[chosen].long().unsqueeze(1)
        tokens = self.req_states.all_token_ids.gpu[rows, positions].flatten().to(torch.int32)
        slots = torch.full((num_reqs * window,), PAD_SLOT, dtype=torch.int64, device=self.device)
        starts = torch.arange(num_reqs + 1, dtype=torch.int32) * window
        attn_metadata = self.page_metadata.of_target(
            query_start_loc=self.arange_gpu[: num_reqs + 1] * window,
            query_start_loc_cpu=starts,
            max_query_len=window,
            seq_lens=lens.to(torch.int32),
            max_seq_len=max(int(self._batch.known_lens[i]) for i in indices),
            block_tables=[table[chosen] for table in self._batch.block_tables],
            slots=slots,
            positions=positions.flatten(),
        )
        observed = observed_metadata(attn_metadata, layer_names, self._drafter.switched_layers, observer)
        if self._adapters is not None:
            self._adapters.apply(indices, window)
        if self._rope is None:
            positions = positions.flatten()
        else:
            prompt_lens = self.req_states.prefill_len.gpu[rows]
            positions = positions_on_device(self._rope, rows, positions, prompt_lens)
        self.forward(tokens, positions, self.slots_by_layer([slots] * self.num_views), observed)

    def slots_by_layer(self, slots: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """[num_tokens] int64 each; `slots` by group of layers."""
        by_layer: dict[str, torch.Tensor] = {}
        for own, group in zip(slots, self._drafter.groups, strict=True):
            by_layer |= dict.fromkeys(group.layer_names, own)
        return by_layer

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: dict[str, torch.Tensor],
        attn_metadata: Mapping[str, Any] | None,
    ) -> Any:
        """What the model that drafts gives: hidden states, [num_tokens, hidden_size], or more.

        Args:
            tokens: [num_tokens] int32.
            positions: [num_tokens] int64, or [num_dims, num_tokens] under M-RoPE.
            slot_mapping: [num_tokens] int64 each, where their K/V goes, by layer.
            attn_metadata: by layer; None: there is no KV cache yet.
        """
        num_tokens = tokens.shape[0]
        if self._rope is not None:
            # Compiled code has the strides of the runner's own buffer.
            self._rope.positions[:, :num_tokens] = positions
            positions = self._rope.positions[:, :num_tokens]
        inputs: dict[str, torch.Tensor | None] = {"input_ids": tokens}
        if self._takes_embeddings:
            inputs = {"input_ids": None, "inputs_embeds": embed(self.model, tokens, self.vocab_size)}
        with (
            unseen_by_connector(),
            set_forward_context(
                attn_metadata,
                self.vllm_config,
                num_tokens=num_tokens,
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                slot_mapping=slot_mapping,
                batch_descriptor=BatchDescriptor(num_tokens=num_tokens),
            ),
        ):
            return self.model(positions=positions, **inputs)

    def _make_drafts_one_hot(self, end: int, *, first: int = 0, first_step: int = 0) -> None:
        """Tell the rejection sampler that drafts are token 0 with certainty.

        Args:
            end: of the requests, places in the batch, from `first` on.
            first: see there.
            first_step: the first of each request's drafts.
        """
        if self.draft_logits is not None:
            rows = self.idx_mapping[first:end]
            self.draft_logits[rows, first_step:] = float("-inf")
            self.draft_logits[rows, first_step:, 0] = 0.0
