# SPDX-License-Identifier: Apache-2.0
"""When injected faults happen; tests/engine/test_injected_faults.py checks their effects."""

import os
from math import inf
from types import SimpleNamespace

import pytest
from fault_plugin import injected_faults
from fault_plugin.injected_faults import Fault, InjectedError

from vllm_magicdec.adaptive.controller import Controller
from vllm_magicdec.adaptive.lookup_value import LookupValue
from vllm_magicdec.adaptive.step_times import Step, StepTimes, TimedStep
from vllm_magicdec.adaptive.value import AcceptanceValue, Choice, RoundInfo
from vllm_magicdec.views.round import Queries


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("lookup", [0, 1, 2, 3, 4]),
        ("lookup:first=1,last=2", [1, 2]),
        ("lookup:last=0", [0]),
        ("lookup:rank=1", []),  # this process is rank 0
        ("lookup:first=3,rank=0", [3, 4]),
        ("selection", []),
    ],
)
def test_occasions(setting, expected):
    fault = Fault(setting)
    assert [occasion for occasion in range(5) if fault.happens("lookup")] == expected


def test_a_file_says_what_happens_now(tmp_path):
    file = tmp_path / "fault"
    fault = Fault(str(file))
    assert not fault.happens("nan")
    file.write_text("nan:last=0\n")
    assert [fault.happens("nan") for _ in range(2)] == [True, False]
    file.write_text("")
    assert not fault.happens("nan")


def test_a_controller_fails():
    explorer = SimpleNamespace(_lost_seconds=float)
    controller = SimpleNamespace(choose=lambda: 1, plan=int, explorer=explorer)
    injected_faults.faulty_controller(controller, Fault("controller:first=1"))
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

    def run(runner, draft_pass):
        now_s[0] += 0.25
        return "sampled", draft_pass

    monkeypatch.setattr(injected_faults.time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(injected_faults.time, "sleep", slept.append)
    run_faultily = injected_faults.faulty_pass(run, Fault(setting))
    step = SimpleNamespace(queries=Queries.uniform(1, 0))
    for _ in range(2):
        assert run_faultily(None, step) == ("sampled", step)
    assert slept == pytest.approx(slept_s)


@pytest.mark.parametrize(
    ("setting", "unknown"),
    [("nam", "nam"), ("slow:draft=4", "draft")],
)
def test_unknown_faults_and_limits_are_refused(setting, unknown):
    with pytest.raises(ValueError, match=f"unknown '{unknown}'"):
        Fault(setting)


def say(file, text):
    """Later than before, whatever the clock's ticks are."""
    later = file.stat().st_mtime + 1 if file.exists() else 1
    file.write_text(text)
    os.utime(file, (later, later))


@pytest.mark.parametrize(
    ("controller", "chosen"),
    [
        (Controller(AcceptanceValue((0, 2, 5), 512), StepTimes()), Choice(2)),
        (Controller(LookupValue(16, 512), StepTimes()), Choice(16)),
    ],
    ids=["without lookups", "with lookups"],
)
def test_auto_makes_the_drafts_that_a_fault_demands(tmp_path, controller, chosen):
    """Until it is off; all of them by passes, without thresholds."""
    file = tmp_path / "fault"
    say(file, "")
    injected_faults.faulty_controller(controller, Fault(str(file)))
    tried = controller.choose(1, 1000)
    assert controller.plan(tried) == tried.drafts
    say(file, "nan:drafts=4")
    assert controller.choose(1, 1000) == chosen and controller.is_planned
    plan = controller.plan(chosen)
    assert plan == min(4, chosen.drafts) and not plan.lookups_alone
    for own in (plan, *plan.by_bucket):
        assert own == plan and not own.lookups_alone
        assert (own.min_acceptance, own.min_gain, own.min_expected_accepted) == (0.0, 0.0, inf)
    assert len(plan.by_bucket) == len(controller.plan(tried).by_bucket)
    say(file, "")
    assert controller.choose(1, 1000) == tried and controller.plan(tried) == tried.drafts


def test_forced_drafts_are_not_charged_as_trials(tmp_path):
    file = tmp_path / "fault"
    say(file, "")
    controller = Controller(LookupValue(16, 512), StepTimes())
    injected_faults.faulty_controller(controller, Fault(str(file)))

    def serve(steps):
        tried = 0
        for _ in range(steps):
            choice = controller.choose(4, 4000)
            budget = controller.value.mean(choice).budget
            num_passes = int(controller.plan(choice)) if budget else 0
            tried += controller.is_planned
            step = Step(4, 4000, 0.5, num_passes, budget)
            seconds = 0.005 + 0.001 * num_passes  # so that passes never pay
            controller.observe(
                [(1, 0)] * 4 if choice.drafts else [],
                choice,
                TimedStep(step, seconds),
                choice,
                RoundInfo(num_passes, controller.is_planned),
            )
        return tried

    serve(10_000)
    usual = serve(10_000)
    say(file, "nan:drafts=4")
    assert serve(2000) == 2000
    say(file, "")
    assert serve(10_000) > usual / 2 > 0
