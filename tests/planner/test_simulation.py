# SPDX-License-Identifier: Apache-2.0
"""Simulated engines against queueing theory, by hand, and by what must be conserved."""

import itertools
import json
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_magicdec.planner import traces
from vllm_magicdec.planner.console import UserError
from vllm_magicdec.planner.simulation import PLAIN, Limits, Speculation, simulate
from vllm_magicdec.planner.traces import Arrival, Lengths

pytest.importorskip("simpy")

ROOMY = Limits(kv_tokens=10**9, max_num_seqs=10**6, max_num_batched_tokens=10**9)


class Always:
    """Every step takes as long."""

    def __init__(self, seconds=1.0):
        self.work = []
        self.each = seconds

    def seconds(self, work):
        self.work.append(work)
        return self.each


class PerToken:
    """A second per token of prompt and position of a decoding request, a tenth per draft."""

    def seconds(self, work):
        decoded = work.decoding * (1 + work.verified)
        return work.prompt_tokens + decoded + 0.1 * work.drafting * work.drafts


# ---- queueing theory


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_at_a_time_waits_as_in_an_m_d_1_queue(load):
    """Prompts only, one request in an engine: Poisson arrivals, a fixed time of service, one server."""
    service_s = 0.5
    arrivals = traces.poisson(load / service_s, 60_000, Lengths("10"), Lengths("1"), seed=7)
    limits = Limits(kv_tokens=10**6, max_num_seqs=1, max_num_batched_tokens=16)
    outcome = simulate(arrivals, Always(service_s), limits)
    waits = [request.e2e_s - service_s for request in outcome.finished]
    expected = load * service_s / (2 * (1 - load))  # Pollaczek-Khinchine
    assert statistics.fmean(waits) == pytest.approx(expected, rel=0.06)
    busy = outcome.busy_s / max(request.end_s for request in outcome.finished)
    assert busy == pytest.approx(load, rel=0.03)


def test_acceptance_is_that_of_the_probabilities():
    speculation = Speculation((0.9, 0.6, 0.5))
    arrivals = [Arrival(0.0, 5, 40_000)]
    outcome = simulate(arrivals, Always(), ROOMY, speculation, seed=3)
    assert 1 + outcome.accepted / outcome.rounds == pytest.approx(speculation.acceptance_length, rel=0.01)
    assert speculation.acceptance_length == 3.0
    # All rounds of one request that decodes alone.
    assert outcome.finished[0].tpot_s == pytest.approx(1 / 3.0, rel=0.01)
    assert Speculation.of(3, 0.5).standing == (0.5, 0.25, 0.125)


def test_more_replicas_wait_less():
    arrivals = traces.poisson(8.0, 4000, Lengths("10"), Lengths("1"), seed=1)
    limits = Limits(kv_tokens=10**6, max_num_seqs=1, max_num_batched_tokens=16)
    means = []
    for replicas in (5, 10, 20):
        outcome = simulate(arrivals, Always(0.5), limits, replicas=replicas)
        assert {request.replica for request in outcome.finished} <= set(range(replicas))
        means.append(statistics.fmean(request.e2e_s for request in outcome.finished))
    assert means[0] > means[1] > means[2] == pytest.approx(0.5, rel=0.01)


# ---- by hand


def ends(outcome):
    return [(request.arrival.prompt_tokens, request.first_s, request.end_s) for request in outcome.finished]


def test_of_a_thousand_replicas_half_are_busy():
    """Each serves one request at a time, at half its rate: an idle one is always found."""
    service_s, rate = 0.5, 1000.0
    arrivals = traces.poisson(rate, 6_000, Lengths("10"), Lengths("1"), seed=7)
    limits = Limits(kv_tokens=10**6, max_num_seqs=1, max_num_batched_tokens=16)
    outcome = simulate(arrivals, Always(service_s), limits, replicas=1000)
    assert [request.e2e_s for request in outcome.finished] == pytest.approx([service_s] * 6_000)
    # Little's law.
    in_flight = outcome.busy_s / max(request.end_s for request in outcome.finished)
    assert in_flight == pytest.approx(rate * service_s, rel=0.1)
    assert 480 < len({request.replica for request in outcome.finished}) < 600


def test_a_short_trace_by_hand():
    """A prompt in chunks, another beside it, decoding together: a second per token."""
    limits = Limits(kv_tokens=1000, max_num_seqs=2, max_num_batched_tokens=4, block_size=1)
    arrivals = [Arrival(0.0, 6, 2), Arrival(0.0, 3, 3), Arrival(0.0, 1, 1)]
    outcome = simulate(arrivals, PerToken(), limits)
    # Step 1: 4 of A's prompt, to 4 s. Step 2: its other 2, and 2 of B's, to 8 s: A's first token.
    # Step 3: A decodes (1), B's last (1), to 10 s: A ends, B's first. C is not let in before A has left.
    # Step 4: B decodes, C's prompt, to 12 s: C has its only token. Step 5: B's last, to 13 s.
    assert ends(outcome) == [(6, 8, 10), (1, 12, 12), (3, 10, 13)]
    assert (outcome.steps, outcome.preemptions, outcome.busy_s) == (5, 0, 13)


def test_rounds_by_hand():
    """All drafts stand: a prompt and drafts, then rounds of three positions and three tokens."""
    outcome = simulate([Arrival(1.0, 4, 6)], PerToken(), ROOMY, Speculation((1.0, 1.0)))
    # Prompt 4 + drafts 0.2: the first token at 5.2. Rounds of 3 + 0.2: 4 tokens at 8.4; 7, so 6, at 11.6.
    assert ends(outcome) == [(4, pytest.approx(5.2), pytest.approx(11.6))]
    assert (outcome.rounds, outcome.accepted) == (2, 4)
    assert outcome.gap_s(50) == pytest.approx(3.2, rel=0.01)


def test_a_front_end_delays_each_request_alone():
    """Before the engine, and beside one another: the second comes to the engine while the first runs."""
    arrivals = [Arrival(0.0, 4, 2), Arrival(1.0, 4, 2)]
    outcome = simulate(arrivals, PerToken(), ROOMY, frontend_s=10.0)
    # First: in the engine at 10, its prompt to 14. Then it decodes beside the second's prompt, to 19, and
    # the second alone, to 20.
    assert ends(outcome) == [(4, 14, 19), (4, 19, 20)]
    assert [request.ttft_s for request in outcome.finished] == [14, 18]


def test_preemption_by_hand():
    """Room for 8 tokens: two requests of 3 + 3 tokens outgrow it, and the later one begins again."""
    limits = Limits(kv_tokens=8, max_num_seqs=4, max_num_batched_tokens=100, block_size=1)
    outcome = simulate([Arrival(0.0, 3, 3), Arrival(0.0, 3, 3)], PerToken(), limits)
    # Step 1: both prompts, to 6 s, 6 blocks. Step 2: both decode, to 8 s, 8 blocks, 2 tokens each.
    # Step 3: the first needs a ninth block: the second goes. It ends at 9 s.
    # Step 4: the second's prompt and 2 tokens again, 5 s: its third token at 14 s.
    assert ends(outcome) == [(3, 6, 9), (3, 6, 14)]
    assert outcome.preemptions == 1


def test_a_request_alone_that_is_short_of_slots_for_drafts_ends():
    """Its last tokens do not need the slots of drafts past its end, for which it is preempted."""
    limits = Limits(kv_tokens=96, max_num_seqs=4, max_num_batched_tokens=100, block_size=1)
    times = Always()
    outcome = simulate([Arrival(0.0, 60, 30)], times, limits, Speculation((0.0,) * 4))
    assert len(outcome.finished) == 1 and outcome.preemptions > 0
    assert all(work.decoding + work.prompt_tokens for work in times.work)


def test_a_prompt_waits_until_all_of_it_fits():
    limits = Limits(kv_tokens=10, max_num_seqs=4, max_num_batched_tokens=100, block_size=1)
    outcome = simulate([Arrival(0.0, 5, 2), Arrival(0.0, 6, 1)], PerToken(), limits)
    assert ends(outcome) == [(5, 5, 6), (6, 12, 12)]
    assert outcome.preemptions == 0


def test_what_a_step_is_told_to_do():
    times = Always()
    simulate([Arrival(0.0, 10, 3), Arrival(0.5, 20, 1)], times, ROOMY, Speculation((1.0,)))
    assert [work[:4] for work in times.work] == [(0, 0, 0, 10), (1, 10, 1, 20)]
    assert [work.prompt_pairs for work in times.work] == [55, 210]
    assert [(work.drafting, work.drafts, work.drafting_tokens) for work in times.work] == [
        (1, 1, 10),
        (2, 1, 30),
    ]


# ---- what must hold

requests = st.builds(Arrival, st.floats(0, 20), st.integers(1, 60), st.integers(1, 30))


@settings(deadline=None, max_examples=150)
@given(
    st.lists(requests, min_size=1, max_size=40),
    st.integers(90, 300),
    st.integers(1, 8),
    st.integers(1, 64),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 4),
    st.integers(1, 3),
)
def test_every_request_ends_once_with_all_its_tokens(
    arrivals, kv_tokens, max_num_seqs, batched, block_size, drafts, replicas
):
    arrivals = sorted(arrivals)
    limits = Limits(kv_tokens + 2 * block_size + 4, max_num_seqs, batched, block_size)
    times = Watched(limits)
    outcome = simulate(arrivals, times, limits, Speculation.of(drafts, 0.7), replicas, seed=1)
    assert sorted(request.arrival for request in outcome.finished) == arrivals
    for request in outcome.finished:
        assert request.arrival.arrival_s < request.first_s <= request.end_s
    produced = sum(arrival.output_tokens for arrival in arrivals)
    # A prompt gives a token, again after a preemption; all others come from rounds.
    firsts = len(arrivals) + outcome.preemptions
    assert produced <= firsts + outcome.decoding_steps + outcome.accepted
    computed = sum(work.prompt_tokens for work in times.work)
    asked = sum(arrival.prompt_tokens for arrival in arrivals)
    if not outcome.preemptions:
        assert computed == asked
        assert drafts or produced == len(arrivals) + outcome.decoding_steps
    assert computed >= asked
    assert outcome.busy_s == pytest.approx(len(times.work))


class Watched(Always):
    """Sees that limits are kept."""

    def __init__(self, limits):
        super().__init__()
        self.limits = limits

    def seconds(self, work):
        assert work.decoding + bool(work.prompt_tokens) >= 1
        assert work.decoding <= self.limits.max_num_seqs
        tokens = work.decoding * (1 + work.verified) + work.prompt_tokens
        assert 0 < tokens <= self.limits.max_num_batched_tokens + 1e-9
        assert work.context_tokens <= self.limits.kv_tokens
        return super().seconds(work)


def test_a_seed_gives_the_same_again():
    arrivals = traces.poisson(2.0, 200, Lengths("uniform:5:50"), Lengths("lognormal:20:0.5"), seed=5)
    assert arrivals == traces.poisson(
        2.0, 200, Lengths("uniform:5:50"), Lengths("lognormal:20:0.5"), seed=5
    )
    speculation = Speculation.of(3, 0.6)

    def run(seed):
        return ends(simulate(arrivals, Always(0.01), ROOMY, speculation, seed=seed))

    assert run(1) == run(1) != run(2)


def test_plain_decoding_does_not_draw():
    arrivals = traces.poisson(2.0, 50, Lengths("30"), Lengths("20"), seed=5)
    assert ends(simulate(arrivals, Always(), ROOMY, PLAIN, seed=1)) == ends(
        simulate(arrivals, Always(), ROOMY, PLAIN, seed=2)
    )


def test_what_never_fits_is_refused():
    with pytest.raises(UserError, match="a request of 104 tokens does not fit into K/V memory for 64"):
        simulate([Arrival(0.0, 90, 10)], Always(), Limits(kv_tokens=64), Speculation.of(4, 0.5))


@pytest.mark.parametrize("standing", [(0.5, 0.6), (1.1,), (-0.1,), (math.nan,)])
def test_impossible_acceptance(standing):
    with pytest.raises(ValueError, match="are no probabilities"):
        Speculation(standing)


# ---- traces


def test_arrivals_are_poisson():
    arrivals = traces.poisson(4.0, 20_000, Lengths("1"), Lengths("1"), seed=2)
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(arrivals)]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.03)
    assert traces.poisson(math.inf, 3, Lengths("1"), Lengths("1"), seed=2)[-1].arrival_s == 0


def test_lengths_are_drawn_as_written():
    rng = random.Random(1)
    drawn = {
        name: [Lengths(name).sampler()(rng) for _ in range(4000)]
        for name in ("7", "uniform:3:5", "lognormal:200:0.8")
    }
    assert set(drawn["7"]) == {7}
    assert set(drawn["uniform:3:5"]) == {3, 4, 5}
    assert statistics.median(drawn["lognormal:200:0.8"]) == pytest.approx(200, rel=0.06)
    logarithms = [math.log(length) for length in drawn["lognormal:200:0.8"]]
    assert statistics.stdev(logarithms) == pytest.approx(0.8, rel=0.05)


@pytest.mark.parametrize(
    "written", ["0", "x", "uniform:5", "uniform:5:3", "lognormal:0:1", "gamma:1:2", "1:2"]
)
def test_lengths_that_cannot_be(written):
    with pytest.raises(ValueError, match="says no lengths"):
        Lengths(written)


def test_a_trace_from_a_file(tmp_path):
    file = tmp_path / "trace.jsonl"
    rows = [(2.0, 5, 6), (0.5, 7, 8)]
    names = ("arrival_s", "prompt_tokens", "output_tokens")
    lines = [json.dumps({**dict(zip(names, row, strict=True)), "user": "x"}) for row in rows]
    file.write_text("\n\n".join(lines))
    assert traces.load(file) == [Arrival(0.5, 7, 8), Arrival(2.0, 5, 6)]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "1",
        '{"arrival_s": 1}',
        '{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}',
        '{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}',
        '{"arrival_s": 0, "prompt_tokens": 1.5, "output_tokens": 1}',
        '{"arrival_s": "x", "prompt_tokens": 1, "output_tokens": 1}',
    ],
)
def test_a_line_that_is_no_request_is_named(line, tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n' + line)
    with pytest.raises(UserError, match="line 2: write a request as"):
        traces.load(file)


def test_a_trace_without_requests(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text("\n")
    with pytest.raises(UserError, match="holds no requests"):
        traces.load(file)
    with pytest.raises(UserError, match="cannot read the trace"):
        traces.load(tmp_path / "nothing")
