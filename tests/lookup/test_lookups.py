# SPDX-License-Identifier: Apache-2.0
"""Continuations of several requests and their probabilities."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_magicdec.lookup import served as served_answers
from vllm_magicdec.lookup.context_index import Match
from vllm_magicdec.lookup.continuation import MIN_ACCEPTANCE
from vllm_magicdec.lookup.history import History
from vllm_magicdec.lookup.lookups import Lookups
from vllm_magicdec.lookup.served import ServedAnswers


def history(tokens: list[int], num_latest: int = 1) -> History:
    recorded = len(tokens) - num_latest
    return History(np.array(tokens[:recorded], dtype=np.int32), tokens[recorded:])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.data())
def test_results_do_not_depend_on_how_tokens_arrived(tokens, data):
    """The host records verified tokens late, and a request may miss some batches."""
    lookups = Lookups(4, 1000, 16)
    end = 0
    while end < len(tokens):
        end = data.draw(st.integers(end + 1, len(tokens)))
        num_latest = data.draw(st.integers(0, end))
        lookups.follow(["a", "b"], [history(tokens[:end], num_latest), history([1, 2, 1, 2])])
        once = Lookups(4, 1000, 16)
        once.follow(["a"], [history(tokens[:end])])
        assert lookups.look_up("a", [], 4, 0.0).tokens == once.look_up("a", [], 4, 0.0).tokens
    assert lookups.look_up("b", [], 2).tokens[:1] == [1]


def test_at_most_max_num_reqs_contexts_are_kept():
    lookups = Lookups(3, 1000, 16)
    for number in range(20):
        req_ids = [str(number), str(number + 1)]
        lookups.follow(req_ids, [history([1, 2, 1, 2])] * 2)
        assert set(req_ids) <= set(lookups._indexes) and len(lookups._indexes) <= 3


def test_a_continuation_ends_where_it_is_unlikely():
    lookups = Lookups(1, 1000, 16)
    # After 1, 2 come twenty different tokens.
    lookups.follow(["a"], [history([token for n in range(20) for token in (1, 2, 10 + n)] + [1, 2])])
    assert lookups.look_up("a", [], 5).tokens == []

    known = [token for _ in range(21) for token in (1, 2, 10)] + [1, 2]
    lookups.follow(["a"], [history(known)])
    whole = lookups.look_up("a", [], 8)
    assert len(whole.tokens) == 8 and np.prod(whole.chances) >= MIN_ACCEPTANCE
    assert len(lookups.look_up("a", [], 8, 0.95).tokens) < 8
    for _ in range(200):  # they are always wrong
        lookups.follow(["a"], [history([*known, 7])])
        lookups.follow(["a"], [history(known)])
    assert len(lookups.look_up("a", [], 8).tokens) < 8


def test_calibration_learns_from_all_verified_tokens():
    lookups, learned = Lookups(1, 1000, 16), []
    lookups._calibrations[0].observe = lambda *seen: learned.append(seen)
    known = [1, 2, 3, 4, 5, 1, 2]
    for verified, seen in [
        ([3], [(2, 1.0, True)]),
        ([7], [(2, 1.0, False)]),
        ([3, 4, 9], [(2, 1.0, True), (3, 1.0, True), (4, 1.0, False)]),
        ([3, 9, 5], [(2, 1.0, True), (3, 1.0, False)]),
        ([6] * 33, []),  # longer than any round
    ]:
        lookups.follow(["a"], [history(known)])
        learned.clear()
        lookups.follow(["a"], [history(known + verified)])
        assert learned == seen


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def test_answers_of_finished_requests_are_a_source_and_prompts_are_not():
    lookups = Lookups(4, 1000, 16, {"served": ServedAnswers()}, in_context=False)
    prompt, answer = [50, 51, 52, 53], [1, 2, 3, 4, 5, 6]
    lookups.follow(["a"], [history([*prompt, answer[0]])])
    lookups.follow(["a", "b"], [history([*prompt, *answer]), history([9, 1, 2, 3])])
    assert lookups.look_up("b", [], 5).tokens == [], "the request still runs"
    lookups.follow(["b"], [history([9, 1, 2, 3])])
    assert lookups.look_up("b", [], 5).tokens == [], "a preempted request has not finished"
    lookups.finish("a", tokens(*answer, 7))
    for _ in range(2):
        lookups.follow(["b"], [history([9, 1, 2, 3])])
        found = lookups.look_up("b", [], 5)
        assert found.tokens == [4, 5, 6, 7], "with the last round, and not beyond the answer's end"
        assert lookups.look_up("b", [4], 5).tokens == [5, 6, 7]
    lookups.follow(["c"], [history([9, 50, 51])])
    assert lookups.look_up("c", [], 5).tokens == []


def test_contexts_are_kept_until_their_requests_finish():
    lookups, learned = Lookups(3, 1000, 16, {"served": ServedAnswers()}), []
    lookups._calibrations[0].observe = lambda *seen: learned.append(seen)
    for known in ([1, 2, 3, 1, 2], [1, 2, 3, 1, 2, 3]):
        lookups.follow(["a"], [history(known)])
        lookups.follow(["b"], [history([5, 6])])
    assert len(learned) == 1, "a new context would learn nothing"
    assert set(lookups._indexes) == {"a", "b"}
    lookups.finish("a", tokens(3))
    lookups.finish("never in a batch", tokens())
    assert set(lookups._indexes) == {"b"}


@pytest.mark.parametrize("length", [5, 31])
def test_the_oldest_answers_are_dropped(monkeypatch, length):
    monkeypatch.setattr(served_answers, "MAX_TOKENS", 64)
    served, rest = ServedAnswers(), range(1000, 1000 + length - 2)

    def known(number: int) -> bool:
        return served.look_up(tokens(2 * number, 2 * number + 1), 1).tokens == [1000]

    for number in range(100):
        served.add(tokens(2 * number, 2 * number + 1, *rest))
        assert known(number) and len(served._older) + len(served._newer) <= 64
        # Half of the tokens and more.
        assert all(known(latest) for latest in range(max(0, number - 32 // (length + 1) + 1), number))
    assert served.look_up(tokens(0, 1), 2).length == 0
    served.add(np.arange(1000, dtype=np.int32))
    assert served.look_up(tokens(997, 998), 2).tokens == [999]


def test_at_a_tie_the_newer_half_wins(monkeypatch):
    monkeypatch.setattr(served_answers, "MAX_TOKENS", 32)
    served = ServedAnswers()
    served.add(tokens(5, 1, 2, 3, 40))
    served.add(tokens(60, 61, 62, 63, 64, 65, 66))
    served.add(tokens(2, 3, 41, 7, 8))  # begins a new half
    assert served.look_up(tokens(2, 3), 1).tokens == [41]
    assert served.look_up(tokens(1, 2, 3), 1).tokens == [40], "a longer match"
    assert served.look_up(tokens(9, 3), 1).tokens == [41] and served.look_up(tokens(9, 1), 1).tokens == [2]
    assert served.look_up(tokens(5, 1), 1).tokens == [2], "of the older half"


class Fixed:
    def __init__(self, length: int, tokens: list[int]) -> None:
        self._match = Match(length, tokens, [1.0] * len(tokens))

    def look_up(self, latest, most):
        return self._match

    def add(self, tokens): ...


def test_sources_are_asked_once_per_round_after_the_verified_tokens():
    """The result also serves the next round, which learns from it."""
    source = Broken(8, list(range(40)))
    lookups, known = Lookups(2, 1000, 16, {"it": source}), [1, 2, 3, 4, 1, 2]
    text = [*known, *range(17), *range(50, 60)]
    for end in (6, 7, 9, 23):  # the context grows by up to 17 tokens per round
        before = source.num_asked
        lookups.follow(["a"], [history(text[:end])])
        assert source.num_asked == before
        for most in (16, 3):
            assert lookups.look_up("a", [], most).tokens == list(range(most))
        lookups.look_up("a", [5], 3)
        assert source.num_asked == before + 2
    lookups.follow(["a"], [history(text)])
    assert lookups.look_up("a", [], 20).tokens == list(range(20))
    assert source.num_asked == before + 3, "more tokens than before"


def test_the_source_with_more_expected_tokens_wins_and_all_learn():
    lookups = Lookups(2, 1000, 16, {"fixed": Fixed(8, [7, 7, 7, 7])})
    known = [1, 2, 3, 4, 5, 1, 2]
    lookups.follow(["a"], [history(known)])
    assert lookups.look_up("a", [], 4).tokens == [7, 7, 7, 7]
    for _ in range(100):
        lookups.follow(["a"], [history([*known, 3, 4])])
        lookups.follow(["a"], [history(known)])
    assert lookups.look_up("a", [], 4).tokens == [3, 4, 5, 1]


class Broken(Fixed):
    is_broken = False
    num_asked = 0

    def look_up(self, latest, most):
        self.num_asked += 1
        if self.is_broken:
            raise OSError("broken on purpose")
        return super().look_up(latest, most)


def test_a_failed_source_is_not_asked_again_and_the_others_are_used():
    broken, failed = Broken(8, [7, 7]), []
    lookups = Lookups(2, 1000, 16, {"broken": broken, "fixed": Fixed(2, [8, 8])})
    lookups.on_failure = failed.append
    broken.is_broken, broken.num_asked = True, 0
    lookups.follow(["a"], [history([1, 2, 3, 4, 5, 6, 1, 2, 3, 4])])
    for _ in range(2):
        assert lookups.look_up("a", [], 2).tokens == [5, 6], "the context is still searched"
        assert lookups.look_up("a", [50], 2).tokens == [8, 8]
    assert failed == ["broken"] and broken.num_asked == 1


def test_a_failure_that_nobody_handles_is_raised():
    broken = Broken(8, [7, 7])
    broken.is_broken = True
    with pytest.raises(OSError, match="on purpose"):
        Lookups(2, 1000, 16, {"broken": broken})


def test_a_continuation_ends_before_an_id_outside_of_the_vocabulary():
    """The target cannot verify an image's placeholder."""
    lookups = Lookups(1, 100, 16)
    for strange in (100, 151_000, -1):
        lookups.follow(["a"], [history([1, 2, 3, strange, 5, 1, 2])])
        assert lookups.look_up("a", [], 4, 0.0).tokens == [3]


def test_a_reused_name_begins_anew_even_if_its_text_is_longer():
    lookups = Lookups(1, 100, 16)
    lookups.follow(["a"], [history([1, 2, 3, 1, 2])])
    lookups.follow(["a"], [history([7, 8, 9, 7, 8, 4, 7, 8])])
    assert lookups.look_up("a", [], 1).tokens == [4]
    assert len(lookups._indexes["a"]) == 8
