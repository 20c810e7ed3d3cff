# SPDX-License-Identifier: Apache-2.0
"""`magicdec index`: documents of every format become a datastore, and errors are one sentence."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from texts import MODEL, tokenizer

from vllm_magicdec.lookup import datastore_files
from vllm_magicdec.lookup.datastore_files import Vocabulary
from vllm_magicdec.planner import documents as documents_module
from vllm_magicdec.planner.console import main

pytest.importorskip("pydivsufsort", reason="the extra 'index' is not installed")

TEXTS = ["def one():\n    return 1\n", "import sys\n\nprint(sys.path)\n", "Grüße, 世界\n"]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "made" / "datastore"


def index(*arguments: object) -> int:
    return main(["index", *map(str, arguments)])


def documents_of(path: Path) -> list[list[int]]:
    header, tokens, _ = datastore_files.read(path, 2**20)
    ends = np.flatnonzero(tokens == header.separator)
    return [part[part != header.separator].tolist() for part in np.split(tokens, ends + 1)[:-1]]


def encoded(texts: list[str]) -> list[list[int]]:
    return [tokenizer().encode(text, add_special_tokens=False).ids for text in texts]


def write_parquet(file: Path, **columns: list) -> None:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), file)


def write_json_lines(file: Path, records: list) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records) + "\n", encoding="utf-8")


def test_every_format_gives_the_same_documents(tmp_path, out, capsys):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    write_json_lines(tmp_path / "some.jsonl", [{"text": text, "more": 1} for text in TEXTS])
    files = [*(tmp_path / f"{number}.txt" for number in range(3)), tmp_path / "some.jsonl"]
    assert index(*files, "--model", MODEL, "--out", out) == 0
    assert documents_of(out) == encoded(TEXTS * 2)
    header, _, _ = datastore_files.read(out, 2**20)
    vocabulary = Vocabulary.of(tokenizer().get_vocab())
    assert (header.vocab_size, header.vocab_fingerprint) == (vocabulary.size, vocabulary.fingerprint)
    said = capsys.readouterr().out
    size = sum(file.stat().st_size for file in out.iterdir())
    assert f"wrote {out}: 6 documents of 4 files, {header.num_tokens:,} tokens, {size / 1e6:.1f} MB" in said
    assert re.search(r"in \d+\.\d s", said)


def test_parquet_is_read_by_column(tmp_path, out):
    write_parquet(tmp_path / "some.parquet", body=[*TEXTS, None, ""], other=[1, 2, 3, 4, 5])
    assert index(tmp_path / "some.parquet", "--field", "body", "--model", MODEL, "--out", out) == 0
    assert documents_of(out) == encoded(TEXTS)


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"body": ["a"]}, "has no column 'text', it has body"),
        ({"text": [1]}, "column 'text' of .* is no text"),
    ],
)
def test_a_parquet_file_without_texts_is_named(tmp_path, out, capsys, columns, sentence):
    write_parquet(tmp_path / "some.parquet", **columns)
    assert index(tmp_path / "some.parquet", "--model", MODEL, "--out", out) == 2
    assert re.search(sentence, capsys.readouterr().err)


def test_matching_files_of_folders_are_read(tmp_path, out):
    for name, text in zip(["a/b/1.py", "a/2.py", "a/3.txt"], TEXTS, strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert index(tmp_path / "a", "--model", MODEL, "--out", out, "--include", "*.py") == 0
    assert documents_of(out) == encoded([TEXTS[1], TEXTS[0]])
    other = out.with_name("other")
    assert index(tmp_path / "a", tmp_path / "a" / "2.py", "--model", MODEL, "--out", other) == 0
    assert documents_of(other) == encoded([TEXTS[2], TEXTS[1]])


def test_a_long_document_stays_one(tmp_path, out, monkeypatch):
    """Long documents are tokenized in pieces, which end after line breaks if there are any."""
    monkeypatch.setattr(documents_module, "_PIECE_CHARACTERS", 50)
    monkeypatch.setattr(documents_module, "_BATCH_CHARACTERS", 70)
    texts = ["x = 1\n" * 40, TEXTS[0], "y" * 130, TEXTS[1]]
    write_json_lines(tmp_path / "some.jsonl", [{"text": text} for text in texts])
    assert index(tmp_path / "some.jsonl", "--model", MODEL, "--out", out) == 0
    documents = documents_of(out)
    assert [tokenizer().decode(document) for document in documents] == texts
    assert documents[1] == encoded(TEXTS[:1])[0]


def not_parquet(folder: Path) -> list[object]:
    pytest.importorskip("pyarrow")
    (folder / "a.parquet").write_text("text")
    return [folder / "a.parquet"]


def written(text: str, name: str = "a.txt"):
    def write(folder: Path) -> list[object]:
        (folder / name).write_text(text)
        return [folder / name]

    return write


WRONG = {
    "a file that is not there": (lambda folder: [folder / "no.txt"], "there is no .*no.txt; name files"),
    "a folder without documents": (lambda folder: [folder], "no file matches .*with --include"),
    "no JSON": (written('{"text": "a"}\nword', "a.jsonl"), "line 2 of .*a.jsonl is no JSON"),
    "JSON without text": (
        written('{"text": "a"}\n{"body": "b"}', "a.jsonl"),
        "line 2 of .* has no text 'text'; name the field",
    ),
    "JSON of another kind": (written('["text"]', "a.jsonl"), "line 1 of .* has no text 'text'"),
    "no Parquet": (not_parquet, "a.parquet is no Parquet file"),
    "next to no text": (written("a"), "the documents have no two tokens in a row; name other files"),
    "a model without a tokenizer": (
        lambda folder: [*written("some text")(folder), "--model", folder],
        "has no tokenizer that can be loaded",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_unreadable_documents_are_refused_in_one_sentence(case, tmp_path, out, capsys):
    make, sentence = WRONG[case]
    assert index("--model", MODEL, "--out", out, *make(tmp_path)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and re.search(sentence, error)
    assert not out.exists()


def test_nothing_is_overwritten(tmp_path, out, capsys):
    out.mkdir(parents=True)
    assert index(tmp_path, "--model", MODEL, "--out", out) == 2
    assert f"error: {out} exists already; remove it" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["pydivsufsort", "pyarrow.parquet"])
def test_a_missing_package_is_named(missing, monkeypatch, tmp_path, out, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    (tmp_path / "a.parquet").write_text("text")
    assert index(tmp_path / "a.parquet", "--model", MODEL, "--out", out) == 2
    package = missing.split(".")[0]
    assert (
        f"error: this needs {package}; try: pip install 'vllm-magicdec[index]'\n" in capsys.readouterr().err
    )
