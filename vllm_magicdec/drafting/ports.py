# SPDX-License-Identifier: Apache-2.0
"""What drafting needs from vLLM's model runners, and from the KV cache that the draft reads."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from vllm_magicdec.attention.observing import LayerObserver
from vllm_magicdec.views.round import Batch, Pass, Sampled


class Target(Protocol):
    """A vLLM model runner; `vllm_api/runner_v1.py` and `runner_v2.py` implement it."""

    @property
    def max_num_tokens(self) -> int:
        """Maximum query tokens of a pass; at least the maximum number of requests in a batch."""

    @property
    def reads_ahead(self) -> bool:
        """Whether a pass can check looked-up tokens; otherwise it takes one token per request."""

    def run(self, draft_pass: Pass) -> Sampled:
        """Run the draft over the views of a pass in all groups; sample by `draft_sample_method`."""

    def read(self, draft_pass: Pass) -> None:
        """Run a draft model over views of pages for the K/V alone; nothing is sampled."""

    def token_ids(self, indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return verified tokens of the round's requests.

        Args:
            indices: [num_tokens] int64, in the batch.
            positions: [num_tokens] int64; of positions that are not verified, any token may come back.

        Returns:
            [num_tokens] int32.
        """

    def observe(
        self, layer_names: Sequence[str], indices: Sequence[int], window: int, observer: LayerObserver
    ) -> None:
        """Run the target over the last `window` tokens before `Batch.observable_lens` of some requests.

        Args:
            indices: of the requests in the batch.
            window: tokens per request, all of which must exist.
            observer: receives the queries of all requests, one after the other.
        """

    def note_unchecked(self, request: int, first: int, tokens: Sequence[int]) -> None:
        """Record that a request's last drafts were looked up and have a one-hot draft distribution.

        Args:
            request: index in the batch.
            first: index of the first of these drafts among the request's drafts.
        """


class Cache:
    """The KV cache that the draft reads: here the target's own, which every verification completes.

    - A round that drafts calls all methods in this order, `extend` for every pass.
    - A round whose drafts would be dropped calls the first two.
    - A paused round calls the first.

    If reading the batch fails, none is called; this costs acceptance only.
    """

    is_own = False
    """Whether the draft has a KV cache of its own, which has to follow the target in every round."""
    max_added = 0
    """Maximum queries that `extend` adds per request."""

    def begin_round(self, batch: Batch) -> None:
        """Record the tokens of the target's step and their acceptance."""

    def catch_up(self, batch: Batch, num_steps: int, *, num_latest: int = 0, is_wide: bool = False) -> None:
        """Write the K/V of verified tokens that the cache lacks, or leave them to the round's first pass.

        Args:
            num_steps: drafts of each; 0 if no pass follows.
            num_latest: verified tokens right before the first draft that every layer's view contains.
            is_wide: the first pass takes all steps of all requests.
        """

    def extend(self, draft_pass: Pass) -> Pass:
        """Return a pass of the round, its first one with the tokens that were left to it."""
        return draft_pass

    def end_round(self, batch: Batch, num_written: np.ndarray) -> None:
        """Record the round's passes.

        Args:
            num_written: [num_reqs] int64, drafts whose inputs' K/V passes have written: the last verified
                token's and those of all of these drafts but the last.
        """
