# SPDX-License-Identifier: Apache-2.0
"""Drafting models of the V2 runner: the target itself, or a draft model with its own KV cache.

As on the V1 runner (`drafts_v1.py`), but without synchronising with the device: the host only knows upper
bounds on the number of verified tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn as nn
from typing_extensions import override
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.utils import AttentionGroup

from vllm_magicdec.drafting.drafter import OwnCache
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.views.round import Batch, PageView, Part, Pass, Queries
from vllm_magicdec.views.tensors import PAD_SLOT, on_device
from vllm_magicdec.vllm_api.attention_groups import refuse_small_buffers
from vllm_magicdec.vllm_api.embeddings import refuse_more_inputs
from vllm_magicdec.vllm_api.kv_cache import log_draft_memory, refuse_draft_without_whole_context

if TYPE_CHECKING:  # imports this module
    from vllm_magicdec.vllm_api.runner_v2 import MagicDecSpeculator


class Draft(ABC):
    """The model that drafts; its passes run in `speculator`."""

    queries_of_steps: Sequence[int] = (1,)
    """Possible numbers of queries per request in a step's pass; CUDA graphs are captured for each."""

    def __init__(self, speculator: "MagicDecSpeculator") -> None:
        self._speculator = speculator

    @property
    def own_cache(self) -> OwnCache | None:
        """The draft's own KV cache; None: it drafts from the target's."""
        return None

    @property
    def layer_names(self) -> set[str] | None:
        """The draft's attention layers; None: all layers."""
        return None

    @abstractmethod
    def load(self, target: nn.Module, target_layer_names: set[str]) -> nn.Module:
        """Load and return the drafting model; `target_layer_names` are the target's attention layers."""

    def refuse_inputs(self, model_state: Any) -> None:
        """Call `refuse_more_inputs` for the drafting model."""
        refuse_more_inputs(self._speculator.model, model_state)

    @property
    def attention_groups(self) -> Sequence[Sequence[AttentionGroup]]:
        """vLLM's attention groups, by KV-cache group, whose builders the draft's layers may use."""
        return self._speculator.target_attn_groups

    def lay_out(  # noqa: B027
        self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]
    ) -> None:
        """Prepare for drafting with `groups`, once vLLM has allocated the KV cache."""

    def warm_up(self, inputs: InputBatch) -> None:  # noqa: B027
        """Run a draft model's step without KV cache, so that vLLM can measure its peak memory."""

    def note_step(
        self,
        inputs: InputBatch,
        slots: Mapping[str, torch.Tensor],  # [num_tokens or more] int64, by layer, including the draft's
        activations: Sequence[torch.Tensor] | None,  # auxiliary, [num_tokens or more, hidden_size] each
    ) -> None:
        """Record the target's step before a round."""
        self._inputs = inputs

    @property
    def reads_ahead(self) -> bool:
        """Whether a pass may take several unverified tokens of a request."""
        return True

    def forward(
        self,
        tokens: torch.Tensor,  # [num_tokens] int32
        positions: torch.Tensor,  # [num_tokens] int64, or [num_dims, num_tokens] under M-RoPE
        slots: Sequence[torch.Tensor],  # [num_tokens] int64 each, destination of K/V, by layer group
        attn_metadata: Mapping[str, Any],  # by layer
    ) -> torch.Tensor:
        """Run a pass and return its hidden states, [num_tokens, hidden_size]."""
        speculator = self._speculator
        return speculator.forward(tokens, positions, speculator.slots_by_layer(slots), attn_metadata)

    def extend(self, draft_pass: Pass) -> Pass:
        """Let the round's first pass, or one before it, take verified tokens that the draft's cache lacks.

        Returns:
            The pass, with a query at step -1 of every request if some lack their last verified token.
        """
        return draft_pass


class TargetDraft(Draft):
    """The target drafts for itself: its verification fills the KV cache."""

    @override
    def load(self, target: nn.Module, target_layer_names: set[str]) -> nn.Module:
        return target


class LoadedDraft(Draft):
    """A model that vLLM loads as for `draft_model`, with its layers in the KV cache's groups."""

    @property
    @override
    def layer_names(self) -> set[str]:
        return self._speculator.draft_attn_layer_names

    @override
    def load(self, target: nn.Module, target_layer_names: set[str]) -> nn.Module:
        return StandaloneARSpeculator.load_draft_model(self._speculator, target, target_layer_names)

    @override
    def refuse_inputs(self, model_state: Any) -> None:
        refuse_more_inputs(self._speculator.model)

    @property
    @override
    def attention_groups(self) -> Sequence[Sequence[AttentionGroup]]:
        return self._speculator.attn_groups


class ModelDraft(LoadedDraft, OwnCache):
    """A draft model that computes the K/V of all tokens itself.

    A round's steps write the K/V of their input tokens: the last verified token and all drafts but the
    last. Rejected ones are overwritten. If all drafts were accepted, the cache lacks the token before the
    next round's first one. Only the device knows, so the first step always prepends that token (two queries
    per request); writing its K/V twice is harmless. Wide passes leave several drafts without K/V, which a
    pass over the round's view reads before them. Longer gaps (a prompt's chunk, tokens of plain steps) take
    a pass over all of the draft's pages.

    The host tracks an upper bound on the lacking tokens at the end of each request's cache. Tokens too
    many are computed again; where a request has fewer, the pass is padded with tokens that write nowhere.

    Pages shared with the target must be complete in both models' layers when vLLM adds them to the prefix
    cache, so tokens of plain steps are caught up with before a page can be full.
    """

    queries_of_steps = (1, 2)

    def __init__(self, speculator: "MagicDecSpeculator") -> None:
        super().__init__(speculator)
        # All by row of vLLM's request states.
        num_rows = speculator.max_num_reqs
        self._owners: list[str | None] = [None] * num_rows
        self._lacking = np.zeros(num_rows, dtype=np.int64)  # upper bound on lacking tokens at the end
        self._written = np.zeros(num_rows, dtype=np.int64)  # tokens written by the latest round's steps
        self._ends = np.zeros(num_rows, dtype=np.int64)  # upper bound on verified tokens
        self._unsure = np.zeros(num_rows, dtype=np.int64)  # drafts that the latest step verified
        # [num_reqs] bool, requests whose first step has a catch-up token.
        self._has_catch_up: np.ndarray | None = None
        # Requests whose lacking tokens are read over the round's view.
        self._in_view: Queries | None = None

    @property
    @override
    def own_cache(self) -> OwnCache:
        return self

    @override
    def lay_out(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> None:
        refuse_draft_without_whole_context(groups)
        refuse_small_buffers(self.attention_groups)
        log_draft_memory(kv_cache_config, groups)
        self._page_size = groups[0].cache.block_size
        # vLLM may have freed the pages that layers with a window need for catching up late.
        self._may_lag = all(group.reach is None for group in groups)

    @override
    def warm_up(self, inputs: InputBatch) -> None:
        speculator = self._speculator
        hidden_states = speculator.forward(inputs.input_ids, inputs.positions, {}, None)
        speculator.compute_draft_logits(hidden_states[: inputs.num_reqs], 0)

    @override
    def begin_round(self, batch: Batch) -> None:
        inputs, num_reqs = self._inputs, len(batch.req_ids)
        rows = self._rows = inputs.idx_mapping_np[:num_reqs]
        taken = inputs.num_scheduled_tokens[:num_reqs].astype(np.int64)
        known_lens = np.asarray(batch.known_lens, dtype=np.int64)
        self._has_prompt = np.asarray(inputs.is_prefilling_np[:num_reqs], dtype=bool)
        is_same = np.array(
            [self._owners[row] == req_id for row, req_id in zip(rows, batch.req_ids, strict=True)]
        )
        # A preempted request resumes at the start of a page.
        goes_on = is_same & (known_lens - taken == self._ends[rows])
        lacking = np.where(self._has_prompt & ~goes_on, 0, self._lacking[rows])
        was_complete = lacking == 0
        # A verification adds tokens that the round's steps have written, and at most one more.
        decoded = np.maximum(1, lacking + taken - self._written[rows])
        lacking = np.where(self._has_prompt, lacking + taken, decoded)
        self._lacking[rows] = np.minimum(lacking, known_lens)
        drafts = inputs.num_draft_tokens_per_req
        verified = np.zeros_like(taken) if drafts is None else drafts[:num_reqs].astype(np.int64)
        # The scheduler may not know the result of the previous step either.
        self._bounds = known_lens - verified - self._unsure[rows]
        # Whether all lacking tokens are of the target's step and not of a prompt.
        self._lacks_only_step = was_complete & ~self._has_prompt
        self._unsure[rows], self._written[rows], self._ends[rows] = verified, 0, known_lens
        for row, req_id in zip(rows, batch.req_ids, strict=True):
            self._owners[row] = req_id
        self._has_catch_up = self._in_view = None

    @override
    def catch_up(self, batch: Batch, num_steps: int) -> None:
        # Without a step to follow, tokens of plain steps can wait.
        speculator, num_reqs = self._speculator, len(batch.req_ids)
        lacking = self._lacking[self._rows]
        is_due = lacking > 0
        if not num_steps:
            if self._may_lag:
                ends = np.asarray(batch.known_lens) // self._page_size
                is_due &= self._has_prompt | (ends > (self._bounds - lacking) // self._page_size)
        elif speculator.takes_passes:
            is_due &= ~self._leave_to_view(is_due, lacking, num_steps)
        elif speculator.num_latest(num_steps) > 0 and 2 * num_reqs <= speculator.max_num_tokens:
            has_catch_up = (lacking == 1) & ~self._has_prompt
            self._has_catch_up = has_catch_up if has_catch_up.any() else None
            is_due &= ~has_catch_up
        due = np.flatnonzero(is_due).tolist()
        for of_pass in _split([(index, int(lacking[index])) for index in due], speculator.max_num_tokens):
            self._read(batch, lacking, of_pass)
        self._lacking[self._rows[is_due]] = 0

    def _leave_to_view(self, is_due: np.ndarray, lacking: np.ndarray, num_steps: int) -> np.ndarray:
        """Return the requests, [num_reqs] bool, that wait for the round's first wide pass."""
        speculator = self._speculator
        # Passes by lookups on the host differ in requests and lengths.
        most = speculator.num_latest(num_steps) if speculator.speculative_config.looks_up_on_device else 0
        in_view = is_due & self._lacks_only_step & (lacking <= np.minimum(most, self._bounds))
        requests = np.flatnonzero(in_view)
        if not len(requests) or lacking[requests].sum() > speculator.max_num_tokens:
            return np.zeros_like(is_due)
        self._in_view = Queries(requests, firsts=-lacking[requests], lens=lacking[requests])
        return in_view

    @override
    def extend(self, draft_pass: Pass) -> Pass:
        self._read_in_view(draft_pass)
        if draft_pass.queries.firsts[0] or self._has_catch_up is None:
            return draft_pass
        batch, num_reqs = self._speculator.batch, len(draft_pass.tokens)
        rows = torch.arange(num_reqs, device=draft_pass.tokens.device)
        positions = (batch.context_lens - 1).clamp(min=0)
        slots = self._slots_of(batch, rows, positions, on_device(self._has_catch_up, rows.device).bool())
        parts = [
            replace(
                part,
                positions=torch.stack([positions, part.positions], dim=1).flatten(),
                slots=torch.stack([own, part.slots], dim=1).flatten(),
            )
            for part, own in zip(draft_pass.parts, slots, strict=True)
        ]
        tokens = torch.stack([self._tokens_of(rows, positions), draft_pass.tokens], dim=1).flatten()
        return replace(draft_pass, tokens=tokens, queries=Queries.uniform(num_reqs, -1, 2), parts=parts)

    def _read_in_view(self, draft_pass: Pass) -> None:
        """Read the verified tokens that were left to the view of the round's first pass."""
        queries, self._in_view = self._in_view, None
        if queries is None:
            return
        speculator, batch = self._speculator, self._speculator.batch
        device = batch.context_lens.device
        rows, requests = on_device(queries.request_indices, device), on_device(queries.requests, device)
        positions = batch.context_lens[rows] + on_device(queries.steps, device)
        # Tokens before the step have K/V, those of a prompt by attention to the whole context.
        slots = self._slots_of(batch, rows, positions, positions >= self._step_starts[rows])
        attn_metadata: dict[str, Any] = {}
        for index, (part, own) in enumerate(zip(draft_pass.parts, slots, strict=True)):
            assert isinstance(part.view, PageView)
            lens = part.view.lens[requests] - int(draft_pass.queries.lens[0])
            view = part.view.of_requests(requests, lens)
            in_view = Part(positions, own, view)
            attn_metadata |= speculator.page_metadata.of_part(index, in_view, queries, view)
        tokens = self._tokens_of(rows, positions)
        speculator.forward(tokens, positions, speculator.slots_by_layer(slots), attn_metadata)
        self._lacking[self._rows[queries.requests]] = 0

    @override
    def end_round(self, batch: Batch, drafts: torch.Tensor | Sequence[Sequence[int]]) -> None:
        # Steps write the K/V of their inputs; the last draft is only an output.
        if isinstance(drafts, torch.Tensor):
            number = np.full(len(batch.req_ids), drafts.shape[1])
        else:
            number = np.array([len(own) for own in drafts])
        self._written[self._rows] = np.where(batch.is_prefilling, 0, number)
        if self._has_catch_up is not None:
            self._lacking[self._rows[self._has_catch_up]] = 0
        self._has_catch_up = None  # dummy steps may follow

    def _read(self, batch: Batch, lacking: np.ndarray, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Run a catch-up pass over the whole context.

        Attending to the whole context, not to a view, makes pages in the prefix cache independent of the
        request that filled them, as with vLLM's own draft models. A piece has the index in the batch, and
        first and end of a range among the request's `lacking` tokens (upper bounds, [num_reqs] int64).
        """
        speculator, device = self._speculator, batch.context_lens.device
        lens = [end - first for _, first, end in pieces]
        requests = [index for index, _, _ in pieces]
        rows = on_device(np.repeat(requests, lens), device)
        within = on_device(np.concatenate([np.arange(first, end) for _, first, end in pieces]), device)
        # [num_reqs], the first lacking token.
        firsts = (batch.context_lens - on_device(lacking, device)).clamp(min=0)
        positions = firsts[rows] + within
        is_written = positions < batch.context_lens[rows]
        positions = positions.clamp(max=speculator.max_model_len - 1)
        slots = self._slots_of(batch, rows, positions, is_written)
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        indices = on_device(requests, device)
        attn_metadata = speculator.page_metadata.of_all_pages(
            query_start_loc=on_device(starts, device).to(torch.int32),
            query_start_loc_cpu=torch.from_numpy(starts),
            max_query_len=max(lens),
            seq_lens=(firsts[indices] + on_device([end for _, _, end in pieces], device)).to(torch.int32),
            max_seq_len=int(np.asarray(batch.known_lens)[requests].max()),
            block_tables=[table[indices] for table in batch.block_tables],
            slots=slots,
            positions=positions,
        )
        tokens = self._tokens_of(rows, positions)
        speculator.forward(tokens, positions, speculator.slots_by_layer(slots), attn_metadata)

    def _tokens_of(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return tokens [num_tokens] int32 at `positions` of requests `rows` of the batch."""
        speculator = self._speculator
        known = speculator.req_states.all_token_ids.gpu  # [max_num_reqs, max_model_len] int32
        return known[speculator.idx_mapping[rows], positions].to(torch.int32)

    def _slots_of(
        self, batch: Batch, rows: torch.Tensor, positions: torch.Tensor, is_written: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return slots [num_tokens] int64 by layer group; arguments as for `_tokens_of`."""
        slots = []
        for group in self._speculator.groups:
            size = group.cache.block_size
            table = batch.block_tables[group.kv_cache_group]
            pages = table[rows, positions // size].long()
            is_own = is_written
            if group.reach is not None:
                # Pages that the latest step no longer reached may be reassigned (`views/windows.py`).
                first_kept = group.reach.first_seen(self._step_starts[rows]) // size * size
                is_own = is_own & (positions >= first_kept)
            slots.append((pages * size + positions % size).masked_fill(~is_own, PAD_SLOT))
        return slots

    @property
    def _step_starts(self) -> torch.Tensor:
        """[num_reqs] int64, first positions of the target's step."""
        inputs = self._inputs
        starts = inputs.query_start_loc[: inputs.num_reqs + 1].long()
        return inputs.seq_lens[: inputs.num_reqs].long() - starts.diff()


def _split(pieces: Sequence[tuple[int, int]], max_tokens: int) -> list[list[tuple[int, int, int]]]:
    """Split (request, number of tokens) pieces into passes of at most `max_tokens` tokens, in order."""
    passes: list[list[tuple[int, int, int]]] = []
    room = 0
    for index, number in pieces:
        first = 0
        while first < number:
            if not room:
                passes.append([])
                room = max_tokens
            taken = min(room, number - first)
            passes[-1].append((index, first, first + taken))
            first, room = first + taken, room - taken
    return passes
