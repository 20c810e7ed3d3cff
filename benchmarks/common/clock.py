# SPDX-License-Identifier: Apache-2.0
"""Wall-clock timing."""

import time
from collections.abc import Callable


def seconds(function: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
