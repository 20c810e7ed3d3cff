# SPDX-License-Identifier: Apache-2.0
"""When faults happen; tests/engine/test_injected_faults.py has what becomes of them."""

from math import inf
from types import SimpleNamespace

import pytest

from vllm_magicdec.adaptive.controller import Choice, Controller
from vllm_magicdec.adaptive.lookup_controller import LookupController
from vllm_magicdec.adaptive.step_times import StepTimes
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


def test_an_unknown_fault_is_refused():
    with pytest.raises(ValueError, match="names 'nam'; use one of batch, selection, "):
        Fault("nam", rank=0)


def test_nothing_is_wrapped_unless_a_fault_is_set(monkeypatch):
    controller = SimpleNamespace(choose=lambda: 1, plan=int)
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
    ("controller", "chosen"),
    [
        (Controller((0, 2, 5), (128, 512), StepTimes()), Choice(5, 512)),
        (LookupController(16, (128, 512), StepTimes()), Choice(16, 512)),
    ],
    ids=["without lookups", "with lookups"],
)
def test_auto_makes_the_drafts_that_a_fault_wants(monkeypatch, tmp_path, controller, chosen):
    """Until it is off; all of them by passes, and none is weighed."""
    file = tmp_path / "fault"
    file.write_text("")
    monkeypatch.setenv("VLLM_MAGICDEC_FAULT", str(file))
    inject_into_controller(controller)
    tried = controller.choose(1, 1000)
    assert tried == Choice(chosen.drafts, 128) and controller.plan(tried) == tried.drafts
    file.write_text("nan:drafts=4")
    assert controller.choose(1, 1000) == chosen and controller.is_planned
    plan = controller.plan(chosen)
    assert plan == 4 and plan.budget == 512
    assert (plan.least_chance, plan.least_gain, plan.least_promise) == (0.0, 0.0, inf)
    file.write_text("")
    assert controller.choose(1, 1000) == tried and controller.plan(tried) == tried.drafts
