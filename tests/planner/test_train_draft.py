# SPDX-License-Identifier: Apache-2.0
"""`magicdec train-draft`: from documents to a folder, again after an interruption, and what it refuses."""

import json
import signal
import sys
from pathlib import Path

import pytest
import torch
from texts import MODEL

from benchmarks.common.trained_drafts import load

sys.path.insert(0, str(Path(__file__).parents[1] / "spire"))
from tiny_targets import write_target

from vllm_magicdec.planner.console import main
from vllm_magicdec.spire import training

TEXT = "def one():\n    return 1\n\n\nclass Two:\n    def __init__(self):\n        self.three = 3\n" * 12


OPTIONS = ("--sequence", 32, "--batch", 2, "--steps", 6, "--window", 8, "--float32")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def data(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    return [tmp_path / "a.txt", tmp_path / "b.jsonl"]


def train(target: str, data: list, out: Path, *more: object) -> int:
    options = ["--model", target, "--data", *data, "--out", out, *OPTIONS, *more]
    return main(["train-draft", *map(str, options)])


def test_a_folder_with_a_draft_comes_out(target, data, tmp_path, capsys):
    out = tmp_path / "draft"
    assert train(target, data, out) == 0
    assert "step 6 of 6" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["MagicDecSpireForCausalLM"]
    assert (config["model_type"], config["num_hidden_layers"], config["hidden_size"]) == ("llama", 1, 32)
    assert config["eagle_aux_hidden_state_layer_ids"] == [3, 4]
    assert config["spire"]["target_layers"] == [3] and config["spire"]["window"] == 8
    assert load(out).settings.target_num_hidden_layers == 4
    assert not (out / "training").exists() and (out / "tokenizer.json").exists()
    log = json.loads((out / "training_log.json").read_text())
    assert len(log["held_out_acceptance"]) == 4 and log["log"][-1]["step"] == 6
    card = (out / "README.md").read_text()
    assert "4 sinks and a window of 8 tokens" in card and "a.txt, b.jsonl" in card
    assert train(target, data, out) == 2
    assert "holds a model already; remove it" in capsys.readouterr().err


def test_the_same_command_resumes(target, data, tmp_path, capsys, monkeypatch):
    assert train(target, data, tmp_path / "whole") == 0
    step = training.Trainer.train_step

    def interrupted(self):
        figures = step(self)
        if self.step == 3:
            signal.raise_signal(signal.SIGINT)
        return figures

    out = tmp_path / "draft"
    with monkeypatch.context() as patched:
        patched.setattr(training.Trainer, "train_step", interrupted)
        assert train(target, data, out) == 0
    assert "stopped at step 3 of 6; the same command resumes it" in capsys.readouterr().out
    assert train(target, data, out, "--omega", 0.7) == 2
    assert "a training with other options" in capsys.readouterr().err
    assert train(target, data, out, "--no-float32") == 2
    assert "another default of --float32" in capsys.readouterr().err
    assert train(target, data, out, "--no-feedback-memory") == 2
    assert "a training with other options" in capsys.readouterr().err
    assert train(target, data[:1], out) == 2
    assert "a training on other data" in capsys.readouterr().err
    assert train(target, data, out) == 0
    assert "resumed at step 3 of 6" in capsys.readouterr().out
    whole = load(tmp_path / "whole").state_dict()
    assert all(torch.equal(weight, whole[name]) for name, weight in load(out).state_dict().items())


@pytest.mark.parametrize(
    "stage",
    [
        "vllm_magicdec.spire.files.save",
        "vllm_magicdec.spire.training.Trainer.evaluate",
        "vllm_magicdec.spire.files.make_card",
    ],
)
def test_an_interruption_after_the_last_step_loses_nothing(
    target, data, tmp_path, capsys, monkeypatch, stage
):
    def interrupted(*_):
        raise KeyboardInterrupt

    out = tmp_path / "draft"
    with monkeypatch.context() as patched:
        patched.setattr(stage, interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(target, data, out)
    assert not (out / "config.json").exists()
    monkeypatch.setattr(training.Trainer, "train_step", interrupted)
    assert train(target, data, out) == 0
    assert "resumed at step 6 of 6" in capsys.readouterr().out
    assert load(out).settings.num_layers == 1 and not (out / "training").exists()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--omega", 2], "--omega has to be from 0 to 1, not 2.0"),
        (["--batch", 0], "--batch has to be above 0, not 0"),
        (["--layers", 9], "--layers 9 cannot be taken from a target of 4; give a number from 1 to 4"),
        (["--window", 2], "window has to be at least 4, not 2"),
        (["--sequence", 4], "--sequence has to be at least 8, two rounds of drafts"),
        (["--sequence", 4000], "--sequence has to be at most 512, the target's length"),
        (["--sequence", 500], "fewer than two sequences of 500; give more data, or a smaller --sequence"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(target, data, tmp_path, capsys, more, sentence):
    assert train(target, data[:1], tmp_path / "draft", *more) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_several_processes_are_refused(target, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train(target, data, tmp_path / "draft") == 2
    assert "train-draft uses one device; start it without torchrun" in capsys.readouterr().err


def test_other_targets_are_refused(data, tmp_path, capsys):
    assert train(str(tmp_path / "nowhere"), data, tmp_path / "draft") == 2
    assert "nowhere cannot be loaded" in capsys.readouterr().err
    folder = tmp_path / "other"
    folder.mkdir()
    config = json.loads((Path(MODEL) / "config.json").read_text())
    for fields, sentence in (
        ({"model_type": "opt"}, "has the type opt; name a Llama"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised; name the original model"),
        ({}, "cannot be loaded: Error no file named model.safetensors"),
        ({"architectures": config["architectures"]}, "cannot be loaded: Error while deserializing header"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **fields}))
        if "architectures" in fields:
            (folder / "model.safetensors").write_bytes(b"")
        assert train(str(folder), data, tmp_path / "draft") == 2
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1


@pytest.mark.parametrize("file", ["draft", "draft/training"])
def test_an_out_that_cannot_be_written_is_refused_first(data, tmp_path, capsys, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert train("nowhere", data, tmp_path / "draft") == 2
    error = capsys.readouterr().err
    assert "draft cannot be written: " in error and error.count("\n") == 1
