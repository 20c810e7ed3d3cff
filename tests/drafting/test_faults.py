# SPDX-License-Identifier: Apache-2.0
"""When faults happen; tests/engine/test_injected_faults.py has what becomes of them."""

import os
from math import inf
from types import SimpleNamespace

import pytest

from vllm_magicdec import faults
from vllm_magicdec.adaptive.controller import Choice, Controller, How
from vllm_magicdec.adaptive.lookup_controller import LookupController
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.faults import Fault, InjectedError, inject_into_controller


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("lookup", [0, 1, 2, 3, 4]),
        ("lookup:first=1,last=2", [1, 2]),
        ("lookup:last=0", [0]),
        ("lookup:rank=1", []),
        ("lookup:first=3,rank=0", [3, 4]),
        ("selection", []),
    ],
)
def test_occasions(setting, expected):
    fault = Fault(setting, rank=0)
    assert [occasion for occasion in range(5) if fault.happens("lookup")] == expected


def test_a_file_says_what_happens_now(tmp_path):
    file = tmp_path / "fault"
    fault = Fault(str(file), rank=0)
    assert not fault.happens("nan")
    file.write_text("nan:last=0\n")
    assert [fault.happens("nan") for _ in range(2)] == [True, False]
    file.write_text("")
    assert not fault.happens("nan")


def test_nothing_is_wrapped_unless_a_fault_is_set(monkeypatch):
    controller = SimpleNamespace(choose=lambda: 1, plan=int, _lost_seconds=float)
    choose = controller.choose
    monkeypatch.delenv("VLLM_MAGICDEC_FAULT", raising=False)
    inject_into_controller(controller)
    assert controller.choose is choose
    monkeypatch.setenv("VLLM_MAGICDEC_FAULT", "controller:first=1")
    inject_into_controller(controller)
    assert controller.choose() == 1
    with pytest.raises(InjectedError):
        controller.choose()


@pytest.mark.parametrize(
    ("setting", "slept_s"),
    [
        ("slow", [19 * 0.25] * 2),
        ("slow:first=1", [19 * 0.25]),
        ("stuck:last=2", [0.05] * 3),
        ("stuck:rank=1", []),
        ("lookup", []),
    ],
)
def test_passes_that_are_slow_or_stuck_wait(monkeypatch, setting, slept_s):
    """In the time of the test; the first of two passes is stuck until the fault is over."""
    now_s, slept = [100.0], []

    def run(tokens, taken):
        now_s[0] += 0.25
        return "drawn", tokens

    monkeypatch.setattr(faults.time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    run_faultily = faults._faulty_pass(run, SimpleNamespace(), Fault(setting, rank=0))
    for tokens in (5, 6):
        assert run_faultily(tokens, SimpleNamespace(index=0)) == ("drawn", tokens)
    assert slept == pytest.approx(slept_s)


@pytest.mark.parametrize(
    ("setting", "message"),
    [("nam", "names 'nam'; use"), ("slow:draft=4", "limits by 'draft'; use first, ")],
)
def test_what_is_unknown_is_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        Fault(setting, rank=0)


def say(file, text):
    """Later than before, whatever the clock's ticks are."""
    later = file.stat().st_mtime + 1 if file.exists() else 1
    file.write_text(text)
    os.utime(file, (later, later))


@pytest.mark.parametrize(
    ("controller", "chosen"),
    [
        (Controller((0, 2, 5), 512, StepTimes()), Choice(2)),
        (LookupController(16, 512, StepTimes()), Choice(16)),
    ],
    ids=["without lookups", "with lookups"],
)
def test_auto_makes_the_drafts_that_a_fault_wants(monkeypatch, tmp_path, controller, chosen):
    """Until it is off; all of them by passes, and none is weighed."""
    file = tmp_path / "fault"
    say(file, "")
    monkeypatch.setenv("VLLM_MAGICDEC_FAULT", str(file))
    inject_into_controller(controller)
    tried = controller.choose(1, 1000)
    assert controller.plan(tried) == tried.drafts
    say(file, "nan:drafts=4")
    assert controller.choose(1, 1000) == chosen and controller.is_planned
    plan = controller.plan(chosen)
    assert plan == min(4, chosen.drafts) and not plan.lookups_alone
    for own in (plan, *plan.by_kind):
        assert own == plan and not own.lookups_alone
        assert (own.least_chance, own.least_gain, own.least_promise) == (0.0, 0.0, inf)
    assert len(plan.by_kind) == len(controller.plan(tried).by_kind)
    say(file, "")
    assert controller.choose(1, 1000) == tried and controller.plan(tried) == tried.drafts


def test_drafts_that_a_fault_wants_cost_no_trials(monkeypatch, tmp_path):
    """Which are what a controller may lose time by: it would make none for hours."""
    file = tmp_path / "fault"
    say(file, "")
    monkeypatch.setenv("VLLM_MAGICDEC_FAULT", str(file))
    controller = LookupController(16, 512, StepTimes())
    inject_into_controller(controller)

    def serve(steps):
        tried = 0
        for _ in range(steps):
            choice = controller.choose(4, 4000)
            num_passes = int(controller.plan(choice)) if controller.budget_of(choice) else 0
            tried += controller.is_planned
            step = Step(4, 4000, 0.5, num_passes, controller.budget_of(choice))
            seconds = 0.005 + 0.001 * num_passes  # so that passes never pay
            controller.observe(
                [(1, 0)] * 4 if choice.drafts else [],
                choice,
                TimedStep(step, seconds),
                choice,
                How(num_passes, controller.is_planned),
            )
        return tried

    serve(10_000)
    usual = serve(10_000)
    say(file, "nan:drafts=4")
    assert serve(2000) == 2000
    say(file, "")
    assert serve(10_000) > usual / 2 > 0
