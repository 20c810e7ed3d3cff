# SPDX-License-Identifier: Apache-2.0
"""Where the latest tokens of a text stand in a datastore, and what follows them there.

As in SSSD (arXiv 2411.05894), a suffix array finds the longest match, and counts of what follows give the
likeliest continuation. The array orders places by what stands *before* them (`datastore_files.py` says
why), so it takes one binary search, whatever the match's length. The files are mapped into memory: of a
large datastore the operating system keeps what is used.
"""

from pathlib import Path

import numpy as np
from numba import njit

from vllm_magicdec.lookup import datastore_files
from vllm_magicdec.lookup.context_index import MAX_MATCH, Match, table_size, tally
from vllm_magicdec.lookup.datastore_files import Header, OpenSizes, Vocabulary

MIN_MATCH = 2  # tokens; in texts of others a single one tells too little
# Of the places of the longest match, spread evenly over them: each may wait for memory twice, and twice as
# many found no more tokens that were right.
MAX_SAMPLES = 32


class Datastore:
    """Tokens of documents, read-only; any number of threads and processes may share one.

    Args:
        header: of `tokens` and `suffix_array`, see `datastore_files`.
        sizes: of their files.
    """

    def __init__(
        self, header: Header, tokens: np.ndarray, suffix_array: np.ndarray, sizes: OpenSizes
    ) -> None:
        self._sizes = sizes
        self.header = header
        self._tokens = tokens
        self._suffix_array = suffix_array

    @classmethod
    def open(cls, path: Path, vocab_size: int, vocabulary: Vocabulary | None = None) -> "Datastore":
        """Open what `magicdec index` wrote, and compile the search (some seconds).

        Args:
            path, vocab_size, vocabulary: as for `datastore_files.check`, which refuses as it does.
        """
        datastore_files.check(path, vocab_size, vocabulary)
        header, tokens, suffix_array = datastore_files.read(path)
        opened = cls(header, tokens, suffix_array, datastore_files.OpenSizes(path))
        opened.look_up(np.zeros(MIN_MATCH, dtype=np.int32), 1)
        return opened

    def add(self, tokens: np.ndarray) -> None:
        """Nothing: it is read-only."""

    def look_up(self, latest: np.ndarray, most: int) -> Match:
        """The likeliest continuation after the longest match; it ends where a document does.

        Args:
            latest: [num] int32, tokens of a text, at least its last MAX_MATCH if it has as many; ids
                that are not of the vocabulary match nothing.
            most: tokens to return, at most.

        Raises:
            OSError: its files were cut.
        """
        self._sizes.check()
        latest = np.ascontiguousarray(latest, dtype=np.int32)  # of another kind, it would compile again
        tokens = np.empty(most, dtype=np.int32)
        shares = np.empty(most, dtype=np.float64)
        length, num_found = _look_up(
            self._tokens, self._suffix_array, self.header.separator, latest, tokens, shares
        )
        return Match(length, tokens[:num_found].tolist(), shares[:num_found].tolist())


@njit
def _order(tokens, place, pattern):  # type: ignore[no-untyped-def]
    """-1, 0 or 1: how the text up to `place`, read backwards, compares with the pattern."""
    if place >= len(tokens):  # of a damaged file
        return 1
    for step in range(len(pattern)):
        if step > place:
            return -1
        token = np.int64(tokens[place - step])
        if token != pattern[step]:
            return -1 if token < pattern[step] else 1
    return 0


@njit
def _num_alike(tokens, place, pattern):  # type: ignore[no-untyped-def]
    """With how many tokens of the pattern the text up to `place`, read backwards, begins."""
    length = 0
    if place < len(tokens):
        while length < min(len(pattern), place + 1) and tokens[place - length] == pattern[length]:
            length += 1
    return length


@njit
def _find(tokens, suffix_array, pattern, least, low, high):  # type: ignore[no-untyped-def]
    """The first index from `low` on whose place has an `_order` of `least` or more, else `high`."""
    while low < high:
        middle = (low + high) // 2
        if _order(tokens, np.int64(suffix_array[middle]), pattern) < least:
            low = middle + 1
        else:
            high = middle
    return low


@njit
def _range(tokens, suffix_array, pattern, inside):  # type: ignore[no-untyped-def]
    """Begin and end of the indexes whose places match the pattern, as does the one at `inside`.

    In steps that double, from there: most matches stand in few places, whose order is at hand.
    """
    num_places = len(suffix_array)
    step, begin = 1, inside
    while begin >= step and _order(tokens, np.int64(suffix_array[begin - step]), pattern) == 0:
        begin -= step
        step *= 2
    begin = _find(tokens, suffix_array, pattern, 0, max(0, begin - step), begin)
    step, last = 1, inside
    while last + step < num_places and _order(tokens, np.int64(suffix_array[last + step]), pattern) == 0:
        last += step
        step *= 2
    return begin, _find(tokens, suffix_array, pattern, 1, last + 1, min(num_places, last + step))


@njit
def _look_up(tokens, suffix_array, separator, latest, found, shares):  # type: ignore[no-untyped-def]
    """See `Datastore.look_up`; fills `found` and `shares`, returns how long match and continuation are."""
    pattern = np.empty(min(MAX_MATCH, len(latest)), dtype=np.int64)  # the last token first
    length = 0
    while length < len(pattern) and 0 <= latest[len(latest) - 1 - length] < separator:
        pattern[length] = latest[len(latest) - 1 - length]
        length += 1
    pattern = pattern[:length]
    # The longest matches stand beside where the pattern itself would.
    here = _find(tokens, suffix_array, pattern, 0, 0, len(suffix_array))
    inside, length = 0, 0
    for index in range(max(0, here - 1), min(len(suffix_array), here + 1)):
        num_alike = _num_alike(tokens, np.int64(suffix_array[index]), pattern)
        if num_alike > length:
            inside, length = index, num_alike
    if length < MIN_MATCH:
        return 0, 0

    begin, end = _range(tokens, suffix_array, pattern[:length], inside)
    num_places = min(end - begin, MAX_SAMPLES)
    places = np.empty(num_places, dtype=np.int64)
    for index in range(num_places):
        places[index] = suffix_array[begin + (end - begin) * index // num_places]
    choices = np.empty(num_places, dtype=np.int64)
    counts = np.empty(num_places, dtype=np.int64)
    tables = np.empty(table_size(num_places), dtype=np.int32)
    for step in range(len(found)):
        num_choices, best = 0, 0
        table = tables[: table_size(num_places)]
        table[:] = -1
        for index in range(num_places):
            place = places[index] + 1 + step
            token = np.int64(tokens[place]) if place < len(tokens) else separator
            if token != separator:
                num_choices = tally(table, choices, counts, num_choices, token)
        if num_choices == 0:
            return length, step
        for choice in range(num_choices):
            # Of equals the lowest id: most vocabularies begin with what is frequent.
            more = counts[choice] - counts[best]
            if more > 0 or (more == 0 and choices[choice] < choices[best]):
                best = choice
        token = choices[best]
        found[step] = token
        shares[step] = counts[best] / num_places  # documents that end here did not go on with it
        kept = 0
        for index in range(num_places):
            place = places[index] + 1 + step
            if place < len(tokens) and tokens[place] == token:
                places[kept] = places[index]
                kept += 1
        num_places = kept
    return length, len(found)
