# SPDX-License-Identifier: Apache-2.0
"""Refusals that need a starting engine; tests/door/ has the others."""

import engines
import pytest
from draft_engines import drafting_with
from greedy import GREEDY

BENCHMARKS = engines.HERE.parent / "benchmarks"
DRAFT_MODEL = BENCHMARKS / "tiny-draft"
SPIRE = BENCHMARKS / "tiny-spire"
CONNECTOR = {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}

NO_CONNECTOR = "does not work with a KV connector"
REFUSED = {
    "connector with a draft model": (drafting_with(DRAFT_MODEL), CONNECTOR, NO_CONNECTOR),
    "connector with SPIRe": (drafting_with(SPIRE), CONNECTOR, NO_CONNECTOR),
    "SPIRe alone": (None, {"model": str(SPIRE)}, "serve its target with --spec-method magicdec"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_in_a_sentence(case):
    spec, engine, sentence = REFUSED[case]
    with pytest.raises(engines.RefusedError, match=sentence):
        engines.generate([[1, 2, 3]], GREEDY, speculative_config=spec, **engine)
