# SPDX-License-Identifier: Apache-2.0
"""Passes with looked-up tokens draft what one pass per token does, and write nowhere else."""

import itertools
import random
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hashing_target import Round, Target, assert_only_lookahead_was_written, rounds, steps_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch

from vllm_magicdec import envs
from vllm_magicdec.adaptive.draft_plan import NUM_BUCKETS, DraftLists, DraftPlan, bucket_of
from vllm_magicdec.adaptive.metrics import Counts, LookupCounters
from vllm_magicdec.drafting.confidence import Confidence, Evidence, Predicted
from vllm_magicdec.drafting.pauses import FAILURES_BEFORE_A_PAUSE
from vllm_magicdec.drafting.staged import StagedDrafts
from vllm_magicdec.lookup.continuation import MIN_ACCEPTANCE, Continuation
from vllm_magicdec.lookup.history import History


class RandomLookups:
    """Any number of any tokens; the last answer for every position is remembered."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._said: dict[tuple[str, int], int] = {}
        self.num_tokens = 0

    def follow(self, req_ids, histories) -> None:
        pass

    def forget(self) -> None: ...

    def look_up(self, req_id, drafted, most, *min_acceptance) -> Continuation:
        tokens = [self._rng.randrange(5) for _ in range(self._rng.randint(0, max(0, most)))]
        self.num_tokens += len(tokens)
        before = len(drafted)
        self._said = {key: told for key, told in self._said.items() if key[0] != req_id or key[1] < before}
        self._said |= {(req_id, before + place): token for place, token in enumerate(tokens)}
        return Continuation(tokens, [0.5] * len(tokens))

    def predicted(self, req_id: str, place: int, token: int) -> Predicted:
        said = self._said.get((req_id, place))
        if said is None:
            return Predicted.NOTHING
        return Predicted.THE_SAME if said == token else Predicted.ANOTHER


def cut(found: Continuation, min_acceptance: float) -> Continuation:
    """What is likely enough to be right until there."""
    number = sum(reached >= min_acceptance for reached in found.reached)
    return Continuation(found.tokens[:number], found.chances[:number])


class CutLookups(RandomLookups):
    """Lookups that are cut like those of `Lookups`."""

    def look_up(self, req_id, drafted, most, min_acceptance=MIN_ACCEPTANCE) -> Continuation:
        return cut(super().look_up(req_id, drafted, most), min_acceptance)


class KnownDrafts(RandomLookups):
    """What will be drafted, by request; or nothing."""

    def __init__(self, drafts: list[list[int]]) -> None:
        super().__init__(0)
        self._drafts = drafts

    def look_up(self, req_id, drafted, most, *min_acceptance) -> Continuation:
        own = self._drafts[int(req_id)] if self._drafts else []
        tokens = own[len(drafted) : len(drafted) + most]
        return Continuation(tokens, [1.0] * len(tokens))


def make_staged(
    drawn: Round, lookups, reads_ahead=True, max_num_tokens=10**6, **others
) -> tuple[StagedDrafts, Target]:
    target = Target([dict(cache) for cache in drawn.cache], max_num_tokens, reads_ahead)
    sizes = {"max_num_reqs": len(drawn.tables), "max_drafts": drawn.num_steps}
    sizes["max_model_len"] = drawn.model_len
    return StagedDrafts(target, lookups, LookupCounters(Counts()), **sizes, **others), target


def draft(staged: StagedDrafts, drawn: Round, plan: int | None = None) -> DraftLists:
    plan = drawn.num_steps if plan is None else plan
    return staged.draft(drawn.batch, plan, lambda: steps_of(drawn)).tokens


def all_drafts(drawn: Round, lookups, *options) -> tuple[DraftLists, Target, dict[str, int]]:
    """Draft what each request has room for; return also the target with its writes, and the counters."""
    staged, target = make_staged(drawn, lookups, *options)
    drafts = draft(staged, drawn)
    counted = {name.removeprefix("lookup_"): n for name, n in staged._counters.totals.items()}
    assert counted["passes"] == len(target.pass_lens) and not counted["cut_tokens"]
    assert [len(own) for own in drafts] == [max(0, n) for n in drawn.wanted]
    return drafts, target, counted


@settings(max_examples=200, deadline=None)
@given(rounds(), st.integers(0, 100), st.sampled_from([4, 6, 10**6]), st.booleans())
def test_the_drafts_are_those_of_one_pass_per_token_whatever_was_looked_up(
    drawn, seed, max_num_tokens, reads_ahead
):
    expected = drawn.one_by_one()
    lookups = RandomLookups(seed)
    drafts, target, counted = all_drafts(drawn, lookups, reads_ahead, max_num_tokens)
    assert drafts == expected
    assert counted["tokens"] == (lookups.num_tokens if reads_ahead else 0)
    assert reads_ahead or {number for lens in target.pass_lens for number in lens} <= {1}
    assert max(map(sum, target.pass_lens), default=0) <= max_num_tokens
    # A token that was looked up and stood spares a pass of its request.
    assert sum(map(len, target.pass_lens)) == sum(drawn.wanted) - counted["accepted_tokens"]
    assert_only_lookahead_was_written(drawn, target)


@settings(max_examples=100, deadline=None)
@given(rounds())
def test_a_lookup_that_is_always_right_takes_one_pass_and_none_takes_one_per_draft(drawn):
    expected = drawn.one_by_one()
    drafts, _, counted = all_drafts(drawn, KnownDrafts(expected))
    assert drafts == expected and counted["passes"] == (1 if any(expected) else 0)
    assert counted["accepted_tokens"] == counted["tokens"] == sum(max(0, len(own) - 1) for own in expected)
    drafts, _, counted = all_drafts(drawn, KnownDrafts([]))
    assert drafts == expected and counted["passes"] == max(drawn.wanted)
    assert counted["tokens"] == 0


@settings(max_examples=100, deadline=None)
@given(rounds(), st.integers(0, 2**4 - 1))
def test_a_pass_for_less_than_half_of_the_batch_is_left_out(drawn, known_to):
    """Where some requests' drafts are known, the others are gone on with if they are half of all."""
    expected = drawn.one_by_one()
    known = [own if known_to >> i & 1 else [] for i, own in enumerate(expected)]
    staged, target = make_staged(drawn, KnownDrafts(known), min_gain=0.5)
    drafts = draft(staged, drawn)
    drafting = [i for i, wanted in enumerate(drawn.wanted) if wanted > 0]
    numbers = [len(known[i]) or min(1, len(expected[i])) for i in range(len(expected))]  # after a pass
    while running := [i for i in drafting if numbers[i] < drawn.wanted[i]]:
        if len(running) < 0.5 * len(drafting):
            break
        for i in running:
            numbers[i] += 1
    assert drafts == [own[:n] for own, n in zip(expected, numbers, strict=True)]
    assert drafts.num_passes == len(target.pass_lens)
    left_out = sum(len(own) - n for own, n in zip(expected, numbers, strict=True))
    assert staged._counters.totals["left_out_tokens"] == left_out


def read_of(drafts: list[list[int]], target: Target) -> list[list[int]]:
    """The drafts that passes drew; the rest are those that the runner was told of."""
    firsts = {request: first for request, (first, _) in target.unchecked.items()}
    for request, (first, tokens) in target.unchecked.items():
        assert drafts[request][first:] == [*tokens]
    read = [own[: firsts.get(request, len(own))] for request, own in enumerate(drafts)]
    assert drafts.num_checked == [len(own) for own in read]
    return read


class OneThenAll(RandomLookups):
    """Nothing before the first draft; then whatever is asked for, with these chances."""

    def __init__(self, chance: float) -> None:
        super().__init__(0)
        self.chance = chance

    def look_up(self, req_id, drafted, most, min_acceptance) -> Continuation:
        if len(drafted) != 1:
            return Continuation()
        return cut(Continuation([7] * most, [self.chance] * most), min_acceptance)


@settings(max_examples=100, deadline=None)
@given(rounds(), st.sampled_from([0.6, 0.8, 0.95]), st.sampled_from([0.0, 0.3, 0.7]), st.booleans())
def test_worthwhile_lookups_follow_the_drafts_unchecked(drawn, chance, min_acceptance, is_probabilistic):
    expected = drawn.one_by_one()
    staged, target = make_staged(drawn, OneThenAll(chance), is_probabilistic=is_probabilistic)
    drafts = draft(staged, drawn, DraftPlan(drawn.num_steps, min_acceptance, 99.0))
    assert len(target.pass_lens) == drafts.num_passes == (max(drawn.wanted) > 0)
    assert read_of(drafts, target) == [own[:1] for own in expected]
    reached = Confidence().chance(Evidence(0.7, Predicted.NOTHING))
    least = max(min_acceptance / reached, MIN_ACCEPTANCE)
    num_likely = next(n for n in itertools.count() if chance ** (n + 1) < least)
    assert [len(own) for own in drafts] == [min(n, 1 + num_likely) if n > 0 else 0 for n in drawn.wanted]

    # What became of them is told apart: here all stood.
    histories = [
        History(np.concatenate([history.after(0), np.array(own, dtype=np.int32)]), [99])
        for history, own in zip(drawn.batch.histories, drafts, strict=True)
    ]
    drafted = [i for i, own in enumerate(drafts) if own]
    staged._follow(replace(drawn.batch, histories=histories), drafted)
    counted = staged._counters.totals
    num_unchecked = sum(len(tokens) for _, tokens in target.unchecked.values())
    assert (
        counted["lookup_unchecked_tokens"] == counted["lookup_unchecked_accepted_tokens"] == num_unchecked
    )
    assert counted["pass_accepted_tokens"] == sum(map(len, drafts)) - num_unchecked


def test_a_source_that_fails_pauses_no_lookups(monkeypatch):
    monkeypatch.setattr(envs, "strict", lambda: False)
    sizes = {"max_num_reqs": 2, "max_drafts": 4, "max_model_len": 60}
    lookups = RandomLookups(0)
    staged = StagedDrafts(Target([]), lookups, LookupCounters(Counts()), **sizes)
    for _ in range(FAILURES_BEFORE_A_PAUSE + 1):
        try:
            raise OSError("broken on purpose")
        except OSError:
            lookups.on_failure("a source")
    counted = staged._counters.totals
    assert counted["lookup_failures"] == FAILURES_BEFORE_A_PAUSE + 1 and counted["lookup_pauses"] == 0
    assert staged._looks_up and staged._lookup_pauses.is_over()


@settings(max_examples=100, deadline=None)
@given(rounds(), st.floats(0.05, 0.9), st.floats(0.0, 3.0), st.integers(0, 9))
def test_drafts_below_their_cost_are_neither_sampled_nor_verified(drawn, min_acceptance, min_gain, seed):
    expected = drawn.one_by_one()
    staged, target = make_staged(drawn, CutLookups(seed))
    chance = 0.93
    staged._confidence.chance = lambda _: chance  # of every draft, whatever was looked up
    drafts = draft(staged, drawn, DraftPlan(drawn.num_steps, min_acceptance, min_gain))
    assert drafts.num_passes == len(target.pass_lens)
    worth = next(n for n in itertools.count() if chance ** (n + 1) < min_acceptance)
    read = read_of(drafts, target)
    assert all(own == known[: len(own)] for own, known in zip(read, expected, strict=True))
    assert all(len(own) <= worth for own in read)
    # Of what follows unchecked, each token is right in half of the cases.
    assert all(
        chance ** len(own) * 0.5 ** (len(all_) - len(own)) >= min_acceptance
        for own, all_ in zip(read, drafts, strict=True)
        if len(all_) > len(own)
    )
    if min_gain == 0.0:
        assert [len(own) for own in drafts] == [min(worth, max(0, n)) for n in drawn.wanted]
    # A pass more than those that could gain enough is not made: at chances of 1/2, no two drafts a request.
    running = sum(n > 0 for n in drawn.wanted)
    assert len(target.pass_lens) <= 1 or 2 * running * (1 - min_acceptance) >= min_gain


@settings(max_examples=150, deadline=None)
@given(
    rounds(),
    st.floats(0.05, 0.9),
    st.integers(0, 9),
    st.sampled_from(["greedy", "sampled", "sampled by a plan"]),
    st.booleans(),
)
def test_unlikely_drafts_are_dropped_with_those_after_them(drawn, min_acceptance, seed, how, reads_ahead):
    """Sampled ones for those before them alone: else they would not follow the draft's distribution."""
    lookups, by_plan = RandomLookups(seed), how == "sampled by a plan"
    options = {"reads_ahead": reads_ahead, "is_probabilistic": how != "greedy"}
    if not by_plan:
        options["min_acceptance"] = min_acceptance
    staged, target = make_staged(drawn, lookups, **options)
    chances = {Predicted.NOTHING: 0.9, Predicted.ANOTHER: 0.5, Predicted.THE_SAME: 0.97}
    staged._confidence.chance = lambda evidence: chances[evidence.predicted]
    drafts = draft(staged, drawn, DraftPlan(drawn.num_steps, min_acceptance) if by_plan else None)
    for req_id, own, all_, wanted in zip(
        drawn.batch.req_ids, drafts, drawn.one_by_one(), drawn.wanted, strict=True
    ):
        number, reached = 0, 1.0
        while number < wanted:
            before, reached = reached, reached * chances[lookups.predicted(req_id, number, all_[number])]
            if (reached if how == "greedy" else before) < min_acceptance:
                break
            number += 1
        assert own == all_[:number]
    if by_plan:
        return
    assert not target.unchecked and drafts.num_checked == [len(own) for own in drafts]
    left_out = sum(staged._counters.totals[name] for name in ("left_out_tokens", "cut_tokens"))
    assert left_out == sum(max(0, n) for n in drawn.wanted) - sum(map(len, drafts))


@settings(max_examples=50, deadline=None)
@given(rounds())
def test_rounds_of_lookups_alone_take_no_pass(drawn):
    expected = drawn.one_by_one()
    staged, target = make_staged(drawn, KnownDrafts(expected))
    for plan in (DraftPlan(drawn.num_steps, lookups_alone=True), DraftPlan(1, 0.1, 0.1, -100.0)):
        drafts = draft(staged, drawn, plan)
        assert drafts == expected and not drafts.num_passes and not target.pass_lens
    num_tokens = sum(map(len, expected))
    for min_expected_accepted, is_read in [(0.9 * num_tokens + 0.1, True), (0.9 * num_tokens - 0.1, False)]:
        drafts = draft(staged, drawn, DraftPlan(drawn.num_steps, 0.1, 0.0, min_expected_accepted))
        assert bool(drafts.num_passes) == (is_read and num_tokens > 0)


@settings(max_examples=50, deadline=None)
@given(rounds(), st.booleans())
def test_a_round_has_the_thresholds_of_its_bucket(drawn, is_known):
    """Lookups find every draft or none; the plan has passes in one bucket of rounds and none in others."""
    expected = drawn.one_by_one() if is_known else [[] for _ in drawn.wanted]
    staged, _ = make_staged(drawn, KnownDrafts(expected))
    drafting = [n for n in drawn.wanted if n > 0]
    bucket = bucket_of(sum(map(len, expected)) / max(1, len(drafting)))
    for read in range(NUM_BUCKETS):
        promises = [inf if index == read else -inf for index in range(NUM_BUCKETS)]
        by_bucket = [DraftPlan(drawn.num_steps, min_expected_accepted=promise) for promise in promises]
        drafts = draft(staged, drawn, DraftPlan(drawn.num_steps, by_bucket=by_bucket))
        assert drafts.bucket == bucket
        assert bool(drafts.num_passes) == (bucket == read and bool(drafting))


class BrokenLookups(RandomLookups):
    def __init__(self, num_good: int) -> None:
        super().__init__(0)
        self._left = num_good

    def look_up(self, req_id, drafted, most, *min_acceptance) -> Continuation:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("broken on purpose")
        return super().look_up(req_id, drafted, most, *min_acceptance)


@settings(max_examples=50, deadline=None)
@given(rounds(), st.integers(0, 5))
def test_lookups_that_fail_leave_the_drafts_as_they_are(drawn, num_good):
    expected = drawn.one_by_one()
    with MonkeyPatch.context() as patched:
        patched.setattr(envs, "strict", lambda: False)
        staged, _ = make_staged(drawn, BrokenLookups(num_good))
        for _ in range(2):
            assert draft(staged, drawn) == expected
        unchecked = draft(staged, drawn, DraftPlan(3, lookups_alone=True))
        assert unchecked == [[]] * len(expected) or num_good
        # Another rank would go on with lookups.
        staged, _ = make_staged(drawn, BrokenLookups(0), is_alone=False)
        if max(drawn.wanted) > 1:  # for a single draft nothing is looked up
            with pytest.raises(RuntimeError):
                draft(staged, drawn)
