# SPDX-License-Identifier: Apache-2.0
"""A SPIRe draft follows its equations, losslessly; here it is the target's last blocks with noise."""

import engines
import pytest
import spire_drafts
import texts
import torch
from draft_engines import TINY_SPIRE, V2_ENGINE, WHOLE_LEN, drafting_with, on_v2
from engines import MODEL
from greedy import GREEDY, assert_same_tokens

pytestmark = pytest.mark.extended


@pytest.mark.parametrize(
    ("num_layers", "feedback_memory", "v2", "number", "min_rounds"),
    # With `auto`, lookups are verified without the draft, which then drafts token by token.
    [(2, True, False, 4, 30), (2, False, True, 4, 30), (6, True, True, 4, 30), (2, True, False, "auto", 1)],
)
def test_drafts_follow_the_equations(tmp_path, num_layers, feedback_memory, v2, number, min_rounds):
    """Steps after the first use memory of drafted tokens; contexts are within and beyond the window."""
    view = {"sinks": 3, "window": 37, "noise": 0.05, "feedback_memory": feedback_memory}
    draft = spire_drafts.write(tmp_path / "draft", MODEL, num_layers=num_layers, **view)
    path = tmp_path / "recorded.pt"
    sampling = {**GREEDY, "max_tokens": 24 if number == "auto" else 14}
    batch = {"prompts": texts.prompts(4, 4, 150, seed=3), "sampling": sampling}
    run = engines.run(
        [("generate_and_note_spire_drafts", {"batches": [batch], "path": str(path)})],
        v2=v2,
        max_model_len=WHOLE_LEN,
        max_num_batched_tokens=64,
        max_num_seqs=3,
        speculative_config=drafting_with(draft, number, draft_lookup="on" if number == "auto" else "off"),
    )
    assert run.draft_failures == 0 and run.v2_runner == v2
    reference, recorded = spire_drafts.SpireReference(draft, MODEL), torch.load(path)
    assert len(recorded) >= min_rounds
    activations: dict[str, torch.Tensor] = {}
    # The longest first: its activations serve the request's earlier rounds.
    for own in sorted(recorded, key=lambda own: -len(own["verified"])):
        verified = own["verified"]
        if own["request"] not in activations:
            activations[own["request"]] = reference.activations(verified)
        truth = reference.logits(activations[own["request"]][: len(verified)], own["tokens"])
        difference = (truth - torch.stack(own["logits"])).abs().max() / truth.abs().max()
        assert difference < 1e-5, (own["request"], len(verified), len(own["tokens"]), float(difference))


@pytest.mark.parametrize(("v2", "number"), [(False, "auto"), (True, 4)])
def test_failed_memory_loses_no_request(prompts, plain, v2, number):
    batch, expected = on_v2(prompts, plain)
    run = engines.run(
        [("generate_with_broken_memory", {"batches": [batch]})],
        **{**V2_ENGINE, "v2": v2},
        strict=False,
        speculative_config=drafting_with(TINY_SPIRE, number),
    )
    assert_same_tokens(expected, run.results[0][0], "broken memory")
    assert run.v2_runner == v2 and run.draft_failures > 0


def test_the_shipped_draft_compiles_and_runs_in_separate_processes(prompts, plain):
    """As users run it: a trained draft, compiled, with separate processes for engine core and worker."""
    as_users = {"own_process": True, "enforce_eager": False, "max_num_seqs": 8}
    run = engines.generate(prompts, GREEDY, speculative_config=drafting_with(TINY_SPIRE), **as_users)
    assert_same_tokens(plain, run.results[0][0], "as users run it")
    assert run.draft_failures == 0 and run.accepted > 0.2 * run.drafted
    assert "256 tokens (4 sinks, the 252 latest)" in run.log


def test_the_engine_starts_without_weights(prompts):
    """Benchmarks that measure only speed start it this way."""
    engine = {"load_format": "dummy", "speculative_config": drafting_with(TINY_SPIRE)}
    run = engines.generate(prompts[:2], {**GREEDY, "max_tokens": 4}, **engine)
    assert run.draft_failures == 0 and run.drafted > 0
