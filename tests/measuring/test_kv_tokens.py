# SPDX-License-Identifier: Apache-2.0
"""The table of `kv_tokens.py`, and its draft with a window."""

import json
import sys
from pathlib import Path

import engines

sys.path.insert(0, str(engines.HERE.parent / "benchmarks"))
import kv_tokens
from common.tables import markdown


def test_the_table_says_what_is_left_of_plain_vllms_room():
    full, window = ({"layers": n, "spec": spec} for n, spec in ((8, "FullAttentionSpec"), (2, "Sliding")))
    found = {
        "plain": (1000, [full]),
        "draft_model": (750, [full]),
        "ring": (950, [full, window]),
        "window": (900, [window] * 4),
    }
    record = {
        "engine": {"model": "tiny-llama"},
        "window": 512,
        "kv_cache_gib": 1,
        "engines": {name: {"tokens": tokens, "groups": groups} for name, (tokens, groups) in found.items()},
    }
    assert markdown(kv_tokens.table_of(record)).splitlines()[-4:] == [
        "| none | 1,000 | 1.000 | 8 |",
        "| `draft_model` | 750 | 0.750 | 8 |",
        "| `magicdec`, a ring for 512 | 950 | 0.950 | 8 + 2 |",
        "| `draft_model`, layers with a window of 512 | 900 | 0.900 | 2 + 2 + 2 + 2 |",
    ]


def test_a_copy_with_a_window_has_the_same_weights():
    with kv_tokens.with_window(kv_tokens.TINY_DRAFT, 256) as copy:
        config = json.loads(Path(copy, "config.json").read_text())
        assert config["sliding_window"] == 256 and config["architectures"] == ["MistralForCausalLM"]
        own = (kv_tokens.TINY_DRAFT / "model.safetensors").read_bytes()
        assert Path(copy, "model.safetensors").read_bytes() == own
