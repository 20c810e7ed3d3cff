# SPDX-License-Identifier: Apache-2.0
"""The verified tokens of requests: of one on the host, of a batch on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class History:
    """The verified tokens of a request, on the host."""

    recorded: np.ndarray  # [num_recorded] int32, from the first token on
    latest: Sequence[int]  # the tokens after these

    def __len__(self) -> int:
        return len(self.recorded) + len(self.latest)

    def may_extend(self, tokens: np.ndarray) -> bool:
        """Return whether the history may begin with `tokens`, [num] int32; compares only the last one."""
        last = len(tokens) - 1
        if last >= len(self):
            return False
        recorded = len(self.recorded)
        own = self.recorded[last] if last < recorded else self.latest[last - recorded]
        return bool(own == tokens[last])

    def after(self, count: int) -> np.ndarray:
        """Return [len(self) - count] int32, all but the first `count` tokens."""
        latest = self.latest[max(0, count - len(self.recorded)) :]
        return np.concatenate([self.recorded[count:], np.array(latest, dtype=np.int32)])


@dataclass(frozen=True)
class Texts:
    """The verified tokens of a batch's requests."""

    token_ids: torch.Tensor  # [max_num_reqs, max_model_len] int32
    rows: torch.Tensor  # [num_reqs] int, each request's row in `token_ids`
    lens: torch.Tensor  # [num_reqs] int64, at least 1
    max_len: int  # upper bound of `lens`, on the host

    def tokens_at(self, positions: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """Return [num_reqs, n] int32, the tokens at some positions; -1 before a text's begin.

        Args:
            positions: [num_reqs, n] int64.
            drafts: [num_reqs, num_drafts] int32, each text's last token and its drafts.
        """
        rows, within = self.rows.long().unsqueeze(1), positions - self.lens.unsqueeze(1) + 1
        verified = self.token_ids[rows, positions.clamp(0, self.token_ids.shape[1] - 1)]
        drafted = drafts.gather(1, within.clamp(0, drafts.shape[1] - 1))
        return torch.where(within > 0, drafted, verified).masked_fill(positions < 0, -1)
