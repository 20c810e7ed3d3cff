# SPDX-License-Identifier: Apache-2.0
"""Lookups in a datastore of documents.

As in SSSD (arXiv 2411.05894), a suffix array finds the longest match, and counts of the next tokens give
the likeliest continuation. The array orders positions by the text *before* them (see `datastore_files.py`),
so one binary search suffices for any match length. The files are mapped into memory.
"""

from pathlib import Path

import numpy as np
from numba import njit
from typing_extensions import override

from vllm_magicdec.lookup import datastore_files
from vllm_magicdec.lookup.context_index import MAX_MATCH, Match, Source, table_size, tally
from vllm_magicdec.lookup.datastore_files import Header, OpenSizes, Vocabulary

MIN_MATCH = 2  # tokens; a single one is too unreliable in other texts
# Evenly spread positions of the longest match that are used. Each may wait for memory twice, and twice as
# many found no more right tokens.
MAX_SAMPLES = 32


class Datastore(Source):
    """Documents for lookups, read-only; any number of threads and processes may share one."""

    def __init__(
        self, header: Header, tokens: np.ndarray, suffix_array: np.ndarray, sizes: OpenSizes
    ) -> None:
        self._sizes = sizes
        self.header = header
        self._tokens = tokens
        self._suffix_array = suffix_array

    @classmethod
    def open(cls, path: Path, vocab_size: int, vocabulary: Vocabulary | None = None) -> "Datastore":
        """Open a datastore that `magicdec index` wrote, and compile the search (some seconds).

        Args and exceptions are those of `datastore_files.check`.
        """
        datastore_files.check(path, vocab_size, vocabulary)
        header, tokens, suffix_array = datastore_files.read(path)
        opened = cls(header, tokens, suffix_array, datastore_files.OpenSizes(path))
        opened.look_up(np.zeros(MIN_MATCH, dtype=np.int32), 1)
        return opened

    @override
    def add(self, tokens: np.ndarray) -> None:
        pass  # read-only

    @override
    def look_up(self, latest: np.ndarray, max_tokens: int) -> Match:
        """See `Source`; continuations end with their document, and ids beyond the vocabulary do not match.

        Raises:
            OSError: its files were cut.
        """
        self._sizes.check()
        latest = np.ascontiguousarray(latest, dtype=np.int32)  # other layouts would be compiled anew
        tokens = np.empty(max_tokens, dtype=np.int32)
        shares = np.empty(max_tokens, dtype=np.float64)
        length, num_found = _look_up(
            self._tokens, self._suffix_array, self.header.separator, latest, tokens, shares
        )
        return Match(length, tokens[:num_found].tolist(), shares[:num_found].tolist())


@njit
def _compare(tokens, position, pattern):  # type: ignore[no-untyped-def]
    """Compare the text up to `position`, read backwards, with the pattern; return -1, 0 or 1."""
    if position >= len(tokens):  # in a damaged file
        return 1
    for step in range(len(pattern)):
        if step > position:
            return -1
        token = np.int64(tokens[position - step])
        if token != pattern[step]:
            return -1 if token < pattern[step] else 1
    return 0


@njit
def _match_length(tokens, position, pattern):  # type: ignore[no-untyped-def]
    """Return how many tokens of the pattern match the text up to `position`, read backwards."""
    length = 0
    if position < len(tokens):
        while length < min(len(pattern), position + 1) and tokens[position - length] == pattern[length]:
            length += 1
    return length


@njit
def _find(tokens, suffix_array, pattern, least, low, high):  # type: ignore[no-untyped-def]
    """Return the first index in [low, high) whose `_compare` is at least `least`, else `high`."""
    while low < high:
        middle = (low + high) // 2
        if _compare(tokens, np.int64(suffix_array[middle]), pattern) < least:
            low = middle + 1
        else:
            high = middle
    return low


@njit
def _range(tokens, suffix_array, pattern, inside):  # type: ignore[no-untyped-def]
    """Return begin and end of the indices that match the pattern, of which `inside` is one.

    The steps double from there, because most matches have few positions.
    """
    size = len(suffix_array)
    step, begin = 1, inside
    while begin >= step and _compare(tokens, np.int64(suffix_array[begin - step]), pattern) == 0:
        begin -= step
        step *= 2
    begin = _find(tokens, suffix_array, pattern, 0, max(0, begin - step), begin)
    step, last = 1, inside
    while last + step < size and _compare(tokens, np.int64(suffix_array[last + step]), pattern) == 0:
        last += step
        step *= 2
    return begin, _find(tokens, suffix_array, pattern, 1, last + 1, min(size, last + step))


@njit
def _look_up(tokens, suffix_array, separator, latest, found, shares):  # type: ignore[no-untyped-def]
    """Fill `found` and `shares` with the continuation; return the lengths of match and continuation."""
    pattern = np.empty(min(MAX_MATCH, len(latest)), dtype=np.int64)  # the last token first
    length = 0
    while length < len(pattern) and 0 <= latest[len(latest) - 1 - length] < separator:
        pattern[length] = latest[len(latest) - 1 - length]
        length += 1
    pattern = pattern[:length]
    # The longest matches are adjacent to the pattern's own position in the order.
    here = _find(tokens, suffix_array, pattern, 0, 0, len(suffix_array))
    inside, length = 0, 0
    for index in range(max(0, here - 1), min(len(suffix_array), here + 1)):
        matched = _match_length(tokens, np.int64(suffix_array[index]), pattern)
        if matched > length:
            inside, length = index, matched
    if length < MIN_MATCH:
        return 0, 0

    begin, end = _range(tokens, suffix_array, pattern[:length], inside)
    num_samples = min(end - begin, MAX_SAMPLES)
    samples = np.empty(num_samples, dtype=np.int64)
    for index in range(num_samples):
        samples[index] = suffix_array[begin + (end - begin) * index // num_samples]
    choices = np.empty(num_samples, dtype=np.int64)
    counts = np.empty(num_samples, dtype=np.int64)
    tables = np.empty(table_size(num_samples), dtype=np.int32)
    for step in range(len(found)):
        num_choices, best = 0, 0
        table = tables[: table_size(num_samples)]
        table[:] = -1
        for index in range(num_samples):
            position = samples[index] + 1 + step
            token = np.int64(tokens[position]) if position < len(tokens) else separator
            if token != separator:
                num_choices = tally(table, choices, counts, num_choices, token)
        if num_choices == 0:
            return length, step
        for choice in range(num_choices):
            # At a tie the lowest id: most vocabularies begin with frequent tokens.
            more = counts[choice] - counts[best]
            if more > 0 or (more == 0 and choices[choice] < choices[best]):
                best = choice
        token = choices[best]
        found[step] = token
        shares[step] = counts[best] / num_samples  # documents that end here did not continue with it
        kept = 0
        for index in range(num_samples):
            position = samples[index] + 1 + step
            if position < len(tokens) and tokens[position] == token:
                samples[kept] = samples[index]
                kept += 1
        num_samples = kept
    return length, len(found)
