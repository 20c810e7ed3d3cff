# SPDX-License-Identifier: Apache-2.0
"""Growing pauses between retries, so that a permanent failure costs almost nothing."""

from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")

FAILURES_BEFORE_A_PAUSE = 3
# In rounds, which all tensor-parallel ranks count alike.
FIRST_PAUSE, LONGEST_PAUSE, GROWTH = 32, 8192, 4


class Pauses:
    """Pauses that grow while every retry fails, and reset after as many good rounds as the latest was long.

    Args:
        what: the component that may fail, as the subject of a log sentence.
        meanwhile: clause on how requests continue without it.
    """

    def __init__(self, what: str, meanwhile: str) -> None:
        self._what = what
        self._meanwhile = meanwhile
        self._has_failed = False
        self._num_failures = 0  # since the last reset
        self._num_successes = 0  # since the last failure
        self._pause = 0  # length of the last pause in rounds
        self._rounds_left = 0

    def is_over(self) -> bool:
        """Count a round and return whether to try in it; call once per round."""
        self._rounds_left -= self._rounds_left > 0
        return self._rounds_left == 0

    @property
    def is_on(self) -> bool:
        """Whether a pause lasts."""
        return self._rounds_left > 0

    def note_success(self) -> None:
        """Record a round without a failure."""
        if self._num_failures == 0:
            return
        self._num_successes += 1
        if self._pause and self._num_successes == 1:
            logger.info("%s works again.", self._what)
        if self._num_successes >= max(FIRST_PAUSE, self._pause):
            self._num_failures = self._pause = 0

    def note_failure(self) -> bool:
        """Record a failure and return whether a pause begins; call in the exception handler.

        The first failure is logged with its traceback, and each pause in one line.
        """
        if not self._has_failed:
            logger.exception(
                "%s failed; %s, and no request is lost. Further failures are only counted.",
                self._what,
                self._meanwhile,
            )
        self._has_failed = True
        self._num_failures += 1
        self._num_successes = 0
        if self._num_failures < FAILURES_BEFORE_A_PAUSE:
            return False
        self._pause = min(self._pause * GROWTH, LONGEST_PAUSE) or FIRST_PAUSE
        self._rounds_left = self._pause + 1
        logger.warning(
            "%s failed again and is tried again after %d rounds; until then %s.",
            self._what,
            self._pause,
            self._meanwhile,
        )
        return True
