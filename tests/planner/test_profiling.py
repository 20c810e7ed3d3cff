# SPDX-License-Identifier: Apache-2.0
"""The sweep of `magicdec profile`, on a simulated machine."""

import argparse
from types import SimpleNamespace

import pytest
import vllm
from imagined_engine import BUDGET, MAX_TOKENS, Engine, alike, all_choices

from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.adaptive.value import Choice
from vllm_magicdec.planner import profile
from vllm_magicdec.planner.console import UserError
from vllm_magicdec.planner.profile import _Sweep

LENGTHS = range(MAX_TOKENS + 1)


def test_the_sweep_tries_every_number_of_drafts():
    sweep = _Sweep(LENGTHS, BUDGET)
    choices = [sweep.choose(1, 100) for _ in range(sweep.num_steps)]
    assert set(choices) == set(map(Choice, LENGTHS))
    # The tokens generated if every draft is accepted.
    assert sum(choice.drafts + 1 for choice in choices) <= sweep.max_tokens


def test_times_of_unmeasured_steps_are_predicted():
    engine, times = Engine(), StepTimes()
    for num_reqs in (1, 8):
        for context in (256, 2_048, 16_000):
            sweep, verified = _Sweep(LENGTHS, BUDGET), 0
            for _ in range(sweep.num_steps):
                choice = sweep.choose(num_reqs, num_reqs * context)
                budget = sweep.value.mean(choice).budget
                step = Step(num_reqs, num_reqs * context, verified, choice.drafts, budget)
                times.add(TimedStep(step, engine.seconds(step)))
                verified = choice.drafts
    times.fit()
    for context in (256, 2_048, 16_000):
        for choice in all_choices():
            step = alike(8, 8 * context, choice)
            assert times.predict(step) == pytest.approx(engine.seconds(step), rel=0.05)


@pytest.mark.parametrize(("is_cpu", "executor"), [(True, "mp"), (False, None)])
def test_on_a_cpu_the_worker_uses_as_many_threads_as_a_servers(monkeypatch, tmp_path, is_cpu, executor):
    """vLLM binds the threads of a worker process; a worker in the engine's process uses all cores."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # restored after `run` changes it

    class EngineStarted(Exception):
        """An engine is started with these arguments."""

    def start(**arguments):
        raise EngineStarted(arguments)

    monkeypatch.setattr(vllm, "LLM", start)
    monkeypatch.setattr(profile, "_max_model_len", lambda options: 4096)
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    parser = argparse.ArgumentParser()
    profile.add_command(parser.add_subparsers())
    options = parser.parse_args(["profile", "--model", "m", "--out", str(tmp_path / "profile.json")])
    with pytest.raises(EngineStarted) as started:
        options.run(options)
    assert started.value.args[0].get("distributed_executor_backend") == executor
    assert started.value.args[0]["max_model_len"] == 4096


def test_contexts_are_limited_by_the_models_length():
    assert profile._default_contexts(10**6, 390) == [256, 2048, 8192]
    assert profile._default_contexts(8100, 390) == [256, 2048, 8100]
    assert profile._default_contexts(100, 390) == [100]
    with pytest.raises(UserError, match=r"generates 1566 tokens, which leaves -542 tokens .*; use fewer"):
        profile._default_contexts(-542, 1566)


def test_overlapping_steps_are_not_timed():
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=True))
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=None))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config, engine_core=core))
    with pytest.raises(ValueError, match="use async_scheduling=False"):
        profile.measure_cell(llm, 1, 64)
