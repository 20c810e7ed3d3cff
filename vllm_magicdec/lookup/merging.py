# SPDX-License-Identifier: Apache-2.0
"""Which of several sources is believed.

SSSD (arXiv 2411.05894) takes exact matches of the context first and fills up from the datastore. Here
each source says how its text went on, its calibration says how far that is likely to be right, and the one
that promises the most tokens is taken; of equals the first, so list the context first. All of them learn
from what followed, the one that was taken or not: else one that started badly would never be heard again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_magicdec.lookup.calibration import Calibration
from vllm_magicdec.lookup.context_index import Match


@dataclass(frozen=True)
class Best:
    """The continuation that promises the most."""

    source: int  # its place among the matches
    tokens: list[int]  # as many of the match's as are likely enough
    chances: list[float]  # that each is right if those before it were


def choose(matches: Sequence[Match], calibrations: Sequence[Calibration], min_acceptance: float) -> Best:
    """The match with the most expected tokens.

    Args:
        matches: one or more, of one text, by source.
        calibrations: of each source.
        min_acceptance: a continuation ends where it is less likely than this to be right until there.
    """
    best, most_expected = Best(0, [], []), 0.0
    for source, (match, calibration) in enumerate(zip(matches, calibrations, strict=True)):
        chances, expected = calibration.chances(match.length, match.shares, min_acceptance)
        if expected > most_expected:
            best, most_expected = Best(source, match.tokens[: len(chances)], chances), expected
    return best


def learn(matches: Sequence[Match], calibrations: Sequence[Calibration], followed: Sequence[int]) -> None:
    """Take note of how a text went on after a lookup.

    Args:
        matches: what each source had said.
        calibrations: of each source.
        followed: the tokens that followed, as far as they are known; for a source that erred beyond them
            nothing is learned.
    """
    for match, calibration in zip(matches, calibrations, strict=True):
        known = zip(match.tokens, match.shares, followed, strict=False)
        for step, (token, share, true) in enumerate(known):
            calibration.observe(match.length + step, share, token == true)
            if token != true:
                break
