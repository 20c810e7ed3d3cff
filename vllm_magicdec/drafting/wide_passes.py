# SPDX-License-Identifier: Apache-2.0
"""A round by passes that take all of its tokens, where the host does not know the latest ones (V2 on GPUs).

Every pass takes of every request its last token, what was drafted, and what lookups foresee after that, and
draws after each of them. As in `staged.py`, what the drawn tokens confirm are drafts: those that one pass
per token makes. But nothing of it is read on the host. So all passes of a round have the same shape and see
the same, whatever they confirm: where a step reads the weights of a model for a few tokens, others beside
them come free.

The number of passes follows a fixed rule: a pass is assumed to make two drafts of each request, so a round
of gamma drafts takes gamma / 2 wide passes, rounded up. After the last pass some requests may lack drafts.
What was drawn after wrong tokens stands in for them: seldom right, but drawn from the distribution that was
kept for it, so that the rejection sampler knows what to do.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vllm_magicdec import envs
from vllm_magicdec.adaptive.metrics import LookupCounters
from vllm_magicdec.drafting.pauses import Pauses
from vllm_magicdec.drafting.staged import PassRunner
from vllm_magicdec.lookup.device_lookups import DeviceLookups, Texts
from vllm_magicdec.views.base import Batch, ceil_div, on_device
from vllm_magicdec.views.passes import DraftPass, Queries, RoundSteps

# An H100 multiplies by its weights for so many tokens while it reads them: 990 TFLOP/s in bfloat16 over
# 3.35 TB/s is 296.
MOST_TOKENS = 256
# Drafts that a wide pass is assumed to make of each request; with 1, passes of one token do as well.
_DRAFTS_PER_PASS = 2
# Wide passes take a little longer than those of one token, and so have to be fewer, by this share.
_MOST_PASSES = 0.75
# Rounds until the host reads the counts of a round: as many as vLLM may be ahead of the device.
_DELAY = 2


class WidePassRunner(PassRunner, Protocol):
    """What wide passes need from a vLLM model runner."""

    def max_wide_reqs(self, num_steps: int) -> int:
        """Requests of a pass of all tokens of a round of so many drafts, at most; 0: none is made."""
        ...

    def texts(self, batch: Batch) -> Texts:
        """The verified tokens of a round's requests, each one's last sampled token included."""
        ...


@dataclass(frozen=True)
class _Sent:
    """Counts of a round's wide passes, on their way to the host."""

    sums: torch.Tensor  # [num_passes, 2] int64: tokens looked up and those of them that are right
    arrived: torch.cuda.Event | None  # None: they are there
    round_: int


class WidePasses:
    """Drafts of a round by passes of all of its tokens.

    Args:
        runner: makes the passes.
        lookups: of this worker's requests.
        counters: are shown in the metrics.
        lengths: numbers of drafts that rounds may have; rounds of others get passes of one token.
        max_model_len: tokens; where a request may come to the end, rounds get passes of one token as well.
        is_alone: no other rank has to draft the same, so this one may go on without lookups that fail.
        num_others: passes that a round takes beside wide ones, and not beside those of one token: a draft
            of its own cache reads there first what the cache lacks.
    """

    def __init__(
        self,
        runner: WidePassRunner,
        lookups: DeviceLookups,
        counters: LookupCounters,
        *,
        lengths: Collection[int],
        max_model_len: int,
        is_alone: bool = True,
        num_others: int = 0,
    ) -> None:
        self._runner = runner
        self._lookups = lookups
        self._counters = counters
        self._is_alone = is_alone
        self._pauses = Pauses("A lookup", "every draft takes a pass of its own")
        self._max_model_len = max_model_len
        self._num_passes = {length: _num_passes(length, num_others) for length in lengths if length > 1}
        self._sent: deque[_Sent] = deque()
        self._round = 0

    def warm_up(self, texts: Texts) -> None:
        """Let what searches be compiled now, and not while requests wait.

        Args:
            texts: of any one request, where they will be.
        """
        for num_steps in self._num_passes:
            given = torch.zeros((1, num_steps), dtype=torch.int32, device=texts.lens.device)
            try:
                self._lookups.fill(given, torch.zeros_like(texts.lens), texts)
            except Exception:
                self._go_on_without_lookups()

    def begin_round(self, batch: Batch, num_steps: int) -> int:
        """How many passes to draft with; 0: passes of one token do as well, or are all that is possible.

        Args:
            batch: the round's requests.
            num_steps: drafts of each.
        """
        self._round += 1
        self._hear()
        is_possible = (
            self._pauses.is_over()
            and num_steps in self._num_passes
            and len(batch.req_ids) <= self._runner.max_wide_reqs(num_steps)
            and max(batch.known_lens) + num_steps <= self._max_model_len
            and not all(batch.is_prefilling)
        )
        return self._num_passes[num_steps] if is_possible else 0

    def draft(
        self, drafts: torch.Tensor, batch: Batch, rounds: Sequence[RoundSteps], num_passes: int
    ) -> int:
        """Draft for a round.

        Args:
            drafts: [num_reqs, num_steps] int64, written.
            batch: the round's requests.
            rounds: its steps, by group of layers.
            num_passes: what `begin_round` has said.

        Returns:
            How many passes it took; of every request's drafts at least as many are those of one token a
            pass, and their K/V is there. 0: nothing was drafted, and the round's steps can be gone through.
        """
        if not num_passes:
            return 0
        num_reqs, num_steps = drafts.shape
        queries = Queries(
            requests=np.arange(num_reqs),
            firsts=np.zeros(num_reqs, dtype=np.int64),
            lens=np.full(num_reqs, num_steps),
        )
        draft_pass = DraftPass(queries, [steps.take(queries) for steps in rounds])
        texts, reading = self._runner.texts(batch), _Reading.begin(batch, num_steps)
        for _ in range(num_passes):
            if not self._foresee(reading, texts):
                return 0
            drawn, _ = self._runner.draft_pass(reading.given.flatten(), draft_pass)
            drafts.copy_(drawn.view(num_reqs, num_steps))
            reading.take(drafts)
        self._pauses.note_success()
        self._send(reading)
        return num_passes

    def count_steps(self, num_steps: int) -> None:
        """Count a round of so many passes of one token."""
        self._counters.count_round(num_steps, 0, 0)

    def _foresee(self, reading: "_Reading", texts: Texts) -> bool:
        """Put what is looked up behind what was drafted; False: that failed."""
        try:
            made = reading.made.clamp(max=reading.given.shape[1] - 1)
            reading.is_found = self._look_up(reading.given, made, texts)
        except Exception:
            self._go_on_without_lookups()
            return False
        return True

    def _look_up(self, given: torch.Tensor, made: torch.Tensor, texts: Texts) -> torch.Tensor:
        """See `DeviceLookups.fill`."""
        return self._lookups.fill(given, made, texts)

    def _go_on_without_lookups(self) -> None:
        """For this round; to be called where the exception is handled."""
        if envs.strict() or not self._is_alone:
            raise
        self._counters.count_failure()
        if self._pauses.note_failure():
            self._counters.count(lookup_pauses=1)

    def _send(self, reading: "_Reading") -> None:
        """Let the host have the counts when they are there."""
        sums, arrived = torch.stack(reading.sums), None
        if sums.device.type == "cuda":
            pinned = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            sums = pinned.copy_(sums, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._sent.append(_Sent(sums, arrived, self._round))

    def _hear(self) -> None:
        """Count the passes of an earlier round."""
        while self._sent and self._sent[0].round_ + _DELAY <= self._round:
            sent = self._sent.popleft()
            if sent.arrived is not None:
                sent.arrived.synchronize()
            looked_up, accepted = sent.sums.sum(dim=0).tolist()
            self._counters.count_round(len(sent.sums), looked_up, accepted)


def _num_passes(num_steps: int, num_others: int) -> int:
    """Wide passes of a round of so many drafts, with `num_others` beside them; 0: they are too many."""
    number = ceil_div(num_steps, _DRAFTS_PER_PASS)
    return number if number + num_others <= _MOST_PASSES * num_steps else 0


class _Reading:
    """What the passes of a round are given, and what came of it.

    Args:
        given: [num_reqs, num_steps] int32, each request's last token and, behind it, drafts and what was
            looked up.
        is_drafting: [num_reqs] int64, 1 where drafts are of use.
    """

    def __init__(self, given: torch.Tensor, is_drafting: torch.Tensor) -> None:
        self.given = given
        self.made = torch.zeros_like(is_drafting)  # drafts of each request
        self.is_found = torch.zeros_like(is_drafting, dtype=torch.bool)  # where something was looked up
        self.sums: list[torch.Tensor] = []  # see `_Sent`
        self._is_drafting = is_drafting

    @classmethod
    def begin(cls, batch: Batch, num_steps: int) -> "_Reading":
        """Nothing is drafted yet."""
        is_drafting = np.logical_not(batch.is_prefilling)
        tokens = batch.tokens
        given = torch.zeros((len(tokens), num_steps), dtype=torch.int32, device=tokens.device)
        given[:, 0] = tokens
        return cls(given, on_device(is_drafting, tokens.device))

    def take(self, drawn: torch.Tensor) -> None:
        """What was drawn after each token that was given, [num_reqs, num_steps] int64."""
        num_steps, made = drawn.shape[1], self.made
        right = (drawn[:, :-1] == self.given[:, 1:]).long().cumprod(dim=1).sum(dim=1)
        looked_up = (num_steps - 1 - made).clamp(min=0) * self.is_found
        # When a draft is read again, rounding may make another one of it.
        accepted = (right - made).clamp(min=0) * self.is_found
        counts = torch.stack([looked_up, accepted])
        self.sums.append((counts * self._is_drafting).sum(dim=1))
        self.made = right + 1
        self.given[:, 1:] = drawn[:, :-1]
