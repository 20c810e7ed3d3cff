# SPDX-License-Identifier: Apache-2.0
"""Drafts are sent with their step's output if they are ready by then; otherwise vLLM requests them."""

import pickle
from types import SimpleNamespace

import pytest
from test_counts import Late, step_output
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, DraftTokenIds

from vllm_magicdec.adaptive.draft_plan import DraftLists
from vllm_magicdec.adaptive.metrics import Counts, counts_of
from vllm_magicdec.vllm_api.counts import pass_on
from vllm_magicdec.vllm_api.hooks import HOOKS

ASKED = DraftTokenIds(["a"], [[5]])


def wrapped(module, name, original):
    (hook,) = (hook for hook in HOOKS if (hook.module, hook.name) == (module, name))
    return hook.wrap(hook.find_owner(), original)


def given_after_a_step(config, output, drafts, runner="vllm.v1.worker.gpu_model_runner"):
    """Drafts that the scheduler gets after a step, and whether the workers were asked for them."""
    counts = Counts()
    counts.add("draft_failures")
    worker = SimpleNamespace(vllm_config=config, take_draft_token_ids=lambda: drafts)
    worker.drafter = SimpleNamespace(counts=counts)
    sample = wrapped(runner, "sample_tokens", lambda runner, grammar_output: output)
    sent = sample(worker, None)
    if isinstance(sent, AsyncModelRunnerOutput):
        sent = sent.get_output()
    sent = pickle.loads(pickle.dumps(sent))
    pass_on(telling := SimpleNamespace(), sent, [])
    assert counts_of(telling).take().added == {"draft_failures": 1}, "counts travel beside them"
    given: list[DraftTokenIds] = []
    questions = []
    scheduler = SimpleNamespace(vllm_config=config, update_draft_token_ids=given.append)
    update = wrapped("vllm.v1.core.sched.scheduler", "update_from_output", lambda *_: {})
    update(scheduler, None, sent)
    assert not given, "not before the outputs have been handed on"
    core = SimpleNamespace(
        vllm_config=config,
        scheduler=scheduler,
        model_executor=SimpleNamespace(take_draft_token_ids=lambda: questions.append(1) or ASKED),
        check_for_draft_tokens=True,
        async_scheduling=False,
    )
    post_step = wrapped("vllm.v1.engine.core", "post_step", EngineCore.post_step.__wrapped__)
    post_step(core, True)
    first, was_asked = list(given), bool(questions)
    post_step(core, False)
    assert given == first
    post_step(core, True)
    assert given == [*first, ASKED], "each step's once"
    return first, was_asked


@pytest.mark.parametrize(
    ("runner", "output"),
    [("vllm.v1.worker.gpu_model_runner", step_output()), ("vllm.v1.worker.gpu.model_runner", Late())],
)
def test_drafts_come_with_the_output_and_no_worker_is_asked(configure_tiny, runner, output):
    drafts = DraftTokenIds(["a"], DraftLists([[3, 4]], num_passes=1))
    (got,), was_asked = given_after_a_step(configure_tiny(), output, drafts, runner)
    assert not was_asked
    assert got.req_ids == ["a"] and got.draft_token_ids == [[3, 4]]
    assert got.draft_token_ids.num_passes == 1, "what the controller learns from"


LATER = DraftTokenIds(["a"], [[3, 4]])


@pytest.mark.parametrize(
    ("where", "field", "value", "output", "drafts", "expected"),
    [
        # After a step without drafts no worker is asked.
        ("cache_config", "block_size", 32, step_output(), None, ([], False)),
        # The shared empty output carries nothing.
        ("cache_config", "block_size", 32, EMPTY_MODEL_RUNNER_OUTPUT, ASKED, ([ASKED], True)),
        # On a device drafts come later.
        ("device_config", "device_type", "cuda", step_output(), LATER, ([ASKED], True)),
    ],
)
def test_other_drafts_are_asked_for_as_vllm_does(
    configure_tiny, where, field, value, output, drafts, expected
):
    config = configure_tiny()
    setattr(getattr(config, where), field, value)
    assert given_after_a_step(config, output, drafts) == expected
    assert not any("magicdec" in name for name in vars(EMPTY_MODEL_RUNNER_OUTPUT))
