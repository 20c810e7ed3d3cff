# SPDX-License-Identifier: Apache-2.0
"""The choice of kernels against the committed times of the benchmark of CPU attention."""

import json
import statistics

import native_attention
import pytest
import torch
from docs_tables import RESULTS

from vllm_magicdec.attention.native_attention import is_faster

FEW_MS = 0.021  # that older records charge one side alone with, as they do not time layers' calls


committed = pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("*/native-attention*.json")), ids=lambda p: f"{p.parent.name} {p.stem}"
)


@committed
def test_the_variant_that_runs_was_the_fastest(path):
    rows = json.loads(path.read_text())["rows"]
    _, best, *others = rows[0]["ms"]  # the benchmark names them as `variants_here` does
    for other in others:
        assert statistics.geometric_mean(row["ms"][other] / row["ms"][best] for row in rows) > 0.98


@committed
def test_the_faster_of_two_kernels_runs_as_they_were_measured(path):
    record = json.loads(path.read_text())
    _, best, *_ = record["rows"][0]["ms"]  # vLLM's, and the variant that runs; others
    is_fp8 = record["settings"].get("kv_cache_dtype", "auto") != "auto"
    for row in record["rows"]:
        num_heads, num_kv_heads, _ = native_attention.SHAPES[row["shape"]]
        num_rows = num_heads // num_kv_heads * row["query_len"]
        lens = torch.full((row["batch"],), row["context"], dtype=torch.int32)
        of_vllm = median_ratio(row, best)
        few = 0 if "timed" in record else FEW_MS / row["ms"]["vllm"]
        if is_faster("amx" if best == "amx" else "vec", num_rows, lens, is_fp8=is_fp8):
            assert of_vllm <= 1.02 + few, row
        else:
            assert of_vllm > 0.95 - few, row


def median_ratio(row, variant):
    """A variant's time over vLLM's in the same turn: the machine's speed drifts from turn to turn."""
    turns = row.get("turns", {"ms": {name: [ms] for name, ms in row["ms"].items()}})["ms"]
    return statistics.median(own / vllm for own, vllm in zip(turns[variant], turns["vllm"], strict=True))
