# SPDX-License-Identifier: Apache-2.0
"""The KV cache of a draft model, which catches up with the verified tokens before each round.

A round's passes write the K/V of their inputs: the last verified token and all drafts but the last. K/V of
rejected tokens lies behind the new context's end; the next round's passes write it again before their
views' lengths reach it. If all drafts were accepted, the cache lacks the token before the next
round's first one, which the first pass takes beside its own. Where only the device knows, it always does:
writing the same K/V twice is harmless. Longer gaps (a prompt's chunk, tokens of plain steps) take a pass
over the whole context, or, before passes over all of a round's tokens, over the round's view.

The host tracks an upper bound on the lacking tokens at the end of each request's context. Tokens too many
are computed again; where a request has fewer, the pass is padded with tokens that write nowhere.

The pages are shared with the target and must be complete in both models' layers when vLLM adds them to the
prefix cache, so tokens of plain steps are caught up with before a page can be full.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from typing_extensions import override

from vllm_magicdec.drafting.layer_groups import LayerGroup
from vllm_magicdec.drafting.ports import Cache, Target
from vllm_magicdec.views.round import Batch, PageView, Part, Pass, Queries
from vllm_magicdec.views.selections import RequestRows
from vllm_magicdec.views.tensors import PAD_SLOT, on_device


class ModelCache(Cache):
    """See the module.

    Args:
        groups: the draft's layers; those without a window come first.
        max_num_tokens: maximum query tokens of a pass.
        max_model_len: tokens.
        knows_accepted: the host knows how many drafts the target has accepted before it drafts again.
    """

    is_own = True
    max_added = 1

    def __init__(
        self,
        target: Target,
        groups: Sequence[LayerGroup],
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        knows_accepted: bool,
    ) -> None:
        self._target = target
        self._groups = groups
        self._page_size = groups[0].cache.block_size
        self._max_num_tokens, self._max_model_len = max_num_tokens, max_model_len
        # All but at most one of the tokens that a verification adds were written by the round's passes.
        self._min_lacking = 0 if knows_accepted else 1
        # Tokens of plain steps may wait, but vLLM may free the pages that layers with a window need.
        self._may_lag = all(group.reach is None for group in groups)
        # Twice as many as run at once, so that requests which a step leaves out keep theirs.
        num_rows = 2 * max_num_reqs
        self._rows_of = RequestRows(num_rows, torch.device("cpu"))
        # By row, upper bounds: lacking tokens at the end, tokens written by the latest round's passes,
        # verified tokens, and drafts that the latest step verified.
        self._lacking, self._written, self._ends, self._unsure = np.zeros((4, num_rows), dtype=np.int64)
        # Of the round: requests that wait for its first pass, and for a pass over its view before that.
        self._waiting: np.ndarray | None = None  # [num_reqs] bool
        self._in_view: Queries | None = None

    @override
    def begin_round(self, batch: Batch) -> None:
        step = batch.step
        assert step is not None
        new = self._rows_of.add(batch.req_ids)
        for values in (self._lacking, self._written, self._ends, self._unsure):
            values[new] = 0
        rows = self._rows = np.array([self._rows_of.row(req_id) for req_id in batch.req_ids])
        self._batch, self._step = batch, step
        starts = step.ends - step.num_tokens
        # A preempted request resumes at the start of a page, with complete pages before.
        is_resumed = (starts != self._ends[rows]) & (starts % self._page_size == 0)
        lacking = np.where(step.has_prompt & is_resumed, 0, self._lacking[rows])
        # Whether all lacking tokens are of the target's step and not of a prompt.
        self._lacks_only_step = (lacking == 0) & ~step.has_prompt
        written = self._written_at(starts, step.num_tokens, rows)
        decoded = np.maximum(self._min_lacking, lacking + step.num_tokens - written)
        lacking = np.where(step.has_prompt, lacking + step.num_tokens, decoded)
        self._lacking[rows] = np.minimum(lacking, step.ends)
        # Lower bounds: the scheduler may not know the result of the previous step either.
        self._surely_verified = step.ends - step.num_unsure - self._unsure[rows]
        self._unsure[rows], self._written[rows], self._ends[rows] = step.num_unsure, 0, step.ends
        self._waiting = self._in_view = None

    def skip_plain_step(self, req_ids: Sequence[str], ends: Sequence[int]) -> bool:
        """Leave the tokens of a plain step for later, without a round.

        Args:
            req_ids: requests of the step, with one token each.
            ends: verified tokens of each after it.

        Returns:
            Whether nothing is due; otherwise the step needs a round, if only of 0 drafts.
        """
        if not self._may_lag or any(end % self._page_size == 0 for end in ends):
            return False  # a page may be full
        if any(req_id not in self._rows_of for req_id in req_ids):
            return False
        rows = [self._rows_of.row(req_id) for req_id in req_ids]
        written = self._written_at(np.array(ends) - 1, 1, rows)
        self._lacking[rows] = np.maximum(self._min_lacking, self._lacking[rows] + 1 - written)
        self._unsure[rows], self._written[rows], self._ends[rows] = 0, 0, ends
        return True

    def _written_at(
        self, starts: np.ndarray, num_tokens: np.ndarray | int, rows: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """Return how many tokens of a step the latest round's passes wrote, [num_reqs] int64."""
        # A request that was preempted after the round has other pages. If the prefix cache has all of its
        # tokens but the last, the only sign of it is a step of one token at the start of a page.
        may_be_resumed = (starts % self._page_size == 0) & (num_tokens == 1)
        return np.where(may_be_resumed, 0, self._written[rows])

    @override
    def catch_up(self, batch: Batch, num_steps: int, *, num_latest: int = 0, is_wide: bool = False) -> None:
        lacking = self._lacking[self._rows]
        is_due = lacking > 0
        if not num_steps:
            if self._may_lag:
                pages = self._step.ends // self._page_size
                is_due &= self._step.has_prompt | (
                    pages > (self._surely_verified - lacking) // self._page_size
                )
        elif is_wide:
            is_due &= ~self._leave_to_view(is_due, lacking, num_latest)
        elif num_latest and (1 + self.max_added) * len(lacking) <= self._max_num_tokens:
            waiting = (lacking == 1) & ~self._step.has_prompt
            self._waiting = waiting if waiting.any() else None
            is_due &= ~waiting
        due = [(index, int(lacking[index])) for index in np.flatnonzero(is_due).tolist()]
        for pieces in _split(due, self._max_num_tokens):
            self._read(pieces, lacking)
        self._lacking[self._rows[is_due]] = 0

    def _leave_to_view(self, is_due: np.ndarray, lacking: np.ndarray, num_latest: int) -> np.ndarray:
        """Return the requests, [num_reqs] bool, whose lacking tokens are read over the round's view."""
        in_view = (
            is_due & self._lacks_only_step & (lacking <= np.minimum(num_latest, self._surely_verified))
        )
        requests = np.flatnonzero(in_view)
        if not len(requests) or lacking[requests].sum() > self._max_num_tokens:
            return np.zeros_like(is_due)
        self._in_view = Queries(requests, firsts=-lacking[requests], lens=lacking[requests])
        return in_view

    @override
    def extend(self, draft_pass: Pass) -> Pass:
        self._read_in_view(draft_pass)
        queries, waiting = draft_pass.queries, self._waiting
        if waiting is None or queries.firsts.any():
            return draft_pass
        # Every request gets one more query, so that all have equally many where all had: only the device
        # knows who lacks the token, and CUDA graphs have one shape.
        device = draft_pass.tokens.device
        indices = on_device(queries.requests, device)
        positions = (self._batch.context_lens[indices] - 1).clamp(min=0)
        slots = self._slots_of(indices, positions, on_device(waiting[queries.requests], device).bool())
        parts = [
            replace(
                part,
                positions=_lead(positions, part.positions, queries),
                slots=_lead(own, part.slots, queries),
            )
            for part, own in zip(draft_pass.parts, slots, strict=True)
        ]
        length = queries.uniform_len and queries.uniform_len + 1
        return replace(
            draft_pass,
            tokens=_lead(self._target.token_ids(indices, positions), draft_pass.tokens, queries),
            queries=Queries(queries.requests, queries.firsts - 1, queries.lens + 1, length),
            parts=parts,
        )

    def _read_in_view(self, draft_pass: Pass) -> None:
        """Read the tokens that were left to the round's view, before its first pass."""
        queries, self._in_view = self._in_view, None
        if queries is None:
            return
        device = draft_pass.tokens.device
        indices, requests = on_device(queries.request_indices, device), on_device(queries.requests, device)
        positions = self._batch.context_lens[indices] + on_device(queries.steps, device)
        # Tokens before the step have K/V, those of a prompt by attention to the whole context.
        slots = self._slots_of(indices, positions, positions >= self._step.starts[indices])
        views = []
        for part in draft_pass.parts:
            assert isinstance(part.view, PageView)
            lens = part.view.lens[requests] - int(draft_pass.queries.lens[0])
            views.append(part.view.of_requests(requests, lens))
        self._read_pass(indices, positions, slots, queries, views)
        self._lacking[self._rows[queries.requests]] = 0

    @override
    def end_round(self, batch: Batch, num_written: np.ndarray) -> None:
        self._written[self._rows] = np.where(batch.is_prefilling, 0, num_written)
        if self._waiting is not None:
            self._lacking[self._rows[self._waiting & (num_written > 0)]] = 0
        self._waiting = None  # dummy passes may follow

    def _read(self, pieces: Sequence[tuple[int, int, int]], lacking: np.ndarray) -> None:
        """Read lacking tokens over the whole context.

        Attending to the whole context, not to a view, makes pages in the prefix cache independent of the
        request that filled them, as with vLLM's own draft models.

        Args:
            pieces: index in the batch, and first and end of a range among the request's lacking tokens.
            lacking: [num_reqs] int64, upper bounds.
        """
        batch, device = self._batch, self._batch.context_lens.device
        requests, first, end = np.array(pieces).T
        queries = Queries(requests, firsts=first - lacking[requests], lens=end - first)
        indices, chosen = on_device(queries.request_indices, device), on_device(requests, device)
        # The number of lacking tokens may exceed the context; those too many come at the end.
        begins = (batch.context_lens - on_device(lacking, device)).clamp(min=0)
        positions = begins[indices] + on_device(lacking[queries.request_indices] + queries.steps, device)
        is_written = positions < batch.context_lens[indices]
        positions = positions.clamp(max=self._max_model_len - 1)
        slots = self._slots_of(indices, positions, is_written)
        lens = (begins[chosen] + on_device(end, device)).to(torch.int32)
        max_len = int(self._step.ends[requests].max())
        views = [
            PageView(lens, batch.block_tables[group.kv_cache_group][chosen], max_len)
            for group in self._groups
        ]
        self._read_pass(indices, positions, slots, queries, views)

    def _read_pass(
        self,
        indices: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        queries: Queries,
        views: Sequence[PageView],
    ) -> None:
        parts = [Part(positions, own, view) for own, view in zip(slots, views, strict=True)]
        self._target.read(Pass(self._target.token_ids(indices, positions), queries, parts))

    def _slots_of(
        self, indices: torch.Tensor, positions: torch.Tensor, is_written: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return slots by layer group, PAD_SLOT where not `is_written`; all [num_tokens]."""
        slots = []
        for group in self._groups:
            size, table = group.cache.block_size, self._batch.block_tables[group.kv_cache_group]
            is_own = is_written
            if group.reach is not None:
                # Pages that the latest step no longer reached may be reassigned (`views/windows.py`).
                first_kept = group.reach.first_seen(self._step.starts[indices]) // size * size
                is_own = is_own & (positions >= first_kept)
            own = table[indices, positions // size].long() * size + positions % size
            slots.append(own.masked_fill(~is_own, PAD_SLOT))
        return slots


def _lead(leading: torch.Tensor, values: torch.Tensor, queries: Queries) -> torch.Tensor:
    """Put a value before each request's [num_tokens] values; `leading` is [num_running]."""
    if queries.uniform_len is not None:
        own = values.view(-1, queries.uniform_len)
        return torch.cat([leading.unsqueeze(1).to(own.dtype), own], dim=1).flatten()
    pairs = zip(leading.to(values.dtype).split(1), values.split(queries.lens.tolist()), strict=True)
    return torch.cat([values for pair in pairs for values in pair])


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
