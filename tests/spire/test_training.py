# SPDX-License-Identifier: Apache-2.0
"""Training: loss and order of the data; planner/test_train_draft.py resumes interrupted trainings."""

import json

import numpy as np
import pytest
import torch
from tiny_targets import write_target

from vllm_magicdec.spire.sequences import Sequences
from vllm_magicdec.spire.settings import SpireSettings
from vllm_magicdec.spire.target import Target, make_draft
from vllm_magicdec.spire.training import Plan, Trainer, mixed_loss

PLAN = Plan(num_steps=6, batch=4, sequence=32, learning_rate=1e-2, seed=5, bfloat16=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


def trainer_of(folder: str, plan: Plan = PLAN, **fields) -> Trainer:
    target = Target(folder, torch.float32, torch.device("cpu"))
    settings = SpireSettings.pruned("tiny", 4, None, **{"sinks": 2, "window": 8, **fields})
    tokens = np.random.default_rng(0).integers(4, 60, 2000).astype(np.uint16)
    sequences = Sequences(tokens, plan.sequence, plan.seed)
    return Trainer(make_draft(target, settings), target, sequences, plan)


def test_loss_by_hand():
    draft = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).log()
    # Logits are known up to a constant.
    target = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]]).log() + 7
    divergences = [0.25 * np.log(0.5) + 0.5 * np.log(2), 0.4 * np.log(2) + 0.6 * np.log(0.75)]
    acceptances = [0.25 + 0.25 + 0.25, 0.1 + 0.1 + 0.6]
    for omega in (0.0, 0.3, 1.0):
        loss, acceptance = mixed_loss(draft, target, omega)
        expected = omega * np.mean(divergences) + (1 - omega) * (1 - np.mean(acceptances))
        assert loss.item() == pytest.approx(expected, abs=1e-6)
        assert acceptance.item() == pytest.approx(np.mean(acceptances), abs=1e-6)


@pytest.mark.parametrize("fields", [{}, {"feedback_memory": False}, {"num_draft_steps": 3}])
def test_a_draft_learns(folder, fields):
    trainer = trainer_of(folder, Plan(40, 4, 32, 3e-3, bfloat16=False), **fields)
    losses = [trainer.train_step()[0] for _ in range(40)]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert trainer.log[-1]["step"] == 40
    assert len(trainer.evaluate()) == trainer.draft.settings.num_draft_steps


def test_every_weight_is_trained(folder):
    trainer = trainer_of(folder)
    before = {name: weight.detach().clone() for name, weight in trainer.draft.named_parameters()}
    trainer.train_step()
    assert not [n for n, weight in trainer.draft.named_parameters() if torch.equal(weight, before[n])]


def test_a_checkpoint_of_an_older_version_is_resumed(folder, tmp_path):
    path = tmp_path / "checkpoint.pt"
    trainer_of(folder).save(path)
    held = torch.load(path, weights_only=True)
    plan = json.loads(held["plan"])
    del plan["bfloat16"]
    torch.save({**held, "plan": json.dumps(plan)}, path)
    trainer_of(folder).resume(path)


def test_an_epoch_has_every_sequence_once():
    sequences = Sequences(np.arange(1000, dtype=np.uint16), 10, seed=3)
    assert (sequences.num_training, sequences.num_held_out) == (98, 2)
    epochs = [sequences.batch(98 * epoch, 98)[:, 0].tolist() for epoch in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 980, 10))
    assert [row[0, 0].item() for row in sequences.held_out()] == [980, 990]
