# SPDX-License-Identifier: Apache-2.0
"""A round by passes that take all of its tokens, where the host does not know the latest ones (V2 on GPUs).

Every pass takes of every request its last token, what was drafted, and what lookups foresee after that, and
draws after each of them. As in `staged.py`, what the drawn tokens confirm are drafts: those that one pass
per token makes. But nothing of it is read on the host. So all passes of a round have the same shape and see
the same, whatever they confirm: where a step reads the weights of a model for a few tokens, others beside
them come free.

How many passes a round gets is the host's guess (`pass_gains.py`), from what they gained in earlier rounds,
or would have gained in rounds of passes of one token; so the slowest request of a batch does not set it.
After the last pass some requests may lack drafts. What was drawn after wrong tokens stands in for them:
seldom right, but drawn from the distribution that was kept for it, so that the rejection sampler knows what
to do.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vllm_magicdec import envs
from vllm_magicdec.adaptive.metrics import LookupCounters
from vllm_magicdec.drafting.pass_gains import Gains
from vllm_magicdec.drafting.pauses import Pauses
from vllm_magicdec.drafting.staged import PassRunner
from vllm_magicdec.lookup.device_lookups import DeviceLookups, Texts
from vllm_magicdec.views.base import Batch, on_device
from vllm_magicdec.views.passes import DraftPass, Queries, RoundSteps

# An H100 multiplies by its weights for so many tokens while it reads them: 990 TFLOP/s in bfloat16 over
# 3.35 TB/s is 296.
MOST_TOKENS = 256
_LOOK_EVERY = 4  # rounds of passes of one token; they show what a wide pass would have gained
# Rounds until the host reads what passes gained, at least: as many as vLLM may be ahead of the device.
_LEAST_DELAY = 2


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
    """What a round's passes did, or one would have done, on its way to the host."""

    sums: torch.Tensor  # [num_passes, 3] int64: drafts, tokens looked up and those of them that are right
    arrived: torch.cuda.Event | None  # None: it is there
    num_reqs: int  # that can draft
    num_steps: int
    round_: int
    num_passes: int  # wide ones; 0: the round took others


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
        self._gains = {length: Gains(length, num_others) for length in lengths if length > 1}
        self._sent: deque[_Sent] = deque()
        self._round = 0
        self._may_look = False  # in this round
        # All tensor-parallel ranks have to make as many passes, so they hear in the same round. By then a
        # request that decodes in every round is past the positions of the round's drafts, and so past their
        # noise: what came of it is not to decide whether a token drawn with the same noise is a stand-in.
        self._delay = max(_LEAST_DELAY, *lengths)

    def warm_up(self, texts: Texts) -> None:
        """Let what searches be compiled now, and not while requests wait.

        Args:
            texts: of any one request, where they will be.
        """
        for num_steps in self._gains:
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
        is_over, gains = self._pauses.is_over(), self._gains.get(num_steps)
        self._may_look = (
            is_over
            and gains is not None
            and len(batch.req_ids) <= self._runner.max_wide_reqs(num_steps)
            and max(batch.known_lens) + num_steps <= self._max_model_len
            and not all(batch.is_prefilling)
        )
        if gains is None or not self._may_look:
            return 0
        gains.begin_as(self._gains.values())
        return gains.next()

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
        self._send(reading, num_passes)
        return num_passes

    def look_back(self, drafts: torch.Tensor, batch: Batch) -> None:
        """After a round of passes of one token: what would a wide one have gained?

        Args:
            drafts: [num_reqs, num_steps] int64.
            batch: the round's requests.
        """
        self._counters.count_round(drafts.shape[1], 0, 0)
        if not self._may_look or self._round % _LOOK_EVERY:
            return
        reading = _Reading.begin(batch, drafts.shape[1])
        if self._foresee(reading, self._runner.texts(batch)):
            reading.take(drafts)
            self._pauses.note_success()
            self._send(reading, 0)

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
        self._may_look = False
        self._counters.count_failure()
        if self._pauses.note_failure():
            self._counters.count_pause()

    def _send(self, reading: "_Reading", num_passes: int) -> None:
        """Let the host have what came of it when it is there."""
        sums, arrived = torch.stack(reading.sums), None
        if sums.device.type == "cuda":
            pinned = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            sums = pinned.copy_(sums, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        num_steps = reading.given.shape[1]
        sent = _Sent(sums, arrived, reading.num_drafting, num_steps, self._round, num_passes)
        self._sent.append(sent)

    def _hear(self) -> None:
        """Learn what the passes of an earlier round have gained, or one would have."""
        while self._sent and self._sent[0].round_ + self._delay <= self._round:
            sent = self._sent.popleft()
            if sent.arrived is not None:
                sent.arrived.synchronize()
            drafted, looked_up, accepted = zip(*sent.sums.tolist(), strict=True)
            gained = [number / sent.num_reqs for number in drafted]
            if sent.num_passes:
                self._counters.count_round(sent.num_passes, sum(looked_up), sum(accepted))
                self._gains[sent.num_steps].learn(gained, sent.num_reqs, self._round)
            else:
                self._gains[sent.num_steps].look(gained[0], sent.num_reqs, self._round)


class _Reading:
    """What the passes of a round are given, and what came of it.

    Args:
        given: [num_reqs, num_steps] int32, each request's last token and, behind it, drafts and what was
            looked up.
        is_drafting: [num_reqs] int64, 1 where drafts are of use.
        num_drafting: of these.
    """

    def __init__(self, given: torch.Tensor, is_drafting: torch.Tensor, num_drafting: int) -> None:
        self.given = given
        self.made = torch.zeros_like(is_drafting)  # drafts of each request
        self.is_found = torch.zeros_like(is_drafting, dtype=torch.bool)  # where something was looked up
        self.sums: list[torch.Tensor] = []  # see `_Sent`
        self.num_drafting = num_drafting
        self._is_drafting = is_drafting

    @classmethod
    def begin(cls, batch: Batch, num_steps: int) -> "_Reading":
        """Nothing is drafted yet."""
        is_drafting = np.logical_not(batch.is_prefilling)
        tokens = batch.tokens
        given = torch.zeros((len(tokens), num_steps), dtype=torch.int32, device=tokens.device)
        given[:, 0] = tokens
        return cls(given, on_device(is_drafting, tokens.device), int(is_drafting.sum()))

    def take(self, drawn: torch.Tensor) -> None:
        """What was drawn after each token that was given, [num_reqs, num_steps] int64."""
        num_steps, made = drawn.shape[1], self.made
        right = (drawn[:, :-1] == self.given[:, 1:]).long().cumprod(dim=1).sum(dim=1)
        looked_up = (num_steps - 1 - made).clamp(min=0) * self.is_found
        # When a draft is read again, rounding may make another one of it.
        accepted = (right - made).clamp(min=0) * self.is_found
        counts = torch.stack([right + 1 - made, looked_up, accepted])
        self.sums.append((counts * self._is_drafting).sum(dim=1))
        self.made = right + 1
        self.given[:, 1:] = drawn[:, :-1]
