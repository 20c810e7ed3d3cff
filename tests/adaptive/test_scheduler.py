# SPDX-License-Identifier: Apache-2.0
"""The steps that the scheduler reports to the controller."""

from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_magicdec.adaptive.draft_plan import DraftPlan
from vllm_magicdec.adaptive.scheduler import MagicDecScheduler
from vllm_magicdec.adaptive.step_times import Step
from vllm_magicdec.adaptive.value import PLAIN, Choice, RoundInfo

FIXED = SimpleNamespace(drafts_all=False, drafts_differ=False)  # every request has the chosen number


@pytest.mark.parametrize("drafts_come_late", [False, True])
def test_a_steps_time_covers_the_drafts_made_between_two_outputs(drafts_come_late):
    choices = [Choice(4), Choice(2), PLAIN, Choice(3)]
    scheduler = object.__new__(MagicDecScheduler)
    planned = iter(choices)
    scheduler._controller = SimpleNamespace(
        choose=lambda num_reqs, context_tokens, is_timed: next(planned),
        plan=lambda choice: DraftPlan(choice.drafts),
        is_planned=False,
        value=SimpleNamespace(budget=512),
    )
    scheduler._info, scheduler._latest, scheduler._made = RoundInfo(), PLAIN, PLAIN
    scheduler._spec, scheduler._is_own_method, scheduler._with_lookups = FIXED, True, False
    scheduler._drafts_come_late = drafts_come_late
    scheduler._in_flight, scheduler.clock = {}, lambda: 0.0
    tokens = {"num_computed_tokens": 1000, "num_prompt_tokens": 10}
    request = SimpleNamespace(request_id="a", sampling_params=None, **tokens)
    scheduler.requests = {"a": request, "b": request}
    outputs, verified = [], 0
    for choice in choices:
        drafts = {name: [-1] * verified for name in scheduler.requests if verified}
        output = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(scheduler.requests, verified + 1),
            scheduled_spec_decode_tokens=drafts,
        )
        scheduler._choose(output)
        assert output.num_spec_tokens_to_schedule == choice.drafts
        outputs.append(output)
        verified = choice.drafts
    steps = [scheduler._in_flight[id(output)].step for output in outputs]
    before = [PLAIN, *choices[:-1]]
    made = before if drafts_come_late else choices
    assert steps == [
        Step(2, 2000, previous.drafts, drafted.drafts, 512 if drafted.drafts else 0)
        for previous, drafted in zip(before, made, strict=True)
    ]


@pytest.mark.parametrize("must_not_wait", [True, False])
def test_sampled_drafts_of_a_request_that_a_step_leaves_out_are_dropped(monkeypatch, must_not_wait):
    """vLLM's V1 runner no longer has their probabilities in the next step."""
    monkeypatch.setattr(Scheduler, "_update_after_schedule", lambda *_: None)
    scheduler = object.__new__(MagicDecScheduler)
    scheduler._spec, scheduler._gave_up = FIXED, True
    scheduler._drafts_must_not_wait = must_not_wait
    scheduler.running = [SimpleNamespace(request_id=name, spec_token_ids=[1, 2]) for name in "ab"]
    scheduler._update_after_schedule(SimpleNamespace(num_scheduled_tokens={"a": 3}))
    left_out = [] if must_not_wait else [1, 2]
    assert [request.spec_token_ids for request in scheduler.running] == [[1, 2], left_out]
