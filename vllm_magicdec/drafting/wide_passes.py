# SPDX-License-Identifier: Apache-2.0
"""Draft rounds on the device: passes over all of a round's tokens (V2 runner on GPUs).

The host does not know the latest tokens, so every pass has the same shape: each request's last token, its
drafts, and looked-up tokens after them. As in `staged.py`, sampled tokens that confirm looked-up ones are
drafts. Small passes are bound by reading the weights, so more tokens cost almost nothing.

The number of passes is fixed at gamma / 2, rounded up: a pass is assumed to yield two drafts per request.
Requests that lack drafts after the last pass fill up with tokens sampled after wrong inputs. These are
rarely accepted, but their distribution is the one that the rejection sampler is given.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from vllm_magicdec import envs
from vllm_magicdec.adaptive.metrics import LookupCounters
from vllm_magicdec.drafting.loops import Drafts, Prepare, Stepwise
from vllm_magicdec.drafting.pauses import Pauses
from vllm_magicdec.drafting.ports import Target
from vllm_magicdec.lookup.device_lookups import DeviceLookups
from vllm_magicdec.lookup.history import Texts
from vllm_magicdec.views.round import Batch, Queries, Round
from vllm_magicdec.views.tensors import ceil_div, on_device

# An H100 computes about 296 tokens while it reads the weights: 990 TFLOP/s in bfloat16 over 3.35 TB/s.
MAX_WIDE_TOKENS = 256
# Assumed drafts per request and wide pass.
_DRAFTS_PER_PASS = 2
# Wide passes take a little longer than passes of one token, so a round must have fewer.
_MAX_PASS_RATIO = 0.75
# Rounds until the host reads a round's counts. vLLM begins a step once it has the tokens of the step before
# last, whose drafts may still be being made.
_DELAY = 3


class WideTarget(Target, Protocol):
    """A vLLM model runner that runs wide passes."""

    def max_wide_reqs(self, num_steps: int) -> int:
        """Return the maximum requests of a wide pass for `num_steps` drafts; 0 if unsupported."""

    def texts(self, batch: Batch) -> Texts:
        """Return the requests' verified tokens, including the last sampled ones."""


@dataclass(frozen=True)
class _Sent:
    """Counts of a round's wide passes, being copied to the host."""

    sums: torch.Tensor  # [num_passes, 2] int64: looked-up tokens, and confirmed ones
    arrived: torch.cuda.Event | None  # None if already on the host
    round_: int


class WidePasses:
    """Drafts rounds by passes over all of their tokens where these save time (a `Loop`).

    Args:
        steps: drafts the other rounds; its buffer holds the drafts of all.
        lengths: numbers of drafts for which wide passes are prepared.
        max_model_len: tokens; rounds that may reach it get passes of one token.
        is_alone: no other rank has to draft the same, so lookup failures need not be fatal.
        extra_passes: catch-up passes of a draft model's cache, needed only before wide passes.
    """

    def __init__(
        self,
        target: WideTarget,
        lookups: DeviceLookups,
        counters: LookupCounters,
        steps: Stepwise,
        *,
        lengths: Collection[int],
        max_model_len: int,
        is_alone: bool = True,
        extra_passes: int = 0,
    ) -> None:
        self._target = target
        self._lookups = lookups
        self._counters = counters
        self._steps = steps
        self._is_alone = is_alone
        self._pauses = Pauses("A lookup", "every draft takes a pass of its own")
        self._max_model_len = max_model_len
        self._num_passes = {length: _num_passes(length, extra_passes) for length in lengths if length > 1}
        self._sent: deque[_Sent] = deque()
        self._round = 0

    def warm_up(self, texts: Texts) -> None:
        """Compile the lookup kernels before requests wait; `texts`: any request's, in the final buffers."""
        for num_steps in self._num_passes:
            inputs = torch.zeros((1, num_steps), dtype=torch.int32, device=texts.lens.device)
            try:
                self._lookups.fill(inputs, torch.zeros_like(texts.lens), texts)
            except Exception:
                self._record_failure()

    def begin_round(self, batch: Batch, num_steps: int) -> int:
        """Return the number of wide passes for `num_steps` drafts; 0 to use passes of one token."""
        self._round += 1
        self._count_arrived()
        is_possible = (
            self._pauses.is_over()
            and num_steps in self._num_passes
            and len(batch.req_ids) <= self._target.max_wide_reqs(num_steps)
            and max(batch.known_lens) + num_steps <= self._max_model_len
            and not all(batch.is_prefilling)
        )
        return self._num_passes[num_steps] if is_possible else 0

    def draft(self, batch: Batch, num_steps: int, prepare: Prepare) -> Drafts:
        """See `Loop`."""
        num_reqs, num_passes = len(batch.req_ids), self.begin_round(batch, num_steps)
        round_ = prepare(is_wide=num_passes > 0)
        drafts = self._steps.buffer[:num_reqs, :num_steps]
        if num_passes and self.draft_wide(drafts, batch, round_, num_passes):
            return Drafts(drafts, np.full(num_reqs, num_passes), num_passes)
        self._counters.count_round(num_steps, 0, 0)
        return self._steps.draft(batch, num_steps, lambda *, is_wide=False: round_)

    def draft_wide(self, drafts: torch.Tensor, batch: Batch, steps: Round, num_passes: int) -> bool:
        """Draft a round by wide passes.

        Args:
            drafts: [num_reqs, num_steps] int64, the output.

        Returns:
            Whether lookups worked. Then at least the first `num_passes` drafts of each request equal those
            of one-token passes, and their K/V is written. Otherwise the round's steps may be used.
        """
        num_reqs, num_steps = drafts.shape
        wide = steps.take(Queries.uniform(num_reqs, 0, num_steps), batch.tokens)
        texts, round_ = self._target.texts(batch), _WideRound(batch, num_steps)
        for _ in range(num_passes):
            try:
                self._look_up(round_, texts)
            except Exception:
                self._record_failure()
                return False
            sampled = self._target.run(replace(wide, tokens=round_.inputs.flatten())).tokens
            drafts.copy_(sampled.view(num_reqs, num_steps))
            round_.update(drafts)
        self._pauses.note_success()
        self._send(round_)
        return True

    def _look_up(self, round_: "_WideRound", texts: Texts) -> None:
        num_drafts = round_.num_drafts.clamp(max=round_.inputs.shape[1] - 1)
        round_.is_found = self._lookups.fill(round_.inputs, num_drafts, texts)

    def _record_failure(self) -> None:
        """Count a failed lookup; call in the exception handler."""
        if envs.strict() or not self._is_alone:
            raise
        self._counters.count_failure()
        if self._pauses.note_failure():
            self._counters.count(lookup_pauses=1)

    def _send(self, round_: "_WideRound") -> None:
        """Start copying the round's counts to the host."""
        sums, arrived = torch.stack(round_.sums), None
        if sums.device.type == "cuda":
            pinned = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            sums = pinned.copy_(sums, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._sent.append(_Sent(sums, arrived, self._round))

    def _count_arrived(self) -> None:
        while self._sent and self._sent[0].round_ + _DELAY <= self._round:
            sent = self._sent.popleft()
            if sent.arrived is not None:
                sent.arrived.synchronize()
            looked_up, accepted = sent.sums.sum(dim=0).tolist()
            self._counters.count_round(len(sent.sums), looked_up, accepted)


def _num_passes(num_steps: int, extra_passes: int) -> int:
    """Return the number of wide passes of a round; 0 if they would not save time."""
    number = ceil_div(num_steps, _DRAFTS_PER_PASS)
    return number if number + extra_passes <= _MAX_PASS_RATIO * num_steps else 0


class _WideRound:
    """State of a round on the device; it begins with the requests' last tokens."""

    def __init__(self, batch: Batch, num_steps: int) -> None:
        tokens = batch.tokens
        # [num_reqs] int64, 1 where drafts are useful.
        self._is_drafting = on_device(np.logical_not(batch.is_prefilling), tokens.device)
        # [num_reqs, num_steps] int32, each request's last token, its drafts, and looked-up tokens.
        self.inputs = torch.zeros((len(tokens), num_steps), dtype=torch.int32, device=tokens.device)
        self.inputs[:, 0] = tokens
        self.num_drafts = torch.zeros_like(self._is_drafting)
        self.is_found = torch.zeros_like(self._is_drafting, dtype=torch.bool)  # by request
        self.sums: list[torch.Tensor] = []  # see `_Sent`

    def update(self, sampled: torch.Tensor) -> None:
        """Process the tokens sampled after each input, [num_reqs, num_steps] int64."""
        num_steps, num_drafts = sampled.shape[1], self.num_drafts
        right = (sampled[:, :-1] == self.inputs[:, 1:]).long().cumprod(dim=1).sum(dim=1)
        looked_up = (num_steps - 1 - num_drafts).clamp(min=0) * self.is_found
        # Rounding may change a draft when it is recomputed.
        accepted = (right - num_drafts).clamp(min=0) * self.is_found
        counts = torch.stack([looked_up, accepted])
        self.sums.append((counts * self._is_drafting).sum(dim=1))
        self.num_drafts = right + 1
        self.inputs[:, 1:] = sampled[:, :-1]
