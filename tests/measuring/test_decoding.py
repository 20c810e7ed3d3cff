# SPDX-License-Identifier: Apache-2.0
"""Timing of the benchmarks that decode a batch, on an engine with known step times."""

import sys
from types import SimpleNamespace

import engines
import pytest

sys.path.insert(0, str(engines.HERE.parent / "benchmarks"))
from common import decoding

TOKENS_PER_STEP = 3


class ImaginedEngine:
    """One step that prefills, then steps of `seconds` each, all of which make tokens of every request."""

    def __init__(self, seconds):
        self.seconds = iter(seconds)
        self.now = 0.0
        self.made = {}
        self.num_tokens = 0

    def add_request(self, request_id, prompt, params):
        self.made[request_id] = 0
        self.num_tokens = params.max_tokens

    def step(self):
        self.now += next(self.seconds)
        outputs = []
        for name, made in self.made.items():
            self.made[name] = min(made + TOKENS_PER_STEP, self.num_tokens) if made else 1
            finished = self.made[name] == self.num_tokens
            completion = SimpleNamespace(token_ids=range(self.made[name]))
            outputs.append(SimpleNamespace(request_id=name, finished=finished, outputs=[completion]))
        if outputs[0].finished:
            self.made.clear()
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

    class UnevenEngine(ImaginedEngine):
        def step(self):
            self.now += next(self.seconds)
            outputs = []
            for name, made in list(self.made.items()):
                self.made[name] = made = made + (3 if made and name.startswith("0-") else 1)
                finished = made >= self.num_tokens
                if finished:
                    del self.made[name]
                completion = SimpleNamespace(token_ids=range(min(made, self.num_tokens)))
                outputs.append(SimpleNamespace(request_id=name, finished=finished, outputs=[completion]))
            return outputs

    engine = UnevenEngine([5.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: engine.now)
    decoded = decoding.decode_job(SimpleNamespace(llm_engine=engine), [[1]] * 2, 4)
    assert decoded.tokens_per_s == pytest.approx(2 * 4 / 12.0)
    assert decoded.step_ms == pytest.approx(2000.0)
    assert decoded.acceptance_length == pytest.approx(6 / 4)


def test_a_batch_beyond_the_kv_cache_is_refused():
    """Each request begins when the one before it has ended."""

    class FullEngine(ImaginedEngine):
        def step(self):
            request_id = next(iter(self.made))
            self.made[request_id] += 1
            completion = SimpleNamespace(token_ids=range(self.made[request_id]))
            finished = self.made[request_id] == self.num_tokens
            if finished:
                del self.made[request_id]
            return [SimpleNamespace(request_id=request_id, finished=finished, outputs=[completion])]

    with pytest.raises(SystemExit, match="raise VLLM_CPU_KVCACHE_SPACE"):
        decoding.decode(SimpleNamespace(llm_engine=FullEngine([])), [[1]] * 2, 40)


def test_too_few_steps_are_refused(monkeypatch):
    engine = ImaginedEngine([1.0] * 9)
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: engine.now)
    with pytest.raises(SystemExit, match="raise --tokens"):
        decoding.decode(SimpleNamespace(llm_engine=engine), [[1]], 1 + 4 * TOKENS_PER_STEP)
