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


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        (
            {"speculative_config": drafting_with(DRAFT_MODEL, draft_kv_policy="snapkv")},
            "use draft_kv_policy='streamingllm'",
        ),
        (
            {"speculative_config": drafting_with(DRAFT_MODEL, draft_kv_policy="verify-topk")},
            "use draft_kv_policy='streamingllm'",
        ),
        (
            {"speculative_config": drafting_with(DRAFT_MODEL), **CONNECTOR},
            "does not work with a KV connector",
        ),
        ({"speculative_config": drafting_with(SPIRE), **CONNECTOR}, "does not work with a KV connector"),
        ({"model": str(SPIRE)}, "serve its target with --spec-method magicdec"),
    ],
    ids=["snapkv", "verify-topk", "connector with a draft model", "connector with SPIRe", "SPIRe alone"],
)
def test_what_cannot_work_is_refused_in_a_sentence(engine, sentence):
    with pytest.raises(engines.RefusedError, match=sentence):
        engines.generate([[1, 2, 3]], GREEDY, **engine)
