# SPDX-License-Identifier: Apache-2.0
"""How the V1 adapter runs the target for a draft step; tests/engine/ does it in real engines."""

from types import SimpleNamespace

import pytest

from vllm_magicdec.vllm_api.runner_wrappers import bypass_rejection_sampler, report_finished


def test_answers_are_reported_before_the_runner_drops_them_in_one_order_on_all_ranks():
    """Also in a step without requests; the order of a set differs between processes."""
    reported: list[tuple[str, list[int]]] = []
    runner = SimpleNamespace(
        requests={name: SimpleNamespace(output_token_ids=[1, ord(name)]) for name in "gfedcba"}
    )

    def execute_model(scheduler_output, *, more):
        for name in scheduler_output.finished_req_ids:
            runner.requests.pop(name, None)
        return more

    runner.execute_model = execute_model
    report_finished(runner, lambda *finished: reported.append(finished))
    finished = ["e", "b", "never begun", "g", "a"]
    for names in (finished, reversed(finished), []):
        assert runner.execute_model(SimpleNamespace(finished_req_ids=dict.fromkeys(names)), more=3) == 3
    assert reported == [(name, [1, ord(name)]) for name in "abeg"]
    assert sorted(runner.requests) == ["c", "d", "f"]


@pytest.mark.parametrize("may_skip", [None, True, False])
def test_only_plain_steps_skip_the_rejection_sampler(may_skip):
    """vLLM takes it wherever a runner has a speculative configuration."""
    runner, had, followed = SimpleNamespace(speculative_config="ours"), [], []
    runner.execute_model = lambda scheduled: had.append(runner.speculative_config)
    skips = None if may_skip is None else lambda scheduled: may_skip
    bypass_rejection_sampler(runner, may_skip=skips, follow=followed.append)
    for drafts, num_next, num_tokens in (({"a": [1]}, 0, 2), ({}, 4, 1), ({}, 0, 1), ({}, 0, 30)):
        numbers = {"num_spec_tokens_to_schedule": num_next, "total_num_scheduled_tokens": num_tokens}
        by_request = {"scheduled_spec_decode_tokens": drafts, "num_scheduled_tokens": {"a": num_tokens}}
        runner.execute_model(SimpleNamespace(**numbers, **by_request))
    # A draft with a cache of its own needs the prompts of the last step.
    plain = {None: [2, 3], True: [2], False: []}[may_skip]
    assert [index for index, config in enumerate(had) if config is None] == plain
    assert len(followed) == len(plain)
