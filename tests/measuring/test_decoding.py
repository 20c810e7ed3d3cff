# SPDX-License-Identifier: Apache-2.0
"""Timing of the benchmarks that decode a batch, on an engine with known step times."""

from types import SimpleNamespace

import pytest
from common import decoding

TOKENS_PER_STEP = 3


class ImaginedEngine:
    """One step that prefills, then steps of `seconds` each, which make `per_step` tokens of a request."""

    def __init__(self, seconds, per_step=lambda name: TOKENS_PER_STEP):
        self.seconds, self.per_step = iter(seconds), per_step
        self.now = 0.0
        self.made = {}
        self.num_tokens = 0

    def add_request(self, request_id, prompt, params):
        self.made[request_id] = 0
        self.num_tokens = params.max_tokens

    def step(self):
        self.now += next(self.seconds)
        outputs = []
        for name, before in list(self.made.items()):
            self.made[name] = made = min(before + self.per_step(name), self.num_tokens) if before else 1
            if made == self.num_tokens:
                del self.made[name]
            completion = SimpleNamespace(token_ids=range(made))
            finished = made == self.num_tokens
            outputs.append(SimpleNamespace(request_id=name, finished=finished, outputs=[completion]))
        return outputs

    def has_unfinished_requests(self):
        return bool(self.made)


@pytest.mark.parametrize("num_requests", [1, 4])
def test_speeds_are_what_the_steps_took(monkeypatch, num_requests):
    # A prompt, a step that is not timed, five that are, and the last, in which the requests end.
    engine = ImaginedEngine([50.0, 7.0, 0.1, 0.1, 0.1, 0.4, 0.1, 9.0])
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: engine.now)
    llm = SimpleNamespace(llm_engine=engine)
    told = []
    decoded = decoding.decode(
        llm, [[1]] * num_requests, 1 + 7 * TOKENS_PER_STEP, before_clock=lambda: told.append(engine.now)
    )
    assert told == [50.0]
    assert decoded.acceptance_length == TOKENS_PER_STEP
    assert decoded.step_ms == pytest.approx(100.0)  # the median
    assert decoded.tokens_per_s == pytest.approx(5 * TOKENS_PER_STEP * num_requests / 0.8)  # the mean


def test_a_job_is_timed_from_its_arrival_to_its_end(monkeypatch):
    """The prompts' step, one in which a request makes three tokens and ends, and two of the other alone."""
    engine = ImaginedEngine([5.0, 1.0, 2.0, 4.0], lambda name: 3 if name.startswith("0-") else 1)
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: engine.now)
    decoded = decoding.decode_job(SimpleNamespace(llm_engine=engine), [[1]] * 2, 4)
    assert decoded.tokens_per_s == pytest.approx(2 * 4 / 12.0)
    assert decoded.step_ms == pytest.approx(2000.0)
    assert decoded.acceptance_length == pytest.approx(6 / 4)


def test_too_few_steps_are_refused(monkeypatch):
    engine = ImaginedEngine([1.0] * 9)
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: engine.now)
    with pytest.raises(SystemExit, match="raise --tokens"):
        decoding.decode(SimpleNamespace(llm_engine=engine), [[1]], 1 + 4 * TOKENS_PER_STEP)
