# SPDX-License-Identifier: Apache-2.0
"""The two forms of a SPIRe draft agree with each other and with the equations in float64."""

from pathlib import Path

import pytest
import torch
from spire_drafts import SpireReference
from tiny_targets import write_target

from benchmarks.common.trained_drafts import DraftState, load
from vllm_magicdec.spire.files import save
from vllm_magicdec.spire.settings import SpireError, SpireSettings
from vllm_magicdec.spire.target import Target, make_draft

LENGTH = 61
CASES = {
    "as in the paper": dict(window=9),
    "one pass": dict(window=9, num_draft_steps=1),
    "no sinks": dict(window=6, sinks=0),
    "window beyond the sequence": dict(window=200),
    "without feedback memory": dict(window=9, feedback_memory=False),
    "more sinks than a chunk": dict(window=5, sinks=11, num_draft_steps=5),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder):
    return Target(folder, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def read(target):
    """A batch of tokens and the target's activations."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(2048, (2, LENGTH), generator=generator)
    activations, _ = target.run(tokens, (2, 3, 4))
    return tokens, activations


def draft_of(target, num_layers=2, **fields):
    torch.manual_seed(3)
    draft = make_draft(target, SpireSettings.pruned("tiny", 4, num_layers, **{"sinks": 3, **fields}))
    if draft.settings.feedback_memory:
        torch.nn.init.normal_(draft.model.memory_logits)
    return draft.eval()


@torch.no_grad()
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_training_and_serving_match_the_equations(
    folder, target, read, fields, first, tmp_path, monkeypatch
):
    # Several blocks of chunks, the last one incomplete.
    monkeypatch.setattr("vllm_magicdec.spire.model._BLOCK_TOKENS", 20)
    tokens, activations = read
    draft = draft_of(target, **fields)
    k = draft.settings.num_draft_steps
    save(draft, tmp_path, torch.float32)
    reference = SpireReference(tmp_path, Path(folder))
    trained = draft(tokens, activations, first)
    assert trained.shape[:3] == (k, 2, (LENGTH - first) // k)
    for row in range(2):
        state = DraftState(draft, LENGTH)
        for chunk in range(trained.shape[2]):
            begin = first + chunk * k
            # Verified tokens replace the previous chunk's drafts.
            state.verify(activations[row, state.num_verified : begin])
            served = torch.stack([state.step(int(token)) for token in tokens[row, begin : begin + k]])
            truth = reference.logits(
                activations[row, :begin].double(), tokens[row, begin : begin + k].tolist()
            )
            scale = truth.abs().max()
            assert (served - truth).abs().max() <= 1e-5 * scale
            assert (trained[:, row, chunk] - truth).abs().max() <= 1e-5 * scale
            assert (trained[:, row, chunk] - served).abs().max() <= 1e-5 * scale


@torch.no_grad()
def test_a_draft_of_all_layers_over_everything_is_its_target(target, read):
    """Without feedback memory, and with the embedding as a verified token's first activation."""
    tokens, _ = read
    draft = draft_of(target, num_layers=4, window=200, feedback_memory=False)
    activations, logits = target.run(tokens, draft.settings.aux_layers)
    drafted = draft(tokens, activations)
    for step, each in enumerate(drafted):
        torch.testing.assert_close(
            each, logits[:, step : step + 4 * each.shape[1] : 4], rtol=1e-4, atol=1e-4
        )


def test_the_draft_begins_with_the_last_blocks(target):
    draft = draft_of(target)
    theirs = target.model.state_dict()
    for name, weight in draft.state_dict().items():
        name = name.replace("layers.1.", "layers.3.").replace("layers.0.", "layers.2.")
        assert name == "model.memory_logits" or torch.equal(weight, theirs[name])
    assert draft.settings.aux_layers == (2, 3, 4)
    assert SpireSettings.pruned("x", 6, None).target_layers == (4, 5)
    assert SpireSettings.pruned("x", 32, None).target_layers == tuple(range(24, 32))


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_draft_is_the_same(tmp_path, tied, read):
    target = Target(
        write_target(tmp_path / "t", tie_word_embeddings=tied), torch.float32, torch.device("cpu")
    )
    draft = draft_of(target)
    save(draft, tmp_path, torch.float32)
    again = load(tmp_path)
    tokens, activations = read
    assert torch.equal(again(tokens, activations), draft(tokens, activations))
    assert again.settings == draft.settings
    save(draft, tmp_path)
    assert load(tmp_path, torch.bfloat16).model.memory_logits.equal(draft.model.memory_logits)


def test_a_folder_without_a_draft_is_refused(tmp_path, target):
    with pytest.raises(SpireError, match="is no SPIRe draft; train one with"):
        load(tmp_path)
    with pytest.raises(SpireError, match="give a number from 1 to 4"):
        SpireSettings.pruned("x", 4, 5)
    with pytest.raises(SpireError, match="version 1"):
        SpireSettings.of({"spire": {"version": 2}})
