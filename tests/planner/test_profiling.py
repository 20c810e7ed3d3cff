# SPDX-License-Identifier: Apache-2.0
"""The tour of `magicdec profile`, on an imagined machine."""

import argparse
import time
from types import SimpleNamespace

import pytest
import torch
import vllm
from imagined_engine import BUDGET, MAX_TOKENS, Engine, alike, all_choices

from vllm_magicdec.adaptive.controller import PLAIN, Choice, Controller
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.planner import profile
from vllm_magicdec.planner.console import UserError
from vllm_magicdec.planner.profile import _Tour, tokens_to_grow

LENGTHS = range(MAX_TOKENS + 1)


def test_the_tour_meets_every_length():
    tour = _Tour(LENGTHS, BUDGET)
    choices = [tour.choose(1, 100) for _ in range(tour.num_steps)]
    assert set(choices) == set(map(Choice, LENGTHS))
    # Were every draft accepted.
    assert sum(choice.drafts + 1 for choice in choices) <= tokens_to_grow(MAX_TOKENS)


def test_times_of_lengths_that_did_not_meet_are_predicted():
    engine, times = Engine(), StepTimes()
    for num_reqs in (1, 8):
        for context in (256, 2_048, 16_000):
            tour, verified = _Tour(LENGTHS, BUDGET), 0
            for _ in range(tour.num_steps):
                choice = tour.choose(num_reqs, num_reqs * context)
                budget = tour.budget_of(choice)
                step = Step(num_reqs, num_reqs * context, verified, choice.drafts, budget)
                times.add(TimedStep(step, engine.seconds(step)))
                verified = choice.drafts
    times.fit()
    for context in (256, 2_048, 16_000):
        for choice in all_choices():
            step = alike(8, 8 * context, choice)
            assert times.predict(step) == pytest.approx(engine.seconds(step), rel=0.05)


@pytest.mark.parametrize(("is_cpu", "executor"), [(True, "mp"), (False, None)])
def test_on_a_cpu_the_worker_has_a_servers_threads(monkeypatch, tmp_path, is_cpu, executor):
    """vLLM binds those of a worker that has a process; one in the engine's process takes all cores."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # it is changed

    class Made(Exception):
        """An engine, with these arguments."""

    def make(**arguments):
        raise Made(arguments)

    monkeypatch.setattr(vllm, "LLM", make)
    monkeypatch.setattr(profile, "_model_len", lambda options: 4096)
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    parser = argparse.ArgumentParser()
    profile.add_command(parser.add_subparsers())
    options = parser.parse_args(["profile", "--model", "m", "--out", str(tmp_path / "profile.json")])
    with pytest.raises(Made) as made:
        options.run(options)
    assert made.value.args[0].get("distributed_executor_backend") == executor
    assert made.value.args[0]["max_model_len"] == 4096


class PromptEngine:
    """An engine on the imagined machine, for one prompt at a time; it is slow at first.

    A step's drafts take their time in it, or (`come_late`) in the next one.
    """

    CHUNK, SLOW, PER_DRAFT = 100, 7.0, 10.0

    def __init__(self, come_late):
        self.now, self.left, self.before, self.late = 0.0, 0, 0, 0.0
        self.reads = []  # tokens of prompts, choice of their steps
        self.scheduler = SimpleNamespace(
            _controller=Controller(LENGTHS, BUDGET, StepTimes()),
            _drafts_come_late=come_late,
            max_num_scheduled_tokens=self.CHUNK,
        )
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(distributed_executor_backend="mp" if come_late else "uni"),
        )
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 50)

    def reset_prefix_cache(self):
        self.before = 0

    def add_request(self, name, prompt, limit):
        assert limit.max_tokens == 1
        self.left = len(prompt["prompt_token_ids"])

    def has_unfinished_requests(self):
        return self.left > 0

    def step(self):
        choice = self.scheduler._controller.choose(1, self.before)
        tokens = min(self.left, self.CHUNK)
        self.now += self.late + reading(tokens, self.before, choice)
        self.now += self.SLOW * ((tokens, choice) not in self.reads)
        self.reads.append((tokens, choice))
        self.left, self.before, self.late = self.left - tokens, self.before + tokens, 0.0
        drafting = 0.0 if self.left else self.PER_DRAFT * choice.drafts
        if self.scheduler._drafts_come_late:
            self.late = drafting
        else:
            self.now += drafting


def reading(tokens, before, choice):
    return 1.0 + 0.1 * tokens + 0.01 * before + 0.5 * (choice.drafts > 0)


@pytest.mark.parametrize("come_late", [False, True])
def test_prompts_are_measured_plainly_and_with_drafts_behind_them(monkeypatch, come_late):
    engine = PromptEngine(come_late)
    monkeypatch.setattr(profile, "_when_idle", lambda: engine.now)
    monkeypatch.setattr(profile, "_REPEATS", 1)  # only the first time is slow
    own = engine.scheduler._controller
    found = profile.measure_prompts(SimpleNamespace(llm_engine=engine), [40, 130, 200, 40])
    assert engine.scheduler._controller is own
    most = Choice(MAX_TOKENS)
    assert set(engine.reads) == {(n, c) for n in (40, 100, 30) for c in (PLAIN, most)} | {(1, PLAIN)}
    last, others = {(40, 0), (30, 100), (100, 100)}, {(100, 0)}

    def rows(choice, made_behind):
        expected = {}
        for n, before in last | others:
            drafts = choice.drafts if (n, before) in made_behind else 0
            seconds = reading(n, before, choice) + engine.PER_DRAFT * drafts
            expected[n, before, drafts, BUDGET if drafts else 0] = pytest.approx(seconds)
        return expected

    wanted = {"prompts": rows(PLAIN, ()), "drafting_prompts": rows(most, () if come_late else last)}
    fields = ("prompt_tokens", "context_tokens", "drafts", "budget")
    for name, measured in wanted.items():
        assert {tuple(row[f] for f in fields): row["seconds"] for row in found[name]} == measured
        assert len(found[name]) == len(measured)


def test_contexts_are_no_longer_than_the_model_reads():
    assert profile._within(10**6, 390) == [256, 2048, 8192]
    assert profile._within(8100, 390) == [256, 2048, 8100]
    assert profile._within(100, 390) == [100]
    with pytest.raises(UserError, match=r"takes 1566 tokens .* leaves -542; use fewer"):
        profile._within(-542, 1566)


def test_steps_that_overlap_are_not_timed():
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=True))
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=None))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config, engine_core=core))
    with pytest.raises(ValueError, match="use async_scheduling=False"):
        profile.measure_cell(llm, 1, 64)


def test_the_clock_waits_for_the_device(monkeypatch):
    finished_at = []

    def synchronize() -> None:
        time.sleep(0.01)
        finished_at.append(time.perf_counter())

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    now = profile._when_idle()
    assert finished_at and now >= finished_at[0]
