# SPDX-License-Identifier: Apache-2.0
"""How a round's drafts are made: here step by step.

`staged.py` and `wide_passes.py` have loops whose passes check looked-up tokens.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vllm_magicdec.adaptive.draft_plan import DraftLists
from vllm_magicdec.drafting.ports import Target
from vllm_magicdec.views.round import Batch, Round


@dataclass(frozen=True)
class Drafts:
    """The drafts of a round."""

    tokens: torch.Tensor | DraftLists  # [num_reqs, num_steps] int64, or lists by request
    num_written: np.ndarray  # [num_reqs] int64, see `ports.Cache.end_round`
    num_passes: int  # passes of the draft; 0 if there were none or all tokens were looked up

    @property
    def lists(self) -> DraftLists | None:
        """The drafts by request, if their numbers differ."""
        return self.tokens if isinstance(self.tokens, DraftLists) else None


class Prepare(Protocol):
    """Prepares a round's views."""

    def __call__(self, *, is_wide: bool = False) -> Round:
        """Call it once, before the first pass; `is_wide`: that takes all steps of all requests."""


class Loop(Protocol):
    """Makes the drafts of a round."""

    def draft(self, batch: Batch, num_steps: int, prepare: Prepare) -> Drafts:
        """Draft `num_steps` tokens of each request, or fewer."""


class Stepwise:
    """One pass per draft, each with the token that the pass before has sampled.

    Args:
        buffer: [max_num_reqs, max_num_steps] int64, the drafts of a round.
    """

    def __init__(self, target: Target, buffer: torch.Tensor) -> None:
        self._target = target
        self.buffer = buffer

    def draft(self, batch: Batch, num_steps: int, prepare: Prepare) -> Drafts:
        """See `Loop`."""
        round_, tokens, sampled = prepare(), batch.tokens, []
        for index in range(num_steps):
            tokens = self._target.run(round_.step(index, tokens)).tokens
            sampled.append(tokens)
        num_reqs = len(batch.req_ids)
        drafts = self.buffer[:num_reqs, :num_steps]
        drafts.copy_(torch.stack(sampled, dim=1))
        return Drafts(drafts, np.full(num_reqs, num_steps), num_steps)
