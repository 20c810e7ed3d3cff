# SPDX-License-Identifier: Apache-2.0
"""Drafting models of the V1 runner: the target itself, or a draft model with its own KV cache.

`Draft` hides which weights run a pass, which layers' KV cache it reads, and which tokens that cache lacks
after a verification. The draft loop and the views are the same for all.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn as nn
from typing_extensions import override
from vllm.config import get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from vllm_magicdec.drafting.drafter import OwnCache
from vllm_magicdec.drafting.held_tokens import HeldTokens
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.views.round import Batch, Pass, Queries
from vllm_magicdec.views.tensors import PAD_SLOT, on_device
from vllm_magicdec.vllm_api.attention_groups import refuse_small_buffers
from vllm_magicdec.vllm_api.embeddings import embed, refuse_more_inputs, takes_embeddings
from vllm_magicdec.vllm_api.kv_cache import log_draft_memory, refuse_draft_without_whole_context
from vllm_magicdec.vllm_api.kv_transfer import without_kv_connector

if TYPE_CHECKING:  # imports this module
    from vllm_magicdec.vllm_api.runner_v1 import MagicDecProposer

# Upper bound on the catch-up tokens of a request in a round's first pass, in multiples of the round's
# drafts. They attend to the round's view only, so longer gaps take a pass over all pages.
_MAX_CATCH_UP = 2

Piece = tuple[int, int, int]
"""Index of a request in the batch, and the first and end position of tokens that the draft reads."""


class Draft(ABC):
    """The model that drafts; its passes run in `proposer`."""

    follows_plain_steps = False
    """Whether to call `note_plain_step`."""

    def __init__(self, proposer: "MagicDecProposer") -> None:
        self._proposer = proposer

    @property
    def own_cache(self) -> OwnCache | None:
        """The draft's own KV cache; None: it drafts from the target's."""
        return None

    @property
    def may_lag(self) -> bool:
        """Whether the draft may skip plain steps and catch up with their tokens later."""
        return True

    def note_plain_step(self, scheduler_output: SchedulerOutput) -> None:  # noqa: B027
        """Record a plain step of the target, one without drafts."""

    @abstractmethod
    def load(self, target: nn.Module) -> set[str]:
        """Set `proposer.model` to the drafting model; returns the names of its attention layers."""

    def lay_out(  # noqa: B027
        self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]
    ) -> None:
        """Prepare for drafting with `groups`, once vLLM has allocated the KV cache."""

    def warm_up(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027
        """Run vLLM's dummy run of a draft model; the target has its own."""

    @abstractmethod
    def forward(
        self,
        tokens: torch.Tensor,  # [num_tokens] int32
        positions: torch.Tensor,  # [num_tokens] int64, or [num_dims, num_tokens] under M-RoPE
        slots: Sequence[torch.Tensor],  # [num_tokens] int64 each, destination of K/V, by layer group
        attn_metadata: Mapping[str, Any],  # by layer
    ) -> torch.Tensor:
        """Run a pass and return its hidden states, [num_tokens, hidden_size]."""

    @contextmanager
    def _in_pass(
        self, num_tokens: int, slots: Sequence[torch.Tensor], attn_metadata: Mapping[str, Any]
    ) -> Iterator[int]:
        """Enter vLLM's forward context and yield the number of tokens, padded for its CUDA graphs."""
        proposer = self._proposer
        # No graphs while prompt log-probs are due: vLLM computes them after the draft, from hidden states
        # in memory that graphs share. None with adapters: vLLM's class selects graphs without LoRA.
        graph_mode, num_padded, num_across_dp = proposer._determine_batch_execution_and_padding(
            num_tokens,
            use_cudagraphs=not proposer.target_runner.num_prompt_logprobs and not proposer.has_adapters,
        )
        with (
            without_kv_connector(),
            set_forward_context(
                attn_metadata,
                proposer.vllm_config,
                num_tokens=num_padded,
                num_tokens_across_dp=num_across_dp,
                cudagraph_runtime_mode=graph_mode,
                slot_mapping=proposer.pad_slots(num_padded, slots),
            ),
        ):
            yield num_padded

    def note_step(self, common: CommonAttentionMetadata, target_token_ids: torch.Tensor) -> None:
        """Record the target's step before a round, and its input tokens, [num_tokens] int32."""
        self._target_common, self._target_token_ids = common, target_token_ids

    def note_activations(  # noqa: B027
        self, positions: torch.Tensor, activations: torch.Tensor, slots: Mapping[str, torch.Tensor]
    ) -> None:
        """Record the target's activations in that step, for drafts that use them.

        Args:
            positions: [num_tokens] int64, or [num_dims, num_tokens] under M-RoPE.
            activations: [num_tokens, hidden_size] of the last layer, or vLLM's auxiliary hidden states, if
                requested, concatenated over layers.
            slots: [num_tokens or more] int64, slots of the tokens' K/V, by layer, including the draft's.
        """

    @property
    def reads_ahead(self) -> bool:
        """Whether a pass may take several unverified tokens of a request."""
        return True

    @property
    def num_catch_up_tokens(self) -> int:
        """Upper bound on catch-up tokens prepended to the round's next passes."""
        return 0

    def extend(self, draft_pass: Pass) -> Pass:
        """Prepend verified tokens that the draft's cache lacks, as queries of negative steps."""
        return draft_pass

    def note_caught_up(self, queries: Queries) -> None:  # noqa: B027
        """Record that a pass over `queries`, extended or not, has run."""


class TargetDraft(Draft):
    """The target drafts for itself: its verification fills the KV cache."""

    @override
    def load(self, target: nn.Module) -> set[str]:
        refuse_more_inputs(target)
        proposer = self._proposer
        proposer.model = target
        layers = get_layers_from_vllm_config(proposer.vllm_config, AttentionLayerBase)
        return {
            name
            for name, layer in layers.items()
            if layer.get_kv_cache_spec(proposer.vllm_config) is not None
        }

    @override
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        attn_metadata: Mapping[str, Any],
    ) -> torch.Tensor:
        proposer = self._proposer
        num_tokens, runner = tokens.shape[0], proposer.target_runner
        with self._in_pass(num_tokens, slots, attn_metadata) as num_padded:
            # CUDA graphs of the target read the runner's input buffers.
            target_positions = runner.mrope_positions.gpu if proposer.uses_mrope else runner.positions
            target_positions[..., :num_tokens] = positions
            inputs: dict[str, torch.Tensor | None]
            if takes_embeddings(runner.model_config):
                embeddings = runner.inputs_embeds.gpu[:num_padded]
                vocab_size = runner.model_config.get_vocab_size()
                embeddings[:num_tokens] = embed(proposer.model, tokens, vocab_size)
                inputs = {"input_ids": None, "inputs_embeds": embeddings}
            else:
                runner.input_ids.gpu[:num_tokens] = tokens
                inputs = {"input_ids": runner.input_ids.gpu[:num_padded], "inputs_embeds": None}
            hidden_states = proposer.model(positions=target_positions[..., :num_padded], **inputs)
        return hidden_states[:num_tokens]


@dataclass(frozen=True)
class _Written:
    """Tokens of a request whose K/V a round's passes wrote into the draft's cache."""

    first: int  # position of the first token
    page: int  # page of that position in the KV cache
    tokens: Sequence[int]


class LoadedDraft(Draft):
    """A model that vLLM loads as for `draft_model`, with its layers in the KV cache's groups."""

    @override
    def load(self, target: nn.Module) -> set[str]:
        DraftModelProposer.load_model(self._proposer, target)
        return set(self._proposer._draft_attn_layer_names)

    @override
    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        DraftModelProposer.dummy_run(self._proposer, *args, **kwargs)

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, num_padded: int) -> Any:
        proposer, num_tokens = self._proposer, tokens.shape[0]
        # CUDA graphs read their inputs from vLLM's buffers.
        proposer.input_ids[:num_tokens] = tokens
        proposer.positions[:num_tokens] = positions
        return proposer.model(
            input_ids=proposer.input_ids[:num_padded],
            positions=proposer.positions[:num_padded],
            inputs_embeds=None,
        )


class ModelDraft(LoadedDraft, OwnCache):
    """A draft model that computes the K/V of all tokens itself.

    A round's passes write the K/V of their input tokens: the last verified token and all drafts but the
    last. Rejected ones are overwritten. The draft catches up with other verified tokens (the last draft, if
    all were accepted; a prompt's chunk; tokens of plain steps) before or in the next round's first pass.
    Synchronises with the device a few times a round.
    """

    follows_plain_steps = True

    def __init__(self, proposer: "MagicDecProposer") -> None:
        super().__init__(proposer)
        self._written: dict[str, _Written] = {}  # by request, of the latest round
        self._catch_up_starts: dict[int, int] = {}  # by index in the batch, position of the first token

    @override
    def load(self, target: nn.Module) -> set[str]:
        layer_names = super().load(target)
        refuse_more_inputs(self._proposer.model)
        return layer_names

    @override
    def lay_out(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> None:
        refuse_draft_without_whole_context(groups)
        refuse_small_buffers(self._proposer.attention_groups)
        self._page_size = groups[0].cache.block_size
        self._held = HeldTokens(kv_cache_config.num_blocks, self._page_size)
        log_draft_memory(kv_cache_config, groups)
        draft_beyond_the_end(self._proposer)

    def _table(self, group: LayerGroup) -> np.ndarray:
        """Return a layer group's pages by index in the batch, [max_num_reqs, max_pages] int32."""
        # Looked up each time: vLLM replaces its block tables once the KV cache is allocated.
        tables = self._proposer.target_runner.input_batch.block_table.block_tables
        table: np.ndarray = tables[group.kv_cache_group].block_table.np
        return table

    @property
    def _pages(self) -> np.ndarray:
        """Pages of layers without a window, whose tokens `_held` tracks; see `_table`."""
        return self._table(self._proposer.groups[0])

    @override
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        attn_metadata: Mapping[str, Any],
    ) -> torch.Tensor:
        num_tokens = tokens.shape[0]
        with self._in_pass(num_tokens, slots, attn_metadata) as num_padded:
            hidden_states = self._run(tokens, positions, num_padded)
        return hidden_states[:num_tokens]

    @property
    @override
    def own_cache(self) -> OwnCache:
        return self

    @property
    @override
    def may_lag(self) -> bool:
        # Under asynchronous scheduling the host lacks the tokens to catch up with. For layers with a window
        # vLLM may have freed the pages that they need.
        config = self._proposer.speculative_config.draft_model_config.hf_text_config
        has_windows = any(
            getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")
        )
        return not has_windows and not self._proposer.vllm_config.scheduler_config.async_scheduling

    @override
    def begin_round(self, batch: Batch) -> None:
        common = self._target_common
        num_reqs = len(batch.req_ids)
        self._ends = batch.context_lens.tolist()
        ends_of_step = common.seq_lens[:num_reqs].tolist()
        query_starts = common.query_start_loc_cpu[: num_reqs + 1]
        self._query_starts = query_starts[:-1].tolist()
        # First positions of the target's step.
        self._starts = (torch.tensor(ends_of_step) - query_starts.diff()).tolist()
        self._catch_up_starts = {}
        # One copy to the host, for the comparisons of all requests.
        target_token_ids, pages = self._target_token_ids.cpu(), self._pages
        for index, (req_id, start, end, end_of_step) in enumerate(
            zip(batch.req_ids, self._starts, self._ends, ends_of_step, strict=True)
        ):
            written = self._written.get(req_id)
            self._held.forget(pages[index], start, end_of_step)
            if (
                written is None
                or written.first != start
                or written.page != pages[index, start // self._page_size]
            ):
                continue
            first_token = self._query_starts[index]
            verified = target_token_ids[first_token : first_token + end - start].tolist()
            pairs = zip(verified, written.tokens, strict=False)
            equal = next(
                (i for i, (one, other) in enumerate(pairs) if one != other),
                min(len(verified), len(written.tokens)),
            )
            self._held.add(pages[index], start, start + equal)
        self._written = {}

    @override
    def catch_up(self, batch: Batch, num_steps: int) -> None:
        # Without a pass to follow, tokens of plain steps can wait.
        arriving = np.logical_or(batch.is_prefilling, batch.is_first)
        can_wait = not num_steps and self.may_lag
        if can_wait and not arriving.any():
            return
        proposer, pages = self._proposer, self._pages
        max_catch_up = min(proposer.num_latest(num_steps), _MAX_CATCH_UP * max(1, num_steps))
        room, pieces = proposer.max_num_tokens - len(batch.req_ids), []
        for index, end in enumerate(self._ends):
            if can_wait and not arriving[index]:
                continue
            first = self._held.first_lacking(pages[index], end)
            number = end - first
            if not number:
                continue
            if num_steps and not batch.is_prefilling[index] and number <= min(max_catch_up, room):
                self._catch_up_starts[index] = first
                room -= number
            else:
                pieces.append((index, first, end))
        for of_pass in _split(pieces, proposer.max_num_tokens):
            self._read(batch, of_pass)

    @override
    def end_round(self, batch: Batch, drafts: torch.Tensor | Sequence[Sequence[int]]) -> None:
        room, latest, pages = self._proposer.max_model_len, batch.tokens.tolist(), self._pages
        lists = drafts.tolist() if isinstance(drafts, torch.Tensor) else drafts
        for index, (req_id, end, own) in enumerate(zip(batch.req_ids, self._ends, lists, strict=True)):
            # Passes write the K/V of their inputs; the last draft is only an output.
            if len(own) and not batch.is_prefilling[index] and index not in self._catch_up_starts:
                tokens = [latest[index], *own[:-1]][: room - end]
                if tokens:
                    self._written[req_id] = _Written(end, int(pages[index, end // self._page_size]), tokens)

    @override
    def note_plain_step(self, scheduler_output: SchedulerOutput) -> None:
        inputs, pages = self._proposer.target_runner.input_batch, self._pages
        for index, req_id in enumerate(inputs.req_ids):
            first = int(inputs.num_computed_tokens_cpu[index])
            number = scheduler_output.num_scheduled_tokens.get(req_id, 0)
            self._held.forget(pages[index], first, first + number)
        self._written = {}

    @property
    @override
    def num_catch_up_tokens(self) -> int:
        return sum(self._ends[index] - first for index, first in self._catch_up_starts.items())

    @override
    def extend(self, draft_pass: Pass) -> Pass:
        requests = draft_pass.queries.requests.tolist()
        firsts = [self._catch_up_starts.get(index, self._ends[index]) for index in requests]
        lens = np.array([self._ends[index] - first for index, first in zip(requests, firsts, strict=True)])
        if not lens.any():
            return draft_pass
        queries = draft_pass.queries
        queries = Queries(queries.requests, queries.firsts - lens, queries.lens + lens)
        pieces = [
            (index, first, self._ends[index])
            for index, first in zip(requests, firsts, strict=True)
            if first < self._ends[index]
        ]
        tokens, positions, slots = self._inputs_of(pieces)
        device = tokens.device
        own, added = (on_device(np.flatnonzero(m), device) for m in (queries.steps >= 0, queries.steps < 0))

        def merge(of_pass: torch.Tensor, of_catch_up: torch.Tensor) -> torch.Tensor:
            merged = of_pass.new_empty(len(of_pass) + len(of_catch_up))
            merged[own], merged[added] = of_pass, of_catch_up.to(of_pass.dtype)
            return merged

        parts = [
            replace(part, positions=merge(part.positions, positions), slots=merge(part.slots, more))
            for part, more in zip(draft_pass.parts, slots, strict=True)
        ]
        return replace(draft_pass, tokens=merge(draft_pass.tokens, tokens), queries=queries, parts=parts)

    @override
    def note_caught_up(self, queries: Queries) -> None:
        for index in queries.requests.tolist():
            if index in self._catch_up_starts:
                self._held.add(self._pages[index], self._catch_up_starts.pop(index), self._ends[index])

    def _read(self, batch: Batch, pieces: Sequence[Piece]) -> None:
        """Run a catch-up pass over the whole context.

        Attending to the whole context, not to a view, makes pages in the prefix cache independent of the
        request that filled them, as with vLLM's own draft models.
        """
        proposer = self._proposer
        tokens, positions, slots = self._inputs_of(pieces)
        lens = [end - first for _, first, end in pieces]
        starts = torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32)
        ends = [end for _, _, end in pieces]
        common = proposer.common.replace(
            query_start_loc=starts.to(proposer.device),
            query_start_loc_cpu=starts,
            num_reqs=len(pieces),
            num_actual_tokens=len(tokens),
            max_query_len=max(lens),
            seq_lens=on_device(ends, proposer.device).to(torch.int32),
            max_seq_len=max(ends),
        )
        indices = on_device([index for index, _, _ in pieces], proposer.device)
        tables = [batch.block_tables[group.kv_cache_group][indices] for group in proposer.groups]
        self.forward(tokens, positions, slots, proposer.whole_metadata(tables, common, slots))
        for index, first, end in pieces:
            self._held.add(self._pages[index], first, end)

    def _inputs_of(self, pieces: Sequence[Piece]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Return tokens [num_tokens] int32, positions [num_tokens] int64, and slots by layer group."""
        proposer = self._proposer
        tokens = torch.cat([self._tokens_of(*piece) for piece in pieces])
        positions = np.concatenate([np.arange(first, end) for _, first, end in pieces])
        lens = [end - first for _, first, end in pieces]
        indices = np.repeat([index for index, _, _ in pieces], lens)
        slots = []
        for group in proposer.groups:
            size = group.cache.block_size
            pages = self._table(group)[indices, positions // size].astype(np.int64)
            own = pages * size + positions % size
            if group.reach is not None:
                # Pages that the latest step no longer reached may be reassigned (`views/windows.py`).
                latest = torch.tensor(self._starts)[indices]
                first_kept = group.reach.first_seen(latest).numpy() // size * size
                own[positions < first_kept] = PAD_SLOT
            slots.append(on_device(own, proposer.device))
        return tokens, on_device(positions, proposer.device), slots

    def _tokens_of(self, index: int, first: int, end: int) -> torch.Tensor:
        """Return verified tokens `first` to `end` of a request, [end - first] int32."""
        start = self._starts[index]
        offset = self._query_starts[index] - start  # from positions to indices in the target's step
        of_step = slice(max(first, start) + offset, max(end, start) + offset)
        tokens = self._target_token_ids[of_step].to(torch.int32)
        if first >= start:
            return tokens
        # Under asynchronous scheduling the host has -1 for tokens that arrived too late.
        known = self._proposer.target_runner.input_batch.token_ids_cpu[index, first : min(end, start)]
        return torch.cat([on_device(known.clip(min=0), tokens.device).to(torch.int32), tokens])


def draft_beyond_the_end(proposer: "MagicDecProposer") -> None:
    """Keep drafting for the whole batch when one request nears the model's maximum length.

    vLLM's runner would draft for no request then, and the draft's cache would fall behind.
    """
    runner = proposer.target_runner
    room = proposer.speculative_config.num_speculative_tokens
    runner.effective_drafter_max_model_len = runner.max_model_len + room


def _split(pieces: Sequence[Piece], max_tokens: int) -> list[list[Piece]]:
    """Split the pieces into passes of at most `max_tokens` tokens, in order."""
    passes: list[list[Piece]] = []
    room = 0
    for index, first, end in pieces:
        while first < end:
            if not room:
                passes.append([])
                room = max_tokens
            taken = min(room, end - first)
            passes[-1].append((index, first, first + taken))
            first, room = first + taken, room - taken
    return passes
