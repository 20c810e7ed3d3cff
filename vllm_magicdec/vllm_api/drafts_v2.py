# SPDX-License-Identifier: Apache-2.0
"""Who drafts on the V2 runner: the target itself, or a model with a KV cache of its own.

As on the V1 runner (`drafts_v1.py`), but here nothing may wait for the device: the host knows upper bounds
of what was verified and no more.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn as nn
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.utils import AttentionGroup

from vllm_magicdec.drafting.drafter import OwnCache
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.views.base import PAD_SLOT, Batch, DraftStep, on_device
from vllm_magicdec.vllm_api.attention_groups import make_attention_groups, refuse_small_buffers
from vllm_magicdec.vllm_api.draft_pages_v2 import find_pages
from vllm_magicdec.vllm_api.embeddings import refuse_more_inputs
from vllm_magicdec.vllm_api.kv_cache import refuse_draft_without_whole_context, say_what_draft_takes
from vllm_magicdec.vllm_api.ring_cache import offer_rings

if TYPE_CHECKING:  # it makes what is here
    from vllm_magicdec.vllm_api.runner_v2 import MagicDecSpeculator


class Draft(ABC):
    """Who drafts.

    Args:
        speculator: makes its passes.
    """

    queries_of_steps: Sequence[int] = (1,)
    """Query tokens per request of draft steps, 1 first: CUDA graphs are captured for each."""

    def __init__(self, speculator: "MagicDecSpeculator") -> None:
        self._speculator = speculator

    @property
    def own_cache(self) -> OwnCache | None:
        """See `drafting.drafter.Drafter`."""
        return None

    @property
    def layer_names(self) -> set[str] | None:
        """Attention layers that draft; None: all there are."""
        return None

    @abstractmethod
    def load(self, target: nn.Module, target_layer_names: set[str]) -> nn.Module:
        """What drafts; `target_layer_names` are of the target's attention layers."""

    def refuse_inputs(self, model_state: Any) -> None:
        """Refuse models that take more than tokens (or embeddings) and positions.

        Args:
            model_state: what vLLM's runner prepares the target's inputs with.

        Raises:
            MagicDecConfigError: with the reason and the way out.
        """
        refuse_more_inputs(self._speculator.model, model_state)

    @property
    def attention_groups(self) -> Sequence[Sequence[AttentionGroup]]:
        """vLLM's, with the builders that the draft's layers may use, by KV-cache group."""
        return self._speculator.target_attn_groups

    @abstractmethod
    def lay_out(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> None:
        """The KV cache is there.

        Args:
            kv_cache_config: of all layers.
            groups: the draft's layers.
        """

    @abstractmethod
    def warm_up(self, inputs: InputBatch) -> None:
        """vLLM measures what a step of `inputs` takes of the device's memory; there is no KV cache yet."""

    def note_step(
        self,
        inputs: InputBatch,
        slots: Mapping[str, torch.Tensor],
        activations: Sequence[torch.Tensor] | None,
    ) -> None:
        """What the target's step took, before a round.

        Args:
            inputs: of the step.
            slots: [num_tokens or more] int64, where their K/V is, by layer, the draft's among them.
            activations: vLLM's auxiliary hidden states, [num_tokens or more, hidden_size] each, if they
                were asked for.
        """
        self._inputs = inputs

    def tables(self, block_tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[num_reqs, max_pages] int32 each by KV-cache group, the pages of the draft's layers.

        Args:
            block_tables: vLLM's, [num_reqs, max_blocks] int32 each.
        """
        return list(block_tables)

    @property
    def reads_ahead(self) -> bool:
        """Whether a pass may take several tokens of a request that were not verified."""
        return True

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        attn_metadata: Mapping[str, Any],
    ) -> torch.Tensor:
        """Hidden states of a step or pass, [num_tokens, hidden_size].

        Args:
            tokens: [num_tokens] int32.
            positions: [num_tokens] int64, or [num_dims, num_tokens] under M-RoPE.
            slots: [num_tokens] int64 each, where their K/V goes, by group of layers.
            attn_metadata: by layer.
        """
        speculator = self._speculator
        return speculator.forward(tokens, positions, speculator.slots_by_layer(slots), attn_metadata)

    def lead(self, tokens: torch.Tensor, step: DraftStep) -> tuple[torch.Tensor, DraftStep]:
        """A round's step with the tokens before its own that the draft's cache lacks.

        Args:
            tokens: [num_reqs] int32, the query tokens.
            step: where they look and where their K/V goes.

        Returns:
            Both as they are, or with [num_reqs x n] tokens, positions and slots, n one of
            `queries_of_steps`, each request's own token last of its n.
        """
        return tokens, step


class TargetDraft(Draft):
    """The target itself: its verification writes all that the cache has to hold."""

    def load(self, target: nn.Module, target_layer_names: set[str]) -> nn.Module:
        """See `Draft`; nothing is loaded, no attention layer is added."""
        return target

    def lay_out(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> None:
        """See `Draft`; nothing is kept of it."""

    def warm_up(self, inputs: InputBatch) -> None:
        """Nothing to warm up: the target's own dummy run has done this model's."""


class LoadedDraft(Draft):
    """A model that vLLM loads as it does for `draft_model`, with layers in the KV cache's groups."""

    @property
    def layer_names(self) -> set[str]:
        """See `Draft`."""
        return self._speculator.draft_attn_layer_names

    def load(self, target: nn.Module, target_layer_names: set[str]) -> nn.Module:
        """See `Draft`."""
        return StandaloneARSpeculator.load_draft_model(self._speculator, target, target_layer_names)

    def refuse_inputs(self, model_state: Any) -> None:
        """See `Draft`; the target's are its own affair."""
        refuse_more_inputs(self._speculator.model)

    @property
    def attention_groups(self) -> Sequence[Sequence[AttentionGroup]]:
        """See `Draft`; those that vLLM makes for draft models."""
        return self._speculator.attn_groups


class ModelDraft(LoadedDraft):
    """A model that reads its own tokens.

    A round's steps write the K/V of what they take: the last verified token and all drafts but the last.
    What was rejected of them is written over. If all stood, the cache lacks the token before the next
    round's first one. Whether they did only the device knows, so that token always goes ahead in the first
    step, of two queries per request; where its K/V is there, the same is written again. What is more (a
    prompt's chunk, what plain steps decoded) a pass of its own reads over all of the draft's pages.

    Of each request the host knows how many of the latest entries of its cache are lacking, at most. That is
    enough: a token too many is read again. Where there are too few of them, the pass's last tokens are
    nobody's and write nowhere.

    A page that is shared with the target is complete in both models' layers when vLLM takes it for the
    prefix cache: what plain steps decode is read at the latest when a page may be full, so that pages need
    no record of their own. Of a ring all that a round shows is read in the round after its prompt, and what
    plain steps decode waits for the next round.

    Args:
        speculator: makes its passes.
    """

    queries_of_steps = (1, 2)

    def __init__(self, speculator: "MagicDecSpeculator") -> None:
        super().__init__(speculator)
        # By row of vLLM's request states.
        num_rows = speculator.max_num_reqs
        self._owners: list[str | None] = [None] * num_rows
        self._lacking = np.zeros(num_rows, dtype=np.int64)  # latest entries of the cache, at most
        self._is_read = np.zeros(num_rows, dtype=bool)  # whether its ring holds anything
        self._written = np.zeros(num_rows, dtype=np.int64)  # tokens, by the latest round's steps
        self._ends = np.zeros(num_rows, dtype=np.int64)  # verified tokens after the latest step, at most
        self._unsure = np.zeros(num_rows, dtype=np.int64)  # drafts that the latest step verified
        self._leads: np.ndarray | None = None  # [num_reqs] bool, whose first step has a token ahead

    @property
    def own_cache(self) -> OwnCache:
        """See `Draft`."""
        return self

    def load(self, target: nn.Module, target_layer_names: set[str]) -> nn.Module:
        """See `Draft`."""
        model = super().load(target, target_layer_names)
        vllm_config = self._speculator.vllm_config
        layer_names = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).keys()
        offer_rings(vllm_config, layer_names - target_layer_names)
        return model

    @property
    def attention_groups(self) -> Sequence[Sequence[AttentionGroup]]:
        """See `Draft`."""
        return self._attention_groups

    def tables(self, block_tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Draft`."""
        return self.pages.tables(block_tables)

    def lay_out(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> None:
        """See `Draft`.

        Raises:
            MagicDecConfigError: no layer keeps the whole context, or its attention has no room.
        """
        refuse_draft_without_whole_context(groups)
        speculator, number = self._speculator, groups[0].kv_cache_group
        vllm_config, device = speculator.vllm_config, speculator.device
        self.pages = find_pages(vllm_config, kv_cache_config, number, device)
        self._attention_groups = list(speculator.attn_groups)
        if not self._attention_groups[number]:  # vLLM makes none where it does not lay out the memory
            self._attention_groups[number] = make_attention_groups(
                groups[0], speculator.target_attn_groups, vllm_config, device
            )
        refuse_small_buffers(self.attention_groups)
        say_what_draft_takes(kv_cache_config, groups)
        self._page_size = groups[0].cache.block_size
        # What layers with a window would need for tokens that are read late may have been freed by then.
        self._may_lag = all(group.reach is None for group in groups)

    def warm_up(self, inputs: InputBatch) -> None:
        """See `Draft`."""
        speculator = self._speculator
        hidden_states = speculator.forward(inputs.input_ids, inputs.positions, {}, None)
        speculator.compute_draft_logits(hidden_states[: inputs.num_reqs], 0)

    def begin_round(self, batch: Batch) -> None:
        """See `drafting.drafter.OwnCache`."""
        inputs, num_reqs = self._inputs, len(batch.req_ids)
        rows = self._rows = inputs.idx_mapping_np[:num_reqs]
        taken = inputs.num_scheduled_tokens[:num_reqs].astype(np.int64)
        known_lens = np.asarray(batch.known_lens, dtype=np.int64)
        self._has_prompt = np.asarray(inputs.is_prefilling_np[:num_reqs], dtype=bool)
        is_same = np.array(
            [self._owners[row] == req_id for row, req_id in zip(rows, batch.req_ids, strict=True)]
        )
        # A request that was preempted begins again, at a page that is complete.
        goes_on = is_same & (known_lens - taken == self._ends[rows])
        lacking = np.where(self._has_prompt & ~goes_on, 0, self._lacking[rows])
        # After the round's steps, a verification adds tokens that they have written and one that they
        # may have not.
        decoded = np.maximum(1, lacking + taken - self._written[rows])
        if self.pages.reads_whole_prompts:
            lacking = np.where(self._has_prompt, lacking + taken, decoded)
        else:
            self._is_read[rows] &= is_same & ~self._has_prompt
            lacking = np.where(self._is_read[rows], decoded, known_lens)
        self._lacking[rows] = np.minimum(lacking, self.pages.most_entries(known_lens))
        drafts = inputs.num_draft_tokens_per_req
        verified = np.zeros_like(taken) if drafts is None else drafts[:num_reqs].astype(np.int64)
        # The scheduler may not have heard of the step before either.
        self._bounds = known_lens - verified - self._unsure[rows]
        self._unsure[rows], self._written[rows], self._ends[rows] = verified, 0, known_lens
        for row, req_id in zip(rows, batch.req_ids, strict=True):
            self._owners[row] = req_id
        self._leads = None

    def catch_up(self, batch: Batch, num_steps: int) -> None:
        """See `drafting.drafter.OwnCache`; without a step to follow, what plain steps decode can wait."""
        speculator, num_reqs = self._speculator, len(batch.req_ids)
        whole = self.pages.reads_whole_prompts
        if not whole and not num_steps:
            return
        lacking = self._lacking[self._rows]
        is_due = lacking > 0
        if not whole:
            is_due &= ~np.asarray(batch.is_prefilling)
        if not num_steps:
            if self._may_lag:
                ends = np.asarray(batch.known_lens) // self._page_size
                is_due &= self._has_prompt | (ends > (self._bounds - lacking) // self._page_size)
        elif (
            not speculator.takes_passes
            and speculator.num_latest(num_steps) > 0
            and 2 * num_reqs <= speculator.max_num_tokens
        ):
            leads = (lacking == 1) & ~self._has_prompt
            self._leads = leads if leads.any() else None
            is_due &= ~leads
        due = np.flatnonzero(is_due).tolist()
        for of_pass in _split([(index, int(lacking[index])) for index in due], speculator.max_num_tokens):
            self._read(batch, lacking, of_pass)
        self._lacking[self._rows[is_due]] = 0
        self._is_read[self._rows[~np.asarray(batch.is_prefilling)]] = True

    def end_round(self, batch: Batch, drafts: torch.Tensor | Sequence[Sequence[int]]) -> None:
        """See `drafting.drafter.OwnCache`; how many drafts there are of each request says enough."""
        # A step writes what it takes, and the last draft is what the last step gives.
        if isinstance(drafts, torch.Tensor):
            number = np.full(len(batch.req_ids), drafts.shape[1])
        else:
            number = np.array([len(own) for own in drafts])
        self._written[self._rows] = np.where(batch.is_prefilling, 0, number)
        if self._leads is not None:
            self._lacking[self._rows[self._leads]] = 0
        self._leads = None  # steps that follow are of no round

    def lead(self, tokens: torch.Tensor, step: DraftStep) -> tuple[torch.Tensor, DraftStep]:
        """See `Draft`."""
        if step.index or self._leads is None:
            return tokens, step
        batch = self._speculator.batch
        rows = torch.arange(len(tokens), device=tokens.device)
        positions = (batch.context_lens - 1).clamp(min=0)
        is_leading = on_device(self._leads, tokens.device).bool()
        slots = self._slots_of(batch, rows, positions, is_leading)
        parts = [
            replace(
                part,
                positions=torch.stack([positions, part.positions], dim=1).flatten(),
                slots=torch.stack([own, part.slots], dim=1).flatten(),
            )
            for part, own in zip(step.parts, slots, strict=True)
        ]
        leading = self._tokens_of(rows, positions)
        return torch.stack([leading, tokens], dim=1).flatten(), DraftStep(parts)

    def _read(self, batch: Batch, lacking: np.ndarray, pieces: Sequence[tuple[int, int, int]]) -> None:
        """A pass over all that the cache keeps before its tokens.

        Where every page is there, what is far from the end is read once, so that its K/V may as well know
        of all before, as in a draft model's cache of vLLM's own; and pages that the prefix cache hands on
        are the same whoever filled them.

        Args:
            batch: the round's requests.
            lacking: [num_reqs] int64, latest entries that each lacks, at most.
            pieces: places in the batch, with the first and the end of those of the lacking entries.
        """
        speculator, device = self._speculator, batch.context_lens.device
        lens = [end - first for _, first, end in pieces]
        requests = [index for index, _, _ in pieces]
        rows = on_device(np.repeat(requests, lens), device)
        within = on_device(np.concatenate([np.arange(first, end) for _, first, end in pieces]), device)
        gaps = self.pages.gaps(batch.context_lens)  # this and the next two: [num_reqs]
        num_entries = batch.context_lens - gaps
        firsts = (num_entries - on_device(lacking, device)).clamp(min=0)  # lacking ones
        entries = firsts[rows] + within
        is_there = entries < num_entries[rows]
        positions = self.pages.positions(entries, gaps[rows]).clamp(max=speculator.max_model_len - 1)
        slots = self._slots_of(batch, rows, positions, is_there)
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        places = on_device(requests, device)
        attn_metadata = speculator.page_metadata.of_all_pages(
            query_start_loc=on_device(starts, device).to(torch.int32),
            query_start_loc_cpu=torch.from_numpy(starts),
            max_query_len=max(lens),
            seq_lens=(firsts[places] + on_device([end for _, _, end in pieces], device)).to(torch.int32),
            max_seq_len=int(self.pages.most_entries(np.asarray(batch.known_lens)[requests]).max()),
            block_tables=self.pages.tables_of_entries(batch.block_tables, places, gaps[places]),
            slots=slots,
            positions=positions,
        )
        tokens = self._tokens_of(rows, positions)
        speculator.forward(tokens, positions, speculator.slots_by_layer(slots), attn_metadata)

    def _tokens_of(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int32, at `positions` of the requests at `rows` of the batch; both [num_tokens]."""
        speculator = self._speculator
        known = speculator.req_states.all_token_ids.gpu  # [max_num_reqs, max_model_len] int32
        return known[speculator.idx_mapping[rows], positions].to(torch.int32)

    def _slots_of(
        self, batch: Batch, rows: torch.Tensor, positions: torch.Tensor, is_written: torch.Tensor
    ) -> list[torch.Tensor]:
        """[num_tokens] int64 by group of layers, of `positions` of the requests at `rows` of the batch."""
        slots = []
        for group in self._speculator.groups:
            size = group.cache.block_size
            table = batch.block_tables[group.kv_cache_group]
            pages = table[rows, positions // size].long()
            is_own = is_written
            if group.reach is not None:
                # Pages that the latest step no longer reached may be others' by now (`views/windows.py`).
                first_kept = group.reach.first_seen(self._step_starts[rows]) // size * size
                is_own = is_own & (positions >= first_kept)
            slots.append((pages * size + positions % size).masked_fill(~is_own, PAD_SLOT))
        return slots

    @property
    def _step_starts(self) -> torch.Tensor:
        """[num_reqs] int64, first positions of what the target's step took."""
        inputs = self._inputs
        starts = inputs.query_start_loc[: inputs.num_reqs + 1].long()
        return inputs.seq_lens[: inputs.num_reqs].long() - starts.diff()


def _split(pieces: Sequence[tuple[int, int]], most: int) -> list[list[tuple[int, int, int]]]:
    """Places with numbers of tokens, in passes of at most so many of them, each request's in order."""
    passes: list[list[tuple[int, int, int]]] = []
    room = 0
    for index, number in pieces:
        first = 0
        while first < number:
            if not room:
                passes.append([])
                room = most
            taken = min(room, number - first)
            passes[-1].append((index, first, first + taken))
            first, room = first + taken, room - taken
    return passes
