# SPDX-License-Identifier: Apache-2.0
"""How the V1 adapter runs the target for a draft step; tests/engine/ does it in real engines."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_magicdec.views.round import Batch
from vllm_magicdec.vllm_api.runner_v1 import MagicDecProposer
from vllm_magicdec.vllm_api.runner_wrappers import bypass_rejection_sampler, report_finished


def test_a_history_has_the_recorded_tokens_the_accepted_drafts_and_the_sampled_token():
    """A prompt that has just become whole, and two verifications of three drafts."""
    recorded = np.array(
        [[1, 2, 3, 4, 0, 0, 0, 0], [5, 6, 90, 91, 92, 0, 0, 0], [7, 8, 9, 93, 94, 95, 0, 0]]
    )
    proposer = MagicDecProposer.__new__(MagicDecProposer)
    proposer.target_runner = SimpleNamespace(
        input_batch=SimpleNamespace(token_ids_cpu=recorded.astype(np.int32))
    )
    target_token_ids = torch.tensor([3, 4, 6, 20, 21, 22, 9, 30, 31, 32], dtype=torch.int32)
    common = SimpleNamespace(
        seq_lens=torch.tensor([4, 5, 6], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 2, 6, 10], dtype=torch.int32),
    )
    context_lens = torch.tensor([4, 4, 3])  # two drafts accepted, and none
    batch = Batch(
        req_ids=["a", "b", "c"],
        tokens=torch.tensor([40, 41, 42], dtype=torch.int32),
        block_tables=[],
        context_lens=context_lens,
        observable_lens=context_lens,
        known_lens=[4, 2, 3],
        is_prefilling=[False] * 3,
        is_first=[True, False, False],
    )
    proposer._step_common, proposer._target_token_ids = common, target_token_ids
    found = proposer._histories(batch)
    assert [history.after(0).tolist() for history in found] == [
        [1, 2, 3, 4, 40],
        [5, 6, 20, 21, 41],
        [7, 8, 9, 42],
    ]


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
    assert reported == [(name, [1, ord(name)]) for name in "abeg"] and sorted(runner.requests) == [
        "c",
        "d",
        "f",
    ]


def test_unread_drafts_are_proposed_with_certainty():
    """Wherever other requests' drafts end, and whatever a pass had sampled at these steps."""
    proposer = MagicDecProposer.__new__(MagicDecProposer)
    proposer._draft_probs = []
    proposer.note_unread(0, 1, [3])  # greedy drafts have no probabilities
    assert proposer._draft_probs == []
    sampled = torch.full((2, 3, 4), 0.25)  # two steps of three requests
    proposer._draft_probs = list(sampled.clone())
    proposer.note_unread(1, 1, [3, 0])
    probs = torch.stack(proposer._draft_probs, dim=1)
    assert probs.shape == (3, 3, 4)
    assert torch.equal(probs[[0, 2], :2], sampled[:, [0, 2]].transpose(0, 1))
    assert probs[1].tolist() == [[0.25] * 4, [0, 0, 0, 1], [1, 0, 0, 0]]
    proposer.note_unread(2, 2, [])
    assert torch.equal(torch.stack(proposer._draft_probs, dim=1), probs)


@pytest.mark.parametrize("may_skip", [None, True, False])
def test_only_plain_steps_skip_the_rejection_sampler(may_skip):
    """vLLM takes it wherever a runner has a speculative configuration."""
    runner, had, followed = SimpleNamespace(speculative_config="ours"), [], []
    runner.execute_model = lambda scheduled: had.append(runner.speculative_config)
    skips = None if may_skip is None else lambda scheduled: may_skip
    bypass_rejection_sampler(runner, may_skip=skips, follow=followed.append)
    for drafts, num_next, num_tokens in (({"a": [1]}, 0, 2), ({}, 4, 1), ({}, 0, 1), ({}, 0, 30)):
        runner.execute_model(
            SimpleNamespace(
                scheduled_spec_decode_tokens=drafts,
                num_spec_tokens_to_schedule=num_next,
                num_scheduled_tokens={"a": num_tokens},
                total_num_scheduled_tokens=num_tokens,
            )
        )
    # A draft with a cache of its own needs the prompts of the last step.
    plain = {None: [2, 3], True: [2], False: []}[may_skip]
    assert [index for index, config in enumerate(had) if config is None] == plain
    assert len(followed) == len(plain)
