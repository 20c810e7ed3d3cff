# SPDX-License-Identifier: Apache-2.0
"""The counts of benchmarks/datastore.py on texts with known results."""

import json
import sys

import datastore as benchmark
import numpy as np
import pytest
from common.tables import markdown

from vllm_magicdec.lookup import datastore_files
from vllm_magicdec.lookup.calibration import Calibration
from vllm_magicdec.lookup.datastore import Datastore
from vllm_magicdec.lookup.datastore_files import Vocabulary

pytest.importorskip("pydivsufsort", reason="the extra 'index' is not installed")

VOCAB = 1000
KNOWN = list(range(500))  # in the datastore


@pytest.fixture
def store(tmp_path):
    datastore_files.write(tmp_path / "d", [np.array(KNOWN)], Vocabulary(VOCAB, ""), "")
    return Datastore.open(tmp_path / "d", VOCAB)


def walk(text, context, sources, store):
    return benchmark.walk(text, context, 4, sources, store, [Calibration() for _ in sources])


def test_every_token_is_counted_once_and_goes_to_the_source_that_knew_it(store):
    # The context ends within 50 tokens that the datastore knows, and then comes how it began.
    text = [*range(900, 915), *KNOWN[:50], *range(900, 915)]
    for sources, known in ((("context",), 12), (("datastore",), 36), (("context", "datastore"), 48)):
        done = walk(text, 20, sources, store)
        # The last lookup may be right to the end, and has no token after that.
        assert done.lookups + done.right - (len(text) - 20) in (0, 1)
        assert done.right == pytest.approx(known, abs=6)
        assert len(done.times_us) == done.lookups
    assert walk(text, 20, ("context",), store).from_datastore == 0


def test_without_correct_tokens_there_is_one_lookup_per_token(store):
    text = [*range(900, 980)]
    done = walk(text, 30, ("context", "datastore"), store)
    assert (done.lookups, done.right, done.offered) == (50, 0, 0)


def test_a_small_run_writes_what_its_table_shows(tmp_path, monkeypatch):
    out = tmp_path / "result.json"
    options = "--megabytes 0.2 --context 300 --tokens 60 --excerpts 3".split()
    monkeypatch.setattr(sys, "argv", ["datastore.py", *options, "--out", str(out)])
    monkeypatch.setattr(benchmark, "make_record", lambda name, **fields: {"benchmark": name, **fields})
    benchmark.main()
    record = json.loads(out.read_text())
    assert [cell["sources"] for cell in record["cells"]] == list(benchmark.SOURCES)
    rows = markdown(benchmark.table_of(record)).splitlines()
    assert len(rows) == 2 + len(benchmark.SOURCES)
    built = record["build"]["bytes"]
    header = record["datastore"]
    assert built["tokens.npy"] == pytest.approx(2 * header["num_tokens"], abs=200)
    assert built["suffix_array.npy"] == pytest.approx(4 * header["num_places"], abs=200)
    walks = [one for cell in record["cells"] for one in cell["walks"]]
    assert len(walks) == 9 and all(one["lookups"] + one["right"] - 60 in (0, 1) for one in walks)
