# SPDX-License-Identifier: Apache-2.0
"""benchmarks/peer.py: it measures the peer's cells, and all engines of a cell decode the same batch."""

import json
import sys

import peer
import pytest

from vllm_magicdec.planner.models import MODELS


def test_all_engines_of_a_cell_decode_the_batch_of_the_first(monkeypatch, tmp_path):
    asked = []

    def measure(args, context, policy, batch, bytes_per_s):
        asked.append((context, policy, batch))
        if context == 100_000:
            return None
        numbers = {
            "tokens_per_s": 1000.0,
            "acceptance_length": 4.9,
            "step_ms": 40.0,
            "plain_floor_ms": 30.0,
        }
        return {"context": context, "policy": policy, "batch": 37, **numbers}

    out = tmp_path / "peer.json"
    monkeypatch.setattr(peer, "measure", measure)
    monkeypatch.setattr(
        peer, "make_record", lambda name, **fields: {"machine": {"copy_gb_per_s": 1}, **fields}
    )
    monkeypatch.setattr(sys, "argv", ["peer.py", "--out", str(out)])
    peer.main()
    first, *others = peer.POLICIES
    assert asked[0] == (10_000, first, 128)
    assert asked[1:3] == [(10_000, policy, 37) for policy in others]
    assert asked[3:] == [(100_000, first, 128)], "the others hold no request either"
    record = json.loads(out.read_text())
    assert len(record["rows"]) == 3 and "100000 tokens" in record["skipped"][0]


def test_the_floor_is_what_a_plain_step_reads():
    floor = peer.floor_ms(MODELS["qwen3-8b"], 32, 10_000, 4.8e12)
    kv_ms = 32 * 10_000 * 2 * 36 * 8 * 128 * 2 / 4.8e9
    weights_ms = 7.57e9 * 2 / 4.8e9  # all but the input embedding
    assert floor == pytest.approx(kv_ms + weights_ms, rel=0.01)
