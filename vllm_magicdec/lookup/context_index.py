# SPDX-License-Identifier: Apache-2.0
"""Where the latest tokens of a context stood before, and what followed them there.

Hash chains, as in LZ77 compressors: every position is linked to the latest one before it that ends with the
same two tokens (or others of the same hash), and to the latest one of the same token. Appending a token
takes constant time, a lookup follows one chain; that of the single token only where the pair is new. The
loops are compiled by Numba, which vLLM requires and uses for its own n-gram lookups.

The suffix trees of arctic-inference, which vLLM's `suffix` method uses, answer as fast. But they took 30 ms
to build for a prompt of 16,000 tokens, and this 0.1; they end where the context ends, in the middle of a
text that repeats itself; and they are not installed with vLLM.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

MIN_MATCH = 1  # tokens
MAX_MATCH = 32  # tokens; longer ones count as this
# Latest occurrences of the last two tokens, or the last, that are compared.
MAX_CANDIDATES = 1024
# Of matches of MAX_MATCH, which none exceeds, the latest: a bound for contexts that are all alike.
MAX_LONGEST = 64
_MIN_CAPACITY = 256  # tokens; a power of two


@dataclass(frozen=True)
class Match:
    """How the context went on after the longest earlier occurrences of its latest tokens."""

    length: int  # tokens that are the same, from MIN_MATCH to MAX_MATCH; 0: none was found
    tokens: list[int]  # that followed
    shares: list[float]  # of the occurrences that went on with a token, of those that did so until there

    def first(self, most: int) -> "Match":
        """As it would be, had no more than so many tokens been asked for."""
        if most >= len(self.tokens):
            return self
        return Match(self.length, self.tokens[:most], self.shares[:most])


class ContextIndex:
    """One request's tokens, in the order in which they came.

    Args:
        capacity: tokens to make room for at first; it grows.
    """

    def __init__(self, capacity: int = 0) -> None:
        self._length = 0
        self._allocate(max(_MIN_CAPACITY, capacity))

    def __len__(self) -> int:
        return self._length

    def _allocate(self, capacity: int) -> None:
        capacity = 1 << (capacity - 1).bit_length()
        self._tokens = np.zeros(capacity, dtype=np.int32)
        # Of the chains by single tokens, and by pairs of them: each position's link, each hash's beginning.
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
        """[len(self)] int32, all of them."""
        return self._tokens[: self._length]

    def latest(self, ahead: np.ndarray) -> np.ndarray:
        """[num] int32, the last tokens of the context and `ahead`: MAX_MATCH, or all if there are fewer."""
        begin = max(0, self._length - max(0, MAX_MATCH - len(ahead)))
        return np.concatenate([self._tokens[begin : self._length], ahead[-MAX_MATCH:]])

    def look_up(self, ahead: np.ndarray, most: int, least_match: int = MIN_MATCH) -> Match:
        """The likeliest continuation after the longest match.

        Args:
            ahead: [num_ahead] int32, tokens that are supposed to follow the context: part of what is
                matched, not of what it is matched with.
            most: tokens to return, at most.
            least_match: tokens of a match, MIN_MATCH or one more; a single one is looked for the longest.
        """
        tokens = np.empty(most, dtype=np.int32)
        shares = np.empty(most, dtype=np.float64)
        known = self._tokens[: self._length]
        length = _look_up(known, self._previous, self._latest, ahead, tokens, shares, least_match)
        if length == 0:
            return Match(0, [], [])
        return Match(length, tokens.tolist(), shares.tolist())


@njit
def _hash(first, second, size):  # type: ignore[no-untyped-def]
    """Of two neighbouring tokens, within a table of `size`, a power of two."""
    mixed = np.uint64(first) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(second) * np.uint64(0xC2B2AE3D27D4EB4F)
    return np.int64((mixed >> np.uint64(32)) & np.uint64(size - 1))


@njit
def _link(tokens, previous, latest, begin, end):  # type: ignore[no-untyped-def]
    """Put the positions from `begin` up to `end` at the heads of their chains."""
    size = latest.shape[1]
    for place in range(begin, end):
        for pairs in range(min(place + 1, 2)):
            key = _hash(tokens[place - 1] if pairs else 0, tokens[place], size)
            previous[pairs, place] = latest[pairs, key]
            latest[pairs, key] = place


@njit
def _token(tokens, ahead, place):  # type: ignore[no-untyped-def]
    """Of the context with what is ahead of it."""
    return tokens[place] if place < len(tokens) else ahead[place - len(tokens)]


@njit
def table_size(most):  # type: ignore[no-untyped-def]
    """Of a hash table in which `tally` counts so many tokens: a power of two, half full at most."""
    size = 2
    while size < 2 * most:
        size *= 2
    return size


@njit
def tally(table, choices, counts, num_choices, token):  # type: ignore[no-untyped-def]
    """Count a token, among the first `num_choices` of `choices` or as a new one; returns their number.

    `table` holds their places in `choices` by the token's hash, and -1 where there is none.
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
def _find(tokens, previous, latest, ahead, end, pairs, places):  # type: ignore[no-untyped-def]
    """The longest matches of at least a single token, or a pair, in the order of its chain.

    Returns:
        (number, length): of the matches, whose last tokens' positions are then in `places`, and of each.
    """
    num_tokens = len(tokens)
    before = _token(tokens, ahead, end - 2) if pairs else 0
    place = latest[pairs, _hash(before, _token(tokens, ahead, end - 1), latest.shape[1])]
    num_places, longest = 0, 1 + pairs
    for _ in range(MAX_CANDIDATES):
        if place < 0:
            break
        length = 0
        if place + 1 < num_tokens:
            while (
                length < MAX_MATCH
                and length <= place
                and tokens[place - length] == _token(tokens, ahead, end - 1 - length)
            ):
                length += 1
        if length > longest:
            num_places, longest = 0, length
        if length == longest:
            places[num_places] = place
            num_places += 1
            if length == MAX_MATCH and num_places == MAX_LONGEST:
                break
        place = previous[pairs, place]
    return num_places, longest


@njit
def _look_up(tokens, previous, latest, given, found, shares, least_match):  # type: ignore[no-untyped-def]
    """See `ContextIndex.look_up`; fills `found` and `shares`, returns the match's length."""
    num_tokens, most = len(tokens), len(found)
    end = num_tokens + len(given)  # of what is matched
    # What is found is ahead of the context as well: an occurrence near its end goes on with it.
    ahead = np.empty(len(given) + most, dtype=np.int32)
    ahead[: len(given)] = given
    places = np.empty(MAX_CANDIDATES, dtype=np.int32)  # of the longest matches, the latest first
    num_places, length = 0, 0
    if end >= 2:
        num_places, length = _find(tokens, previous, latest, ahead, end, 1, places)
    if num_places == 0 and end >= 1 and least_match == MIN_MATCH:
        num_places, length = _find(tokens, previous, latest, ahead, end, 0, places)
    if num_places == 0:
        return 0

    choices = np.empty(num_places, dtype=np.int32)
    counts = np.empty(num_places, dtype=np.int32)
    tables = np.empty(table_size(num_places), dtype=np.int32)
    for step in range(most):
        num_choices, best = 0, 0
        table = tables[: table_size(num_places)]
        table[:] = -1
        for index in range(num_places):
            token = _token(tokens, ahead, places[index] + 1 + step)
            num_choices = tally(table, choices, counts, num_choices, token)
        for choice in range(num_choices):
            if counts[choice] > counts[best]:  # of equals, the one seen last
                best = choice
        token = choices[best]
        found[step] = ahead[len(given) + step] = token
        shares[step] = counts[best] / num_places
        kept = 0
        for index in range(num_places):
            if _token(tokens, ahead, places[index] + 1 + step) == token:
                places[kept] = places[index]
                kept += 1
        num_places = kept
    return length
