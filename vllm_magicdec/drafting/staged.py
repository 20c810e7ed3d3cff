# SPDX-License-Identifier: Apache-2.0
"""A round whose passes draft several tokens each, where lookups foresee what the draft will draw.

A pass takes a request's last token and some looked-up ones over the same view, and so draws a token after
each of them. Those that the looked-up tokens turn out to be are drafts, and the one after them is one more:
TriForce's stages (arXiv 2404.11912), with a lookup for the smallest model. The drafts are those that one
pass per token makes, whatever the lookups say; they only set how many passes it takes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from vllm_magicdec.adaptive.metrics import LookupCounters
from vllm_magicdec.views.base import Batch, on_device
from vllm_magicdec.views.passes import DraftPass, Queries, RoundSteps

if TYPE_CHECKING:  # Numba comes with them
    from vllm_magicdec.lookup.lookups import Continuation, Lookups


class PassRunner(Protocol):
    """What staged drafts need from a vLLM model runner beside `drafting.drafter.Runner`."""

    @property
    def max_pass_tokens(self) -> int:
        """Query tokens of a pass, at most; no fewer than requests in a batch."""
        ...

    def draft_pass(self, tokens: torch.Tensor, draft_pass: DraftPass) -> torch.Tensor:
        """Run the target over the pass's views and draw, greedily, the token after each of its own.

        Args:
            tokens: [num_tokens] int32, the query tokens.
            draft_pass: where they look and where their K/V goes, by `Drafter.groups`.

        Returns:
            [num_tokens] int32 or int64.
        """
        ...


class StagedDrafts:
    """Drafts of a round in as few passes as the lookups allow. Waits for the device after every pass.

    Args:
        runner: makes the passes.
        lookups: of this worker's requests.
        counters: are shown in the metrics.
        max_model_len: tokens.
    """

    def __init__(
        self, runner: PassRunner, lookups: "Lookups", counters: LookupCounters, max_model_len: int
    ) -> None:
        self._runner = runner
        self._lookups = lookups
        self._counters = counters
        self._max_model_len = max_model_len

    def fill(self, drafts: torch.Tensor, batch: Batch, rounds: Sequence[RoundSteps]) -> None:
        """Make all drafts of a round.

        Args:
            drafts: [num_reqs, num_steps] int64, written; 0 where a draft would not be used.
            batch: the round's requests, with their histories.
            rounds: the round's steps by group of layers.
        """
        num_reqs, num_steps = drafts.shape
        room = (self._max_model_len - batch.context_lens).tolist()
        # What a request drafts before its prompt is whole, or beyond the model's length, is dropped.
        wanted = [0 if batch.is_prefilling[i] else min(num_steps, room[i]) for i in range(num_reqs)]
        drafting = [i for i in range(num_reqs) if wanted[i] > 0]
        self._lookups.follow([batch.req_ids[i] for i in drafting], [batch.histories[i] for i in drafting])
        tokens = batch.tokens.tolist()
        drafted: list[list[int]] = [[] for _ in range(num_reqs)]
        num_passes = num_looked_up = num_accepted = 0
        while running := [i for i in range(num_reqs) if len(drafted[i]) < wanted[i]]:
            found = self._look_up(running, batch.req_ids, drafted, wanted)
            queries = Queries(
                requests=np.array(running),
                firsts=np.array([len(drafted[i]) for i in running]),
                lens=np.array([1 + len(ahead.tokens) for ahead in found]),
            )
            given = [
                token
                for i, ahead in zip(running, found, strict=True)
                for token in (drafted[i][-1] if drafted[i] else tokens[i], *ahead.tokens)
            ]
            drawn = self._runner.draft_pass(
                on_device(given, drafts.device).to(torch.int32),
                DraftPass(queries, [steps.take(queries) for steps in rounds]),
            ).tolist()
            for i, ahead, start in zip(running, found, queries.starts.tolist(), strict=False):
                num_right = _num_equal(ahead.tokens, drawn[start:])
                drafted[i] += drawn[start : start + num_right + 1]
                self._lookups.learn(ahead, num_right)
                num_looked_up += len(ahead.tokens)
                num_accepted += num_right
            num_passes += 1
        if num_passes:
            self._counters.count_round(num_passes, num_looked_up, num_accepted)
        padded = [own + [0] * (num_steps - len(own)) for own in drafted]
        drafts.copy_(torch.tensor(padded, dtype=torch.int64))

    def _look_up(
        self,
        running: Sequence[int],
        req_ids: Sequence[str],
        drafted: Sequence[Sequence[int]],
        wanted: Sequence[int],
    ) -> list["Continuation"]:
        """Of each request that runs, no more than its drafts still lack and than the pass has room for."""
        room, found = self._runner.max_pass_tokens - len(running), []
        for i in running:
            # The token after the last looked-up one is a draft as well.
            most = min(wanted[i] - len(drafted[i]) - 1, room)
            found.append(self._lookups.look_up(req_ids[i], drafted[i], most))
            room -= len(found[-1].tokens)
        return found


def _num_equal(guessed: Sequence[int], drawn: Sequence[int]) -> int:
    """Tokens in which both begin alike."""
    count = 0
    while count < len(guessed) and guessed[count] == drawn[count]:
        count += 1
    return count
