# SPDX-License-Identifier: Apache-2.0
"""Signals while a process starts."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_held_back() -> Iterator[None]:
    """Handlers of SIGINT and SIGTERM run at the block's end. In the main thread alone.

    One that raises in the middle of `subprocess.Popen` leaves a process that nobody knows of. What is
    started within has a shell's own handlers, also of what that shell lets its background jobs ignore.
    """
    arrived: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in handlers.items() if handler is not None}
    try:
        for number in before:
            signal.signal(number, lambda number, _: arrived.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)
