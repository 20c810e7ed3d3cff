# SPDX-License-Identifier: Apache-2.0
"""Datastores against a naive reference, their files, and damaged ones."""

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import likeliest_in_documents

from vllm_magicdec.errors import MagicDecConfigError
from vllm_magicdec.lookup import datastore_files
from vllm_magicdec.lookup.context_index import MAX_MATCH
from vllm_magicdec.lookup.datastore import MAX_SAMPLES, MIN_MATCH, Datastore
from vllm_magicdec.lookup.datastore_files import UnfitDocumentsError, Vocabulary

pytest.importorskip("pydivsufsort", reason="the extra 'index' is not installed")

FILES = ("header.json", "tokens.npy", "suffix_array.npy")


def write(path: Path, documents: list[list[int]], vocab_size: int = 100) -> datastore_files.Header:
    arrays = (np.array(document, dtype=np.int64) for document in documents)
    return datastore_files.write(path, arrays, Vocabulary(vocab_size, "abc"), "a-model")


def found(store: Datastore, latest: list[int], most: int) -> tuple[int, list[int], list[float]]:
    match = store.look_up(np.array(latest, dtype=np.int32), most)
    return match.length, match.tokens, match.shares


@pytest.fixture
def path(tmp_path):
    return tmp_path / "datastore"


# Few different tokens, so that there are many matches, at both ends of vocabularies of 1, 2 and 4 bytes.
@settings(max_examples=300, deadline=None)
@given(st.sampled_from([2, 4, 30]), st.sampled_from([30, 255, 256, 65535, 65536, 151_000]), st.data())
def test_continuations_equal_the_references(num_tokens, vocab_size, data):
    token = st.integers(0, num_tokens - 1).map(lambda n: n if n % 2 else vocab_size - 1 - n)
    text = st.lists(token, max_size=60)
    documents = [*data.draw(st.lists(text, max_size=6)), [0, 0]]
    with tempfile.TemporaryDirectory() as folder:
        header = write(Path(folder, "d"), documents, vocab_size)
        store = Datastore(Path(folder, "d"), vocab_size)
        assert header.num_documents == sum(map(bool, documents))
        for latest in data.draw(st.lists(text, min_size=1, max_size=8)):
            most = data.draw(st.integers(1, 12))
            expected = likeliest_in_documents(
                documents, latest, most, min_match=MIN_MATCH, max_match=MAX_MATCH
            )
            assert found(store, latest, most) == expected
            more = store.look_up(np.array(latest, dtype=np.int32), most + 5).first(most)
            assert (more.length, more.tokens, more.shares) == expected


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_matches_in_a_text_of_phrases_equal_the_references(data):
    phrases = data.draw(
        st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=40), min_size=1, max_size=4)
    )
    made_of = st.lists(st.sampled_from(phrases), min_size=1, max_size=5)
    documents = [list(itertools.chain(*parts)) for parts in data.draw(st.lists(made_of, max_size=4))]
    documents.append([1, 2, 3])
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "d"), documents, 10)
        store = Datastore(Path(folder, "d"), 10)
        for document in documents:
            for end in range(len(document) + 1):
                latest, of_store = document[:end], found(store, document[:end], 5)
                reference = likeliest_in_documents(
                    documents, latest, 5, min_match=MIN_MATCH, max_match=MAX_MATCH
                )
                length = of_store[0]
                followed = (text[n - length : n] for text in documents for n in range(length, len(text)))
                if list(followed).count(document[end - length : end]) <= MAX_SAMPLES:
                    assert of_store == reference
                assert of_store[0] == reference[0]


@pytest.mark.parametrize("vocab_size", [255, 256, 65536])
def test_ids_outside_of_the_vocabulary_match_nothing(path, vocab_size):
    """Nor does the separator, which is an id of a model with a padded vocabulary."""
    write(path, [[1, 2, 3], [1, 2, 3]], vocab_size)
    store = Datastore(path, vocab_size + 64)
    for strange in (-1, vocab_size, vocab_size + 1, 2**31 - 1):
        assert found(store, [3, strange], 3) == found(store, [strange], 3) == (0, [], [])
        assert found(store, [strange, 1, 2], 3) == (2, [3], [1.0])


def test_many_occurrences_are_sampled(path):
    rng = np.random.default_rng(0)
    nexts = rng.choice([3, 4, 5], size=10_000, p=[0.2, 0.7, 0.1])
    documents = [[int(rng.integers(50)), 1, 2, int(following), 6] for following in nexts]
    write(path, documents)
    length, tokens, shares = found(Datastore(path, 100), [1, 2], 3)
    assert (length, tokens) == (2, [4, 6])
    assert shares == [pytest.approx(0.7, abs=3 * (0.7 * 0.3 / MAX_SAMPLES) ** 0.5), 1.0]


@pytest.mark.parametrize(
    ("vocab_size", "token_bytes"), [(255, 1), (256, 2), (65535, 2), (65536, 4), (151_936, 4)]
)
def test_tokens_have_the_smallest_type(path, vocab_size, token_bytes):
    header = write(path, [list(range(200)) * 20] * 3, vocab_size)
    assert header.num_tokens == 3 * 4001
    size = sum((path / name).stat().st_size for name in FILES)
    assert size <= header.num_tokens * (token_bytes + 4) + 1000
    assert header == Datastore(path, vocab_size).header


def test_a_failed_datastore_leaves_no_files(path):
    for documents, sentence in (
        ([], "no two tokens"),
        ([[1], [2]], "no two tokens"),
        ([[1, 100]], "not below"),
    ):
        with pytest.raises(UnfitDocumentsError, match=sentence):
            write(path, documents)
    assert list(path.parent.iterdir()) == []
    write(path, [[1, 2, 3]])
    with pytest.raises(FileExistsError):
        write(path, [[1, 2, 3]])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def set_field(**fields):
    def change(path: Path) -> None:
        header = json.loads((path / "header.json").read_text())
        (path / "header.json").write_text(json.dumps({**header, **fields}))

    return change


DAMAGES = {
    "no header": (lambda path: (path / "header.json").unlink(), "is no datastore"),
    "another version": (set_field(version=2), "version 2, and this plugin reads version 1"),
    "another length": (set_field(num_tokens=7), "tokens.npy is not what its header says"),
    "tokens cut": (lambda path: cut(path / "tokens.npy"), "tokens.npy is cut or no array"),
    "array of objects": (
        lambda path: np.save(path / "suffix_array.npy", np.array([{}]), allow_pickle=True),
        "suffix_array.npy is cut or no array",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported_in_one_sentence(path, damage):
    write(path, [[1, 2, 3, 4]])
    change, sentence = DAMAGES[damage]
    change(path)
    with pytest.raises(MagicDecConfigError, match=sentence) as raised:
        Datastore(path, 100_000)
    assert str(path) in str(raised.value) and "magicdec index FILES" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_that_is_cut_while_in_use_fails_lookups_not_the_process(path, name):
    """Reading a mapped page that its file has lost would be a SIGBUS."""
    write(path, [list(range(100)) * 1000])
    store = Datastore(path, 100)
    assert found(store, [5, 6], 2) == (2, [7, 8], [1.0, 1.0])
    with (path / name).open("r+b") as file:
        file.truncate(100)
    with pytest.raises(OSError, match=f"{name} was cut"):
        found(store, [5, 6], 2)


def test_another_tokenizer_is_refused(path):
    ids = {"a": 0, "b": 1, "c": 3}
    vocabulary = Vocabulary.of(ids)
    datastore_files.write(path, [np.array([0, 1, 3])], vocabulary, "a-model")
    assert Datastore(path, 4, Vocabulary.of(dict(reversed(ids.items())))).header.vocab_size == 4
    assert Datastore(path, 64).header.model == "a-model"
    for vocab_size, other in ((4, {"a": 1, "b": 0, "c": 3}), (5, {**ids, "d": 4}), (3, None)):
        with pytest.raises(MagicDecConfigError, match="another tokenizer, that of 'a-model'"):
            Datastore(path, vocab_size, Vocabulary.of(other) if other else None)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_random_positions_do_not_crash_the_process(data):
    """Damage that sizes do not show: any result is fine, but no read beyond the files."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "d")
        header = write(path, [[1, 2, 3, 1, 2, 3, 1, 2]], 10)
        place = st.one_of(st.integers(0, 9), st.integers(0, 2**32 - 1))
        places = data.draw(st.lists(place, min_size=header.num_places, max_size=header.num_places))
        tokens = data.draw(st.lists(st.integers(0, 255), min_size=9, max_size=9))
        np.save(path / "suffix_array.npy", np.array(places, dtype=np.uint32))
        np.save(path / "tokens.npy", np.array(tokens, dtype=np.uint8))
        store = Datastore(path, 10)
        for latest in ([1, 2], [3, 1, 2], tokens):
            assert len(found(store, latest, 4)[1]) <= 4


def test_writing_does_not_import_numba():
    """vLLM's CPU worker does not start after such an import."""
    code = (
        "import sys, vllm_magicdec.lookup.datastore_files, pydivsufsort; sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
