# SPDX-License-Identifier: Apache-2.0
"""Who drafts on the V1 runner: the target itself, or a model with a KV cache of its own.

The loop, its views and what becomes of the drafts are the same. What differs is behind `Draft`: whose
weights run a pass, over whose layers' KV cache, and what that cache lacks after a verification.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn as nn
from vllm.config import get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from vllm_magicdec.drafting.drafter import OwnCache
from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.views.base import PAD_SLOT, Batch, on_device
from vllm_magicdec.views.passes import Queries
from vllm_magicdec.vllm_api.attention_groups import refuse_small_buffers
from vllm_magicdec.vllm_api.draft_pages_v1 import find_pages
from vllm_magicdec.vllm_api.embeddings import embed, refuse_more_inputs, takes_embeddings
from vllm_magicdec.vllm_api.kv_cache import refuse_draft_without_whole_context, say_what_draft_takes
from vllm_magicdec.vllm_api.kv_transfer import unseen_by_connector
from vllm_magicdec.vllm_api.ring_cache import offer_rings

if TYPE_CHECKING:  # it makes what is here
    from vllm_magicdec.vllm_api.runner_v1 import MagicDecProposer

# Tokens that a round's first pass takes of a request beside its last one, in multiples of a round's drafts.
# They see no more than the view of the round; where more are lacking, a pass over all pages is better.
_MOST_LEADING = 2


@dataclass(frozen=True)
class Leading:
    """Tokens that a pass takes before its own, because the draft's cache lacks them."""

    starts: np.ndarray  # [num_running + 1] int32, where each request's tokens begin, both kinds
    kept: torch.Tensor  # [num_tokens] int64, places of the pass's own tokens
    places: torch.Tensor  # [num_leading] int64, of the others
    tokens: torch.Tensor  # [num_leading] int32
    positions: torch.Tensor  # [num_leading] int64
    slots: Sequence[torch.Tensor]  # [num_leading] int64 each, by group of layers

    def before(self, own: torch.Tensor, leading: torch.Tensor) -> torch.Tensor:
        """[num_leading + num_tokens], of both kinds in the pass's order."""
        both = own.new_empty(len(own) + len(leading))
        both[self.kept], both[self.places] = own, leading.to(own.dtype)
        return both


class Draft(ABC):
    """Who drafts.

    Args:
        proposer: makes its passes.
    """

    def __init__(self, proposer: "MagicDecProposer") -> None:
        self._proposer = proposer

    @property
    def own_cache(self) -> OwnCache | None:
        """See `drafting.drafter.Drafter`."""
        return None

    @property
    def may_lag(self) -> bool:
        """Whether steps after which nothing is drafted may do without the draft altogether."""
        return True

    @property
    def note_plain_step(self) -> Callable[[SchedulerOutput], None] | None:
        """Is shown such a step of the target, when it has been made."""
        return None

    @abstractmethod
    def load(self, target: nn.Module) -> set[str]:
        """Make `proposer.model` what drafts; returns the names of its attention layers."""

    @abstractmethod
    def lay_out(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> None:
        """The KV cache is there.

        Args:
            kv_cache_config: of all layers.
            groups: the draft's layers.
        """

    @abstractmethod
    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's dummy run of a draft model."""

    @abstractmethod
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        attn_metadata: Mapping[str, Any],
    ) -> torch.Tensor:
        """Hidden states of a pass, [num_tokens, hidden_size].

        Args:
            tokens: [num_tokens] int32.
            positions: [num_tokens] int64, or [num_dims, num_tokens] under M-RoPE.
            slots: [num_tokens] int64 each, where their K/V goes, by group of layers.
            attn_metadata: by layer.
        """

    @contextmanager
    def _in_pass(
        self, num_tokens: int, slots: Sequence[torch.Tensor], attn_metadata: Mapping[str, Any]
    ) -> Iterator[int]:
        """vLLM's context of a forward pass, whose number of tokens, as its graphs want it, this yields.

        Args:
            num_tokens: of the pass.
            slots: as for `forward`.
            attn_metadata: as for `forward`.
        """
        proposer = self._proposer
        # Graphs share their memory, and the log probabilities of a prompt are made of the target's hidden
        # states after the draft.
        graph_mode, num_padded, num_across_dp = proposer._determine_batch_execution_and_padding(
            # Of the target's graphs of these sizes, vLLM's class would take those without adapters.
            num_tokens,
            use_cudagraphs=not proposer.target_runner.num_prompt_logprobs and not proposer.has_adapters,
        )
        with (
            unseen_by_connector(),
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
        """What the target's step took, before a round.

        Args:
            common: of the step.
            target_token_ids: [num_tokens] int32.
        """
        self._target_common, self._target_token_ids = common, target_token_ids

    def note_activations(  # noqa: B027
        self, positions: torch.Tensor, activations: torch.Tensor, slots: Mapping[str, torch.Tensor]
    ) -> None:
        """What that step's tokens left in the target; a draft that makes nothing of it need not look.

        Args:
            positions: [num_tokens] int64, or [num_dims, num_tokens] under M-RoPE.
            activations: [num_tokens, hidden_size], of the last layer; or vLLM's auxiliary hidden states, if
                they were asked for, one layer's after the other's.
            slots: [num_tokens or more] int64, where their K/V is, by layer, the draft's among them.
        """

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

    @property
    def num_leading(self) -> int:
        """Tokens that the round's next passes take beside those that they are asked for, at most."""
        return 0

    def lead(self, queries: Queries) -> Leading | None:
        """What a pass has to take before its own tokens, `queries`."""
        return None

    def note_led(self, queries: Queries) -> None:
        """Such a pass has run."""
        raise AssertionError("no pass has taken other tokens than its own")


class TargetDraft(Draft):
    """The target itself: its verification writes all that the cache has to hold."""

    def load(self, target: nn.Module) -> set[str]:
        """See `Draft`; nothing is loaded, its attention layers are the draft's."""
        refuse_more_inputs(target)
        proposer = self._proposer
        proposer.model = target
        layers = get_layers_from_vllm_config(proposer.vllm_config, AttentionLayerBase)
        return {
            name
            for name, layer in layers.items()
            if layer.get_kv_cache_spec(proposer.vllm_config) is not None
        }

    def lay_out(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> None:
        """See `Draft`; nothing is kept of it."""

    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to warm up or capture: the target's own dummy run has done this model's."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        attn_metadata: Mapping[str, Any],
    ) -> torch.Tensor:
        """See `Draft`."""
        proposer = self._proposer
        num_tokens, runner = tokens.shape[0], proposer.target_runner
        with self._in_pass(num_tokens, slots, attn_metadata) as num_padded:
            # The target's CUDA graphs read their inputs where its runner keeps them.
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
    """What a round's passes wrote of a request into the draft's cache."""

    first: int  # position
    page: int  # of that position, in the KV cache
    tokens: Sequence[int]


class LoadedDraft(Draft):
    """A model that vLLM loads as it does for `draft_model`, with layers in the KV cache's groups.

    Args:
        proposer: makes its passes.
    """

    def load(self, target: nn.Module) -> set[str]:
        """See `Draft`."""
        DraftModelProposer.load_model(self._proposer, target)
        return set(self._proposer._draft_attn_layer_names)

    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """See `Draft`."""
        DraftModelProposer.dummy_run(self._proposer, *args, **kwargs)

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, num_padded: int) -> Any:
        """What the model gives for a pass; its CUDA graphs read their inputs from vLLM's buffers.

        Args:
            tokens: as for `forward`.
            positions: as for `forward`.
            num_padded: tokens of the pass as its graphs want them.
        """
        proposer, num_tokens = self._proposer, tokens.shape[0]
        proposer.input_ids[:num_tokens] = tokens
        proposer.positions[:num_tokens] = positions
        return proposer.model(
            input_ids=proposer.input_ids[:num_padded],
            positions=proposer.positions[:num_padded],
            inputs_embeds=None,
        )


class ModelDraft(LoadedDraft):
    """A model that reads its own tokens.

    A round's passes write the K/V of what they take: the last verified token and all drafts but the last.
    What was rejected of them is written over. What the cache then lacks of the verified tokens (the last
    draft, if all stood; a prompt's chunk; what plain steps decoded) the draft reads before or in the next
    round's first pass. Waits for the device a few times a round.

    Args:
        proposer: makes its passes.
    """

    def __init__(self, proposer: "MagicDecProposer") -> None:
        super().__init__(proposer)
        self._written: dict[str, _Written] = {}  # by request, of the latest round
        self._leading: dict[int, int] = {}  # by place in the batch, the first position

    def load(self, target: nn.Module) -> set[str]:
        """See `Draft`."""
        layer_names = super().load(target)
        refuse_more_inputs(self._proposer.model)
        offer_rings(self._proposer.vllm_config, layer_names)
        return layer_names

    def lay_out(self, kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> None:
        """See `Draft`.

        Raises:
            MagicDecConfigError: no layer keeps the whole context, or its attention has no room.
        """
        refuse_draft_without_whole_context(groups)
        proposer = self._proposer
        refuse_small_buffers(proposer.attention_groups)
        self.pages = find_pages(
            proposer.vllm_config, kv_cache_config, proposer.target_runner, groups, proposer.device
        )
        say_what_draft_takes(kv_cache_config, groups)
        draft_beyond_the_end(proposer)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        attn_metadata: Mapping[str, Any],
    ) -> torch.Tensor:
        """See `Draft`."""
        num_tokens = tokens.shape[0]
        with self._in_pass(num_tokens, slots, attn_metadata) as num_padded:
            hidden_states = self._run(tokens, positions, num_padded)
        return hidden_states[:num_tokens]

    @property
    def own_cache(self) -> OwnCache:
        """See `Draft`."""
        return self

    @property
    def may_lag(self) -> bool:
        """See `Draft`.

        Asynchronously, the host does not know the tokens that are to be read later. And what layers with a
        window would need for them may have been freed by then.
        """
        config = self._proposer.speculative_config.draft_model_config.hf_text_config
        has_windows = any(
            getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")
        )
        return not has_windows and not self._proposer.vllm_config.scheduler_config.async_scheduling

    @property
    def note_plain_step(self) -> Callable[[SchedulerOutput], None]:
        """See `Draft`."""
        return self._note_plain_step

    def begin_round(self, batch: Batch) -> None:
        """See `drafting.drafter.OwnCache`."""
        common = self._target_common
        num_reqs = len(batch.req_ids)
        self._ends = batch.context_lens.tolist()
        ends_of_step = common.seq_lens[:num_reqs].tolist()
        query_starts = common.query_start_loc_cpu[: num_reqs + 1]
        self._query_starts = query_starts[:-1].tolist()
        # First positions of what the target's step took.
        self._starts = (torch.tensor(ends_of_step) - query_starts.diff()).tolist()
        self._leading = {}
        self.pages.begin_step(batch.req_ids)
        # To the host at once: every request's are compared.
        target_token_ids = self._target_token_ids.cpu()
        for index, (req_id, start, end, end_of_step) in enumerate(
            zip(batch.req_ids, self._starts, self._ends, ends_of_step, strict=True)
        ):
            written = self._written.get(req_id)
            self.pages.forget(index, start, end_of_step)
            if (
                written is None
                or written.first != start
                or written.page != self.pages.page_of(index, start)
            ):
                continue
            first_token = self._query_starts[index]
            truth = target_token_ids[first_token : first_token + end - start].tolist()
            pairs = zip(truth, written.tokens, strict=False)
            equal = next(
                (i for i, (one, other) in enumerate(pairs) if one != other),
                min(len(truth), len(written.tokens)),
            )
            self.pages.add(index, start, start + equal)
        self._written = {}

    def catch_up(self, batch: Batch, num_steps: int) -> None:
        """See `drafting.drafter.OwnCache`; without a pass to follow, what plain steps decode can wait."""
        arriving = np.logical_or(batch.is_prefilling, batch.is_first)
        can_wait = not num_steps and self.may_lag
        if can_wait and not (arriving.any() and self.pages.reads_whole_prompts):
            return
        proposer = self._proposer
        most_leading = min(proposer.num_latest(num_steps), _MOST_LEADING * max(1, num_steps))
        room, pieces = proposer.max_num_tokens - len(batch.req_ids), []
        for index, end in enumerate(self._ends):
            if can_wait and not arriving[index]:
                continue
            if batch.is_prefilling[index] and not self.pages.reads_whole_prompts:
                continue
            lacking = self.pages.lacking(index, end)
            number = len(lacking)
            if not number:
                continue
            is_run = lacking[0] == end - number
            if (
                num_steps
                and not batch.is_prefilling[index]
                and is_run
                and number <= min(most_leading, room)
            ):
                self._leading[index] = end - number
                room -= number
            else:
                pieces.append((index, lacking))
        for of_pass in _split(pieces, proposer.max_num_tokens):
            self._read(batch, of_pass)
        if num_steps:
            for index, end in enumerate(self._ends):
                self.pages.write_over(index, end + proposer.num_speculative_tokens)

    def end_round(self, batch: Batch, drafts: torch.Tensor | Sequence[Sequence[int]]) -> None:
        """See `drafting.drafter.OwnCache`."""
        room, latest = self._proposer.max_model_len, batch.tokens.tolist()
        lists = drafts.tolist() if isinstance(drafts, torch.Tensor) else drafts
        for index, (req_id, end, own) in enumerate(zip(batch.req_ids, self._ends, lists, strict=True)):
            # A pass writes what it takes, and the last draft is what the last pass gives.
            if len(own) and not batch.is_prefilling[index] and index not in self._leading:
                tokens = [latest[index], *own[:-1]][: room - end]
                if tokens:
                    self._written[req_id] = _Written(end, self.pages.page_of(index, end), tokens)

    def _note_plain_step(self, scheduler_output: SchedulerOutput) -> None:
        inputs = self._proposer.target_runner.input_batch
        self.pages.begin_step(inputs.req_ids)
        for index, req_id in enumerate(inputs.req_ids):
            first = int(inputs.num_computed_tokens_cpu[index])
            number = scheduler_output.num_scheduled_tokens.get(req_id, 0)
            self.pages.forget(index, first, first + number)
        self._written = {}

    def tables(self, block_tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Draft`."""
        return self.pages.tables(block_tables)

    @property
    def num_leading(self) -> int:
        """See `Draft`."""
        return sum(self._ends[index] - first for index, first in self._leading.items())

    def lead(self, queries: Queries) -> Leading | None:
        """See `Draft`; it is the first of the round that takes a request's tokens."""
        requests = queries.requests.tolist()
        firsts = [self._leading.get(index, self._ends[index]) for index in requests]
        lens = np.array([self._ends[index] - first for index, first in zip(requests, firsts, strict=True)])
        if not lens.any():
            return None
        starts = np.concatenate([[0], (lens + queries.lens).cumsum()]).astype(np.int32)
        is_leading = np.zeros(starts[-1], dtype=bool)
        for start, number in zip(starts.tolist(), lens.tolist(), strict=False):
            is_leading[start : start + number] = True
        proposer = self._proposer
        pieces = [
            (index, np.arange(first, self._ends[index]))
            for index, first in zip(requests, firsts, strict=True)
            if first < self._ends[index]
        ]
        tokens, positions, slots = self._inputs_of(pieces)
        return Leading(
            starts,
            on_device(np.flatnonzero(~is_leading), proposer.device),
            on_device(np.flatnonzero(is_leading), proposer.device),
            tokens,
            positions,
            slots,
        )

    def note_led(self, queries: Queries) -> None:
        """See `Draft`."""
        for index in queries.requests.tolist():
            if index in self._leading:
                end = self._ends[index]
                self.pages.add_read(index, self._leading.pop(index), end, end)

    def _read(self, batch: Batch, pieces: Sequence[tuple[int, np.ndarray]]) -> None:
        """A pass over all that the cache keeps before its tokens: `pieces` are places in the batch with
        positions.

        Where every page is there, what is far from the end is read once, so that its K/V may as well know
        of all before, as in a draft model's cache of vLLM's own; and pages that the prefix cache hands on
        are the same whoever filled them.
        """
        proposer = self._proposer
        tokens, positions, slots = self._inputs_of(pieces)
        lens = [len(own) for _, own in pieces]
        starts = torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32)
        indices = [index for index, _ in pieces]
        num_tokens = [self._ends[index] for index in indices]
        # Entries of the cache up to each one's last token.
        ends = [
            int(np.searchsorted(self.pages.entries(number), own[-1])) + 1
            for (_, own), number in zip(pieces, num_tokens, strict=True)
        ]
        common = proposer.common.replace(
            query_start_loc=starts.to(proposer.device),
            query_start_loc_cpu=starts,
            num_reqs=len(pieces),
            num_actual_tokens=len(tokens),
            max_query_len=max(lens),
            seq_lens=on_device(ends, proposer.device).to(torch.int32),
            max_seq_len=max(ends),
        )
        tables = self.pages.tables_of(batch, indices, num_tokens)
        self.forward(tokens, positions, slots, proposer.whole_metadata(tables, common, slots))
        for (index, own), number in zip(pieces, num_tokens, strict=True):
            self.pages.add_read(index, int(own[0]), int(own[-1]) + 1, number)

    def _inputs_of(
        self, pieces: Sequence[tuple[int, np.ndarray]]
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Tokens [num_tokens] int32, positions [num_tokens] int64, and slots by group of layers."""
        proposer = self._proposer
        tokens = torch.cat([self._tokens_of(*piece) for piece in pieces])
        positions = np.concatenate([own for _, own in pieces])
        places = np.repeat([index for index, _ in pieces], [len(own) for _, own in pieces])
        slots = []
        for group in proposer.groups:
            size = group.cache.block_size
            own = self.pages.pages(places, positions // size, group) * size + positions % size
            if group.reach is not None:
                # Pages that the latest step no longer reached may be others' by now (`views/windows.py`).
                latest = torch.tensor(self._starts)[places]
                first_kept = group.reach.first_seen(latest).numpy() // size * size
                own[positions < first_kept] = PAD_SLOT
            slots.append(on_device(own, proposer.device))
        return tokens, on_device(positions, proposer.device), slots

    def _tokens_of(self, index: int, positions: np.ndarray) -> torch.Tensor:
        """[num_tokens] int32, verified tokens of a request: those of the target's step, or older ones.

        Args:
            index: of the request in the batch.
            positions: [num_tokens] int64, ascending.
        """
        start = self._starts[index]
        older, latest = positions[positions < start], positions[positions >= start]
        of_step = on_device(latest - start + self._query_starts[index], self._target_token_ids.device)
        tokens = self._target_token_ids[of_step].to(torch.int32)
        if not len(older):
            return tokens
        # Under asynchronous scheduling the host has -1 for tokens that it never got to know in time.
        known = self._proposer.target_runner.input_batch.token_ids_cpu[index, older]
        return torch.cat([on_device(known.clip(min=0), tokens.device).to(torch.int32), tokens])


def draft_beyond_the_end(proposer: "MagicDecProposer") -> None:
    """Have rounds made for all requests where one is near the model's end; what is beyond it is dropped.

    vLLM's runner drafts nothing for any request then, and the others' caches would lack what was verified.
    """
    runner = proposer.target_runner
    room = proposer.speculative_config.num_speculative_tokens
    runner.effective_drafter_max_model_len = runner.max_model_len + room


def _split(pieces: Sequence[tuple[int, np.ndarray]], most: int) -> list[list[tuple[int, np.ndarray]]]:
    """Places with positions in passes of at most so many tokens, each request's in order."""
    passes: list[list[tuple[int, np.ndarray]]] = []
    room = 0
    for index, positions in pieces:
        while len(positions):
            if not room:
                passes.append([])
                room = most
            taken, positions = positions[:room], positions[room:]
            passes[-1].append((index, taken))
            room -= len(taken)
    return passes
