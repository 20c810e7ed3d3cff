# SPDX-License-Identifier: Apache-2.0
"""A round by passes that take all of its tokens, where the host does not know the latest ones (V2 on GPUs).

Every pass takes of every request its last token, what was drafted, and what lookups foresee after that, and
draws after each of them. As in `staged.py`, what the drawn tokens confirm are drafts: those that one pass
per token makes. But nothing of it is read on the host. So all passes of a round have the same shape and see
the same, whatever they confirm: where a step reads the weights of a model for a few tokens, others beside
them come free.

How many passes a round gets is the host's guess, from what passes gained in earlier rounds; so the slowest
request of a batch does not set the number. After the last one some may lack drafts. Then what was drawn
after tokens that are wrong stands in for them: seldom right, but drawn from the distribution that was kept
for it, so that the rejection sampler knows what to do.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vllm_magicdec import envs
from vllm_magicdec.adaptive.metrics import LookupCounters
from vllm_magicdec.drafting.pauses import Pauses
from vllm_magicdec.drafting.staged import PassRunner
from vllm_magicdec.lookup.device_lookups import DeviceLookups, Texts
from vllm_magicdec.views.base import Batch, on_device
from vllm_magicdec.views.passes import DraftPass, Queries, RoundSteps

# An H100 multiplies by its weights for so many tokens while it reads them: 990 TFLOP/s in bfloat16 over
# 3.35 TB/s is 296.
MOST_TOKENS = 256
# Drafts of a request that a pass has to gain in the mean. With 1 it does what a pass of one token does,
# which the user's number of drafts says is worth it; at half of that it is left out.
LEAST_GAIN = 0.5
# Shares of what a round shows in what is expected: of a pass that it made, and of one that it left out.
_LEARNING, _FORGETTING = 0.25, 0.02
_PROBE_EVERY = 32  # rounds in which passes of one token do as well
# Rounds until the host reads what passes gained, at least: as many as vLLM may be ahead of the device.
_LEAST_DELAY = 2


class WidePassRunner(PassRunner, Protocol):
    """What wide passes need from a vLLM model runner."""

    @property
    def max_wide_reqs(self) -> int:
        """Requests of a pass of all tokens of a round, at most; 0: none is made."""
        ...

    def texts(self, batch: Batch) -> Texts:
        """The verified tokens of a round's requests, each one's last sampled token included."""
        ...


class Gains:
    """Drafts that each pass of a round adds to a request's, in the mean; learned, and slowly forgotten.

    Args:
        num_steps: drafts of each request.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._expected: list[float] = []
        self._rounds_left = 0  # until passes of one token are compared with wide ones again

    def next(self) -> int:
        """Passes of this round; 0: `num_steps` of one token do as well. To be asked once in each."""
        too_little = (index for index, gain in enumerate(self._expected) if gain < LEAST_GAIN)
        number = max(1, next(too_little, self._num_steps))
        if number < self._num_steps:
            self._rounds_left = 0
            return number
        self._rounds_left -= 1
        if self._rounds_left > 0:
            return 0
        self._rounds_left = _PROBE_EVERY
        return self._num_steps

    def learn(self, gained: Sequence[float]) -> None:
        """What the passes of a round have gained; of those that it left out something is supposed."""
        if len(gained) == self._num_steps:  # a probe, the first one among them
            self._expected = list(gained)
            return
        lacking = self._num_steps - sum(gained)
        supposed = min(gained[-1], lacking)
        for index in range(self._num_steps):
            seen, weight = supposed, _FORGETTING
            if index < len(gained):
                seen, weight = gained[index], _LEARNING
            self._expected[index] += weight * (seen - self._expected[index])


@dataclass(frozen=True)
class _Sent:
    """What a round's passes did, on its way to the host."""

    sums: torch.Tensor  # [num_passes, 3] int64: drafts, tokens looked up and those of them that are right
    arrived: torch.cuda.Event | None  # None: it is there
    num_reqs: int  # that can draft
    round_: int


class WidePasses:
    """Drafts of a round by passes of all of its tokens.

    Args:
        runner: makes the passes.
        lookups: of this worker's requests.
        counters: are shown in the metrics.
        num_steps: most drafts of a request in a round; rounds of fewer get passes of one token.
        max_model_len: tokens; where a request may come to the end, rounds get passes of one token as well.
        is_alone: no other rank has to draft the same, so this one may go on without lookups that fail.
    """

    def __init__(
        self,
        runner: WidePassRunner,
        lookups: DeviceLookups,
        counters: LookupCounters,
        *,
        num_steps: int,
        max_model_len: int,
        is_alone: bool = True,
    ) -> None:
        self._runner = runner
        self._lookups = lookups
        self._counters = counters
        self._is_alone = is_alone
        self._pauses = Pauses("A lookup", "every draft takes a pass of its own")
        self._num_steps = num_steps
        self._max_model_len = max_model_len
        self._gains = Gains(num_steps)
        self._sent: deque[_Sent] = deque()
        self._round = 0
        # All tensor-parallel ranks have to make as many passes, so they hear in the same round. By then no
        # position of the round's drafts comes again, and so no noise: what came of it must not decide
        # whether a token that is drawn with the same noise is a stand-in.
        self._delay = max(_LEAST_DELAY, num_steps)

    def warm_up(self, texts: Texts) -> None:
        """Let what searches be compiled now, and not while requests wait.

        Args:
            texts: of any one request, where they will be.
        """
        given = torch.zeros((1, self._num_steps), dtype=torch.int32, device=texts.lens.device)
        self._lookups.fill(given, torch.zeros_like(texts.lens), texts)

    def begin_round(self, batch: Batch, num_steps: int) -> int:
        """How many passes to draft with; 0: passes of one token do as well, or are all that is possible.

        Args:
            batch: the round's requests.
            num_steps: drafts of each.
        """
        self._round += 1
        self._hear()
        is_possible = (
            1 < num_steps == self._num_steps
            and len(batch.req_ids) <= self._runner.max_wide_reqs
            and max(batch.known_lens) + num_steps <= self._max_model_len
            and not all(batch.is_prefilling)
        )
        return self._gains.next() if self._pauses.is_over() and is_possible else 0

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
        sums = self._draft(drafts, batch, rounds, num_passes) if num_passes else None
        if sums is None:
            self._counters.count_round(drafts.shape[1], 0, 0)
            return 0
        self._pauses.note_success()
        self._send(sums, len(drafts) - sum(batch.is_prefilling))
        return num_passes

    def _draft(
        self, drafts: torch.Tensor, batch: Batch, rounds: Sequence[RoundSteps], num_passes: int
    ) -> torch.Tensor | None:
        """Returns `_Sent.sums`; None where a lookup failed."""
        num_reqs, num_steps = drafts.shape
        queries = Queries(
            requests=np.arange(num_reqs),
            firsts=np.zeros(num_reqs, dtype=np.int64),
            lens=np.full(num_reqs, num_steps),
        )
        draft_pass = DraftPass(queries, [steps.take(queries) for steps in rounds])
        texts = self._runner.texts(batch)
        is_drafting = on_device(np.logical_not(batch.is_prefilling), drafts.device)
        given = torch.zeros((num_reqs, num_steps), dtype=torch.int32, device=drafts.device)
        given[:, 0] = batch.tokens
        made = torch.zeros(num_reqs, dtype=torch.int64, device=drafts.device)
        sums = []
        for _ in range(num_passes):
            try:
                is_found = self._look_up(given, made.clamp(max=num_steps - 1), texts)
            except Exception:
                self._go_on_without_lookups()
                return None
            drawn, _ = self._runner.draft_pass(given.flatten(), draft_pass)
            drafts.copy_(drawn.view(num_reqs, num_steps))
            right = (drafts[:, :-1] == given[:, 1:]).long().cumprod(dim=1).sum(dim=1)
            looked_up = (num_steps - 1 - made).clamp(min=0) * is_found
            # When a draft is read again, rounding may make another one of it.
            accepted = (right - made).clamp(min=0) * is_found
            sums.append((torch.stack([right + 1 - made, looked_up, accepted]) * is_drafting).sum(dim=1))
            made = right + 1
            given[:, 1:] = drafts[:, :-1]
        return torch.stack(sums)

    def _look_up(self, given: torch.Tensor, made: torch.Tensor, texts: Texts) -> torch.Tensor:
        """See `DeviceLookups.fill`."""
        return self._lookups.fill(given, made, texts)

    def _go_on_without_lookups(self) -> None:
        """For this round; to be called where the exception is handled."""
        if envs.strict() or not self._is_alone:
            raise
        self._counters.count_failure()
        if self._pauses.note_failure():
            self._counters.count_pause()

    def _send(self, sums: torch.Tensor, num_reqs: int) -> None:
        """Let the host have `_Sent.sums` when they are there."""
        arrived = None
        if sums.device.type == "cuda":
            pinned = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            sums = pinned.copy_(sums, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._sent.append(_Sent(sums, arrived, num_reqs, self._round))

    def _hear(self) -> None:
        """Learn what the passes of an earlier round have gained."""
        while self._sent and self._sent[0].round_ + self._delay <= self._round:
            sent = self._sent.popleft()
            if sent.arrived is not None:
                sent.arrived.synchronize()
            gained, looked_up, accepted = zip(*sent.sums.tolist(), strict=True)
            self._counters.count_round(len(gained), sum(looked_up), sum(accepted))
            self._gains.learn([number / sent.num_reqs for number in gained])
