# SPDX-License-Identifier: Apache-2.0
"""Passes of all of a round's tokens draft what one pass per token does, as far as they get."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hashing_target import Target, assert_only_lookahead_was_written, rounds, steps_of
from hypothesis import find, given, settings
from hypothesis import strategies as st

from vllm_magicdec.adaptive.metrics import Counts, LookupCounters
from vllm_magicdec.drafting import wide_passes as module
from vllm_magicdec.drafting.loops import Stepwise
from vllm_magicdec.drafting.wide_passes import _DELAY, WidePasses
from vllm_magicdec.lookup.history import Texts


class WideTarget(Target):
    def __init__(self, drawn, max_wide_reqs: int = 10**6) -> None:
        super().__init__([dict(cache) for cache in drawn.cache])
        self.most_reqs = max_wide_reqs
        texts = [history.after(0) for history in drawn.batch.histories]
        self._token_ids = torch.zeros((len(texts), drawn.model_len + 1), dtype=torch.int32)
        for own, text in zip(self._token_ids, texts, strict=True):
            own[: len(text)] = torch.from_numpy(text)
        self._lens = torch.tensor([len(text) for text in texts])

    def max_wide_reqs(self, num_steps: int) -> int:
        return self.most_reqs

    def texts(self, batch) -> Texts:
        rows = torch.arange(len(self._lens))
        return Texts(self._token_ids, rows, self._lens, int(self._lens.max()))


class RandomLookups:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def fill(self, given_, made, texts):
        columns = torch.arange(given_.shape[1])
        other = torch.randint(0, 5, given_.shape, dtype=torch.int32, generator=self._generator)
        given_.copy_(torch.where(columns > made.unsqueeze(1), other, given_))
        return torch.ones(len(given_), dtype=torch.bool)


class KnownDrafts:
    def __init__(self, drafts: torch.Tensor) -> None:
        self._drafts = drafts

    def fill(self, given_, made, texts):
        given_[:, 1:] = self._drafts[:, :-1]
        return torch.ones(len(given_), dtype=torch.bool)


class BrokenLookups(RandomLookups):
    def __init__(self, num_good: int) -> None:
        super().__init__(0)
        self._num_good = num_good

    def fill(self, given_, made, texts):
        self._num_good -= 1
        if self._num_good < 0:
            raise RuntimeError("broken on purpose")
        return super().fill(given_, made, texts)


def wide_passes(target, drawn, lookups, num_passes: int | None = None, **others):
    """By the rule, or `num_passes` in every round."""
    counters = LookupCounters(Counts())
    sizes = {"lengths": [drawn.num_steps], "max_model_len": drawn.model_len}
    buffer = torch.zeros((len(drawn.tables), drawn.num_steps), dtype=torch.int64)
    wide = WidePasses(target, lookups, counters, Stepwise(target, buffer), **{**sizes, **others})
    if num_passes is not None:
        wide._num_passes = dict.fromkeys(wide._num_passes, num_passes)
    return wide, counters


def draft_round(wide, drafts, batch, rounds_) -> int:
    """Return the number of wide passes."""
    num_passes = wide.begin_round(batch, drafts.shape[1])
    return num_passes if num_passes and wide.draft_wide(drafts, batch, rounds_, num_passes) else 0


def all_fit(drawn) -> bool:
    """No request comes to the end of the model's length, one drafts, and there is a draft to look up."""
    fit = max(drawn.batch.known_lens) + drawn.num_steps <= drawn.model_len
    return fit and drawn.num_steps > 1 and not all(drawn.batch.is_prefilling)


def a_round(is_wanted=all_fit):
    return find(rounds(), lambda drawn: drawn.num_steps > 2 and is_wanted(drawn), settings=settings())


def one_by_one(drawn) -> torch.Tensor:
    """Also the drafts of requests whose prompt is not all there."""
    whole = replace(drawn, batch=replace(drawn.batch, is_prefilling=[False] * len(drawn.tables)))
    return torch.tensor(whole.one_by_one())


@settings(max_examples=150, deadline=None)
@given(rounds(), st.integers(0, 100), st.integers(1, 9))
def test_as_many_drafts_as_passes_are_those_of_one_pass_per_token_whatever_was_looked_up(
    drawn, seed, num_passes
):
    drafts = torch.full((len(drawn.tables), drawn.num_steps), -1)
    target = WideTarget(drawn)
    num_passes = min(num_passes, drawn.num_steps)
    wide, _ = wide_passes(target, drawn, RandomLookups(seed), num_passes)
    made = draft_round(wide, drafts, drawn.batch, steps_of(drawn))
    if not all_fit(drawn):
        assert made == 0 and (drafts == -1).all() and not target.pass_lens
        return
    assert made == num_passes
    expected = one_by_one(drawn)
    assert torch.equal(drafts[:, :made], expected[:, :made])
    # Whatever stands in for drafts that are lacking was drawn after something.
    assert ((drafts >= 0) & (drafts < 5)).all()
    assert target.pass_lens == [[drawn.num_steps] * len(drafts)] * made
    drafting = replace(drawn, batch=replace(drawn.batch, is_prefilling=[False] * len(drafts)))
    assert_only_lookahead_was_written(drafting, target)


@settings(max_examples=60, deadline=None)
@given(rounds())
def test_a_lookup_that_is_right_makes_all_drafts_in_one_pass(drawn):
    if not all_fit(drawn):
        return
    expected, target = one_by_one(drawn), WideTarget(drawn)
    wide, counters = wide_passes(target, drawn, KnownDrafts(expected), 1)
    for _ in range(_DELAY + 1):
        drafts = torch.zeros_like(expected)
        assert draft_round(wide, drafts, drawn.batch, steps_of(drawn)) == 1
        assert torch.equal(drafts, expected)
    # The first of these rounds was heard of in the last one.
    num_drafting = len(drafts) - sum(drawn.batch.is_prefilling)
    expected_counts = {"rounds": 1, "passes": 1}
    looked_up = num_drafting * (drawn.num_steps - 1)
    expected_counts |= {"tokens": looked_up, "accepted_tokens": looked_up}
    counted = {name: counters.totals[f"lookup_{name}"] for name in expected_counts}
    assert counted == expected_counts


def test_the_host_waits_only_for_drafts_that_are_made(monkeypatch):
    """When vLLM begins a step, the drafts of the step before last may still be being made."""
    read: list[int] = []

    def send(sums, arrived, round_):
        return sent(sums, SimpleNamespace(synchronize=lambda: read.append(round_)), round_)

    sent = module._Sent
    monkeypatch.setattr(module, "_Sent", send)
    drawn = a_round()
    wide, _ = wide_passes(WideTarget(drawn), drawn, RandomLookups(0), 1)
    drafts = torch.zeros((len(drawn.tables), drawn.num_steps), dtype=torch.int64)
    for round_ in range(1, 8):
        draft_round(wide, drafts, drawn.batch, steps_of(drawn))
        assert read == list(range(1, round_ - 2))


def test_rounds_that_wide_passes_do_not_suit_take_passes_of_one_token():
    drawn = a_round(lambda drawn: all_fit(drawn) and len(drawn.tables) == 3)
    drafts = torch.zeros((3, drawn.num_steps), dtype=torch.int64)
    target = WideTarget(drawn, max_wide_reqs=2)
    wide, counters = wide_passes(target, drawn, RandomLookups(0), 2)
    assert draft_round(wide, drafts, drawn.batch, steps_of(drawn)) == 0, "too many requests"
    target.most_reqs = 3
    fewer = drafts[:, : drawn.num_steps - 1]
    assert draft_round(wide, fewer, drawn.batch, steps_of(drawn)) == 0, "fewer drafts than usual"
    assert not target.pass_lens
    target.most_reqs = 2
    for num_steps in (drawn.num_steps - 1, drawn.num_steps):
        made = wide.draft(drawn.batch, num_steps, lambda *, is_wide: steps_of(drawn))
        assert made.num_passes == len(target.pass_lens) == num_steps
        assert torch.equal(made.tokens, one_by_one(drawn)[:, :num_steps])
        target.pass_lens.clear()
    assert counters.totals["lookup_passes"] == 2 * drawn.num_steps - 1
    target.most_reqs = 3
    assert draft_round(wide, drafts, drawn.batch, steps_of(drawn)) == 2


def test_lookups_that_fail_leave_the_round_to_passes_of_one_token(monkeypatch):
    monkeypatch.setenv("VLLM_MAGICDEC_STRICT", "0")
    drawn = a_round()
    drafts = torch.zeros((len(drawn.tables), drawn.num_steps), dtype=torch.int64)
    # Also after the first of two passes, whose drafts the steps then make anew.
    target = WideTarget(drawn)
    wide, counters = wide_passes(target, drawn, BrokenLookups(1), 2)
    steps = steps_of(drawn)
    assert draft_round(wide, drafts, drawn.batch, steps) == 0 and len(target.pass_lens) == 1
    tokens = drawn.batch.tokens
    for index in range(drawn.num_steps):
        tokens = target.run(steps.step(index, tokens)).tokens
        drafts[:, index] = tokens
    assert torch.equal(drafts, one_by_one(drawn))
    for _ in range(4):
        assert draft_round(wide, drafts, drawn.batch, steps_of(drawn)) == 0
    # After the third one they pause.
    assert counters.totals["lookup_failures"] == 3 and counters.totals["lookup_pauses"] == 1
    # What does not compile at start-up costs speed as well, and not the engine.
    wide, counters = wide_passes(target, drawn, BrokenLookups(0), 2)
    wide.warm_up(target.texts(drawn.batch))
    assert counters.totals["lookup_failures"] == 1
    wide, _ = wide_passes(WideTarget(drawn), drawn, BrokenLookups(0), 2, is_alone=False)
    with pytest.raises(RuntimeError, match="on purpose"):
        draft_round(wide, drafts, drawn.batch, steps_of(drawn))
