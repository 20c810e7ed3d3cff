# SPDX-License-Identifier: Apache-2.0
"""The clock on the wall."""

import time
from collections.abc import Callable


def seconds(function: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
