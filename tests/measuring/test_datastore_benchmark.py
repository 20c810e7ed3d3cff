# SPDX-License-Identifier: Apache-2.0
"""The counts of benchmarks/datastore.py on texts with known results."""

import datastore as benchmark
import numpy as np
import pytest

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
    return Datastore(tmp_path / "d", VOCAB)


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
