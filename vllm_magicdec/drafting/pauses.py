# SPDX-License-Identifier: Apache-2.0
"""When to try again what has failed: what is broken for good must cost next to nothing."""

from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")

FAILURES_BEFORE_A_PAUSE = 3
# In rounds, which all tensor-parallel ranks count alike, and which no idle engine takes.
FIRST_PAUSE, LONGEST_PAUSE, GROWTH = 32, 8192, 4


class Pauses:
    """Pauses that grow as long as every try fails, and that as many good rounds make short again.

    Args:
        what: may fail, as the beginning of a sentence.
        meanwhile: how requests go on without it.
    """

    def __init__(self, what: str, meanwhile: str) -> None:
        self._what = what
        self._meanwhile = meanwhile
        self._has_failed = False
        self._num_failures = 0  # that are not forgiven
        self._num_successes = 0  # since the latest one
        self._pause = 0  # the latest one's rounds
        self._rounds_left = 0

    def is_over(self) -> bool:
        """Whether to try in this round; to be asked once in each."""
        self._rounds_left -= self._rounds_left > 0
        return self._rounds_left == 0

    @property
    def is_on(self) -> bool:
        """Whether one lasts; unlike `is_over`, any number of times in a round."""
        return self._rounds_left > 0

    def note_success(self) -> None:
        """After a round in which it was tried."""
        if self._num_failures == 0:
            return
        self._num_successes += 1
        if self._pause and self._num_successes == 1:
            logger.info("%s works again.", self._what)
        if self._num_successes >= max(FIRST_PAUSE, self._pause):
            self._num_failures = self._pause = 0

    def note_failure(self) -> bool:
        """To be called where the exception is handled; whether a pause begins.

        The first failure is logged with its trace, and every pause in a line.
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
