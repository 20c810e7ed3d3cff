# SPDX-License-Identifier: Apache-2.0
"""The verified tokens of a request."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
