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
from vllm_magicdec.lookup.context_index import MAX_MATCH, Match, Source, continue_all
from vllm_magicdec.lookup.datastore_files import Vocabulary

MIN_MATCH = 2  # tokens; a single one is too unreliable in other texts
# Evenly spread positions of the longest match that are used. Each may wait for memory twice, and twice as
# many found no more right tokens.
MAX_SAMPLES = 32


class Datastore(Source):
    """Documents for lookups, read-only; any number of threads and processes may share one.

    Args and exceptions are those of `datastore_files.read`. Compiling the search takes some seconds.
    """

    def __init__(self, path: Path, vocab_size: int, vocabulary: Vocabulary | None = None) -> None:
        self.header, self._tokens, self._suffix_array = datastore_files.read(path, vocab_size, vocabulary)
        self._sizes = datastore_files.OpenSizes(path)
        self.look_up(np.zeros(MIN_MATCH, dtype=np.int32), 1)

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
        sample = np.int64(suffix_array[begin + (end - begin) * index // num_samples])
        samples[index] = min(sample, len(tokens) - 1)  # in a damaged file it may be beyond
    # At a tie the lowest id wins, because most vocabularies begin with frequent tokens.
    given = np.full(1, separator, dtype=np.int64)
    return length, continue_all(tokens, given, samples, separator, True, found, shares)
