# SPDX-License-Identifier: Apache-2.0
"""Time in which a machine ran: a virtual one may stand still for a minute."""

import asyncio
import time
from collections.abc import Callable

_TICK_S = 0.2
_MOST_S = _TICK_S + 1.0  # counted between two ticks; a process that got no turn for longer stood still
_LEAST_S = 1e-6  # of a sleep; what is less may be rounding, which would stay


class Clock:
    """Seconds since a run began, without those in which its client stood still.

    A server that hangs does not stop it, for the client goes on.

    Args:
        read: a clock that goes on meanwhile.
    """

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._ran_s = 0.0
        self._ticked_s = read()

    def now_s(self) -> float:
        """Since the run began. Whoever asks before the first tick after a standstill is told no more."""
        return self._ran_s + min(self._read() - self._ticked_s, _MOST_S)

    async def tick(self) -> None:
        """Until it is cancelled. Without it the clock soon stops."""
        while True:
            self._ran_s, self._ticked_s = self.now_s(), self._read()
            await asyncio.sleep(_TICK_S)


async def sleep_until(until_s: float, now_s: Callable[[], float]) -> None:
    """Until it is so late by a clock that may stand still."""
    while (left_s := until_s - now_s()) > 0:
        await asyncio.sleep(max(left_s, _LEAST_S))
