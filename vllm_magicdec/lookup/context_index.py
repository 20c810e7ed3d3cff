# SPDX-License-Identifier: Apache-2.0
"""Search for earlier occurrences of a context's latest tokens.

Hash chains, as in LZ77 compressors: each position links to the latest earlier one whose last two tokens
have the same hash, and to the latest earlier one with the same token. Appending a token takes constant
time. A lookup follows one chain, that of the single token only if the pair is new. Numba, which vLLM
requires and uses for its own n-gram lookups, compiles the loops.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numba import njit

MIN_MATCH = 1  # tokens
MAX_MATCH = 32  # tokens; longer matches count as this
MAX_CANDIDATES = 1024  # latest positions of a chain that are compared
MAX_LONGEST = 64  # latest matches of MAX_MATCH tokens that are used: a bound for repetitive contexts
_MIN_CAPACITY = 256  # tokens; a power of two
_NO_TOKEN = 2**31  # beyond int32


@dataclass(frozen=True)
class Match:
    """The likeliest continuation after the longest earlier occurrences of the latest tokens."""

    length: int  # matched tokens, MIN_MATCH to MAX_MATCH; 0 if there is no match
    tokens: list[int]  # the continuation
    shares: list[float]  # of the occurrences that continued alike so far, the share with this token next

    def first(self, max_tokens: int) -> "Match":
        """Return the match with the first tokens of its continuation."""
        if max_tokens >= len(self.tokens):
            return self
        return Match(self.length, self.tokens[:max_tokens], self.shares[:max_tokens])


class Source(Protocol):
    """Searchable texts beside a request's own context."""

    def look_up(self, latest: np.ndarray, max_tokens: int) -> Match:
        """Return the likeliest continuation after the longest occurrences of the latest tokens.

        Args:
            latest: [num] int32, the end of a request's text, at least MAX_MATCH tokens if it has as many.
        """

    def add(self, tokens: np.ndarray) -> None:
        """Add a finished request's answer, [num] int32."""


class ContextIndex:
    """Index of one request's tokens; it grows beyond `capacity` tokens."""

    def __init__(self, capacity: int = 0) -> None:
        self._length = 0
        self._allocate(max(_MIN_CAPACITY, capacity))

    def __len__(self) -> int:
        return self._length

    def _allocate(self, capacity: int) -> None:
        capacity = 1 << (capacity - 1).bit_length()
        self._tokens = np.zeros(capacity, dtype=np.int32)
        # Chains by single token, and by pair: the link of each position, and the head of each hash.
        self._previous = np.zeros((2, capacity), dtype=np.int32)
        self._latest = np.full((2, capacity), -1, dtype=np.int32)

    def extend(self, tokens: np.ndarray) -> None:
        """Append tokens, [num_tokens] int32."""
        begin, end = self._length, self._length + len(tokens)
        if end > len(self._tokens):
            known = self._tokens[:begin]
            self._allocate(end)
            self._tokens[:begin] = known
            begin = 0
        self._tokens[self._length : end] = tokens
        self._length = end
        _link(self._tokens, self._previous, self._latest, begin, end)

    @property
    def tokens(self) -> np.ndarray:
        """All tokens, [len(self)] int32."""
        return self._tokens[: self._length]

    def latest(self, ahead: np.ndarray) -> np.ndarray:
        """Return the last MAX_MATCH tokens (or all) of the context and `ahead`, [num] int32."""
        begin = max(0, self._length - max(0, MAX_MATCH - len(ahead)))
        return np.concatenate([self._tokens[begin : self._length], ahead[-MAX_MATCH:]])

    def look_up(self, ahead: np.ndarray, max_tokens: int, min_match: int = MIN_MATCH) -> Match:
        """Return the likeliest continuation after the longest match.

        Args:
            ahead: [num_ahead] int32, tokens assumed to follow the context. They are matched, but are not
                searched themselves.
            max_tokens: maximum length of the continuation.
            min_match: minimum length of a match, MIN_MATCH or one more; a single token takes the longest.
        """
        tokens = np.empty(max_tokens, dtype=np.int32)
        shares = np.empty(max_tokens, dtype=np.float64)
        length = _look_up(self.tokens, self._previous, self._latest, ahead, tokens, shares, min_match)
        if length == 0:
            return Match(0, [], [])
        return Match(length, tokens.tolist(), shares.tolist())


@njit
def _hash(first, second, size):  # type: ignore[no-untyped-def]
    """Hash two neighbouring tokens for a table of `size`, a power of two."""
    mixed = np.uint64(first) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(second) * np.uint64(0xC2B2AE3D27D4EB4F)
    return np.int64((mixed >> np.uint64(32)) & np.uint64(size - 1))


@njit
def _link(tokens, previous, latest, begin, end):  # type: ignore[no-untyped-def]
    """Put the positions from `begin` up to `end` at the heads of their chains."""
    size = latest.shape[1]
    for position in range(begin, end):
        for pairs in range(min(position + 1, 2)):
            key = _hash(tokens[position - 1] if pairs else 0, tokens[position], size)
            previous[pairs, position] = latest[pairs, key]
            latest[pairs, key] = position


@njit
def _token(tokens, ahead, position):  # type: ignore[no-untyped-def]
    return tokens[position] if position < len(tokens) else ahead[position - len(tokens)]


@njit
def _table_size(max_tokens):  # type: ignore[no-untyped-def]
    """Return the size of `_tally`'s hash table for so many tokens: a power of two, at most half full."""
    size = 2
    while size < 2 * max_tokens:
        size *= 2
    return size


@njit
def _tally(table, choices, counts, num_choices, token):  # type: ignore[no-untyped-def]
    """Count a token among the first `num_choices` of `choices`, or as a new one; return their number.

    `table` maps the token's hash to its index in `choices`, or -1.
    """
    key = _hash(0, token, len(table))
    while table[key] >= 0 and choices[table[key]] != token:
        key = (key + 1) & (len(table) - 1)
    choice = table[key]
    if choice < 0:
        table[key] = choice = num_choices
        choices[choice], counts[choice] = token, 0
        num_choices += 1
    counts[choice] += 1
    return num_choices


@njit
def _find(tokens, previous, latest, ahead, end, pairs, matches):  # type: ignore[no-untyped-def]
    """Find the longest matches in the chain of the last token, or of the last pair if `pairs`.

    Returns:
        Their number and length; `matches` holds the positions of their last tokens, the latest first.
    """
    num_tokens = len(tokens)
    before = _token(tokens, ahead, end - 2) if pairs else 0
    position = latest[pairs, _hash(before, _token(tokens, ahead, end - 1), latest.shape[1])]
    num_matches, longest = 0, 1 + pairs
    for _ in range(MAX_CANDIDATES):
        if position < 0:
            break
        length = 0
        if position + 1 < num_tokens:
            while (
                length < MAX_MATCH
                and length <= position
                and tokens[position - length] == _token(tokens, ahead, end - 1 - length)
            ):
                length += 1
        if length > longest:
            num_matches, longest = 0, length
        if length == longest:
            matches[num_matches] = position
            num_matches += 1
            if length == MAX_MATCH and num_matches == MAX_LONGEST:
                break
        position = previous[pairs, position]
    return num_matches, longest


@njit
def continue_all(tokens, given, ends, separator, lowest_first, found, shares):  # type: ignore[no-untyped-def]
    """Fill `found` and `shares` with the likeliest continuation of occurrences; return its length.

    Args:
        given: tokens after the text. The continuation follows them, and an occurrence near the end of the
            text continues in both.
        ends: positions of the occurrences' last tokens; overwritten.
        separator: the token that ends an occurrence's text.
        lowest_first: whether the lowest id wins at a tie, or the one seen first.
    """
    ahead = np.empty(len(given) + len(found), dtype=np.int64)
    ahead[: len(given)] = given
    num_ends = len(ends)
    choices = np.empty(num_ends, dtype=np.int64)
    counts = np.empty(num_ends, dtype=np.int64)
    tables = np.empty(_table_size(num_ends), dtype=np.int32)
    for step in range(len(found)):
        num_choices, best = 0, 0
        table = tables[: _table_size(num_ends)]
        table[:] = -1
        for index in range(num_ends):
            token = _token(tokens, ahead, ends[index] + 1 + step)
            if token != separator:
                num_choices = _tally(table, choices, counts, num_choices, token)
        if num_choices == 0:
            return step
        for choice in range(num_choices):
            more = counts[choice] - counts[best]
            if more > 0 or (more == 0 and lowest_first and choices[choice] < choices[best]):
                best = choice
        token = choices[best]
        found[step] = ahead[len(given) + step] = token
        shares[step] = counts[best] / num_ends  # texts that end here did not continue with it
        kept = 0
        for index in range(num_ends):
            if _token(tokens, ahead, ends[index] + 1 + step) == token:
                ends[kept] = ends[index]
                kept += 1
        num_ends = kept
    return len(found)


@njit
def _look_up(tokens, previous, latest, given, found, shares, min_match):  # type: ignore[no-untyped-def]
    """Fill `found` and `shares` with the continuation after `given`; return the length of the match."""
    end = len(tokens) + len(given)
    matches = np.empty(MAX_CANDIDATES, dtype=np.int32)
    num_matches, length = 0, 0
    if end >= 2:
        num_matches, length = _find(tokens, previous, latest, given, end, 1, matches)
    if num_matches == 0 and end >= 1 and min_match == MIN_MATCH:
        num_matches, length = _find(tokens, previous, latest, given, end, 0, matches)
    if num_matches == 0:
        return 0
    continue_all(tokens, given, matches[:num_matches], _NO_TOKEN, False, found, shares)
    return length
