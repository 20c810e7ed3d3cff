# SPDX-License-Identifier: Apache-2.0
"""How many of its drafts each request has verified.

A step drafts the same number of tokens for all of its requests, because a draft pass costs about the same
for one request as for all. A verified position costs by itself, and requests differ in how far their
drafts get. By the marginal form of MagicDec's Eq. 2 (arXiv 2408.11049), one more position pays where

    P(the request's drafts stand up to it) >= seconds per verified position * tokens per second
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log

# What a draft of a new request is believed to be: as if so many had been tried.
_DOUBT = 8.0
# Of each draft tried before, when another was: about the last 32 count.
_FORGET = 1 - 1 / 32


@dataclass
class _Record:
    tried: float = 0.0
    stood: float = 0.0


class RequestLengths:
    """Keeps each request's own acceptance."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._together = _Record(tried=4.0, stood=3.0)

    def observe(self, req_id: str, drafted: int, accepted: int) -> None:
        """Of a request's `drafted` tokens, `accepted` stood."""
        tried = min(drafted, accepted + 1)  # those behind the first rejected one say nothing
        for record in (self._records.setdefault(req_id, _Record()), self._together):
            decay = _FORGET**tried
            record.tried = decay * record.tried + tried
            record.stood = decay * record.stood + accepted

    def keep(self, req_id: str, drafted: int, least_chance: float) -> int:
        """How many of a request's drafts are worth verifying: at least one, so that it can recover.

        Args:
            req_id: the request.
            drafted: its drafts.
            least_chance: the right side of the rule above; 0 keeps all.
        """
        if not drafted or least_chance <= 0:
            return drafted
        record = self._records.get(req_id, _Record())
        usual = self._together.stood / self._together.tried
        rate = (record.stood + _DOUBT * usual) / (record.tried + _DOUBT)
        if least_chance >= rate:
            return 1
        # rate ** place >= least_chance
        return drafted if rate >= 1 else min(drafted, int(log(least_chance) / log(rate)))

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drop the records of requests that have ended."""
        for req_id in req_ids:
            self._records.pop(req_id, None)
