# SPDX-License-Identifier: Apache-2.0
"""Committed times of the attention kernel for CPUs, against the choice that they are the reason of."""

import json
import statistics
import sys

import engines
import pytest
import torch

from vllm_magicdec.attention.native_attention import is_faster

sys.path.insert(0, str(engines.HERE.parent / "benchmarks"))
from docs_tables import RESULTS
from native_attention import SHAPES

FEW_MS = 0.021  # no matter, of a layer's step


@pytest.mark.parametrize(
    "path",
    sorted(RESULTS.glob("*/native-attention*.json")),
    ids=lambda p: f"{p.parent.name} {p.stem}",
)
def test_the_faster_of_two_kernels_runs_as_they_were_measured(path):
    record = json.loads(path.read_text())
    _, best, *_ = record["rows"][0]["ms"]  # vLLM's, and the variant that runs; others
    is_fp8 = record["settings"].get("kv_cache_dtype", "auto") != "auto"
    for row in record["rows"]:
        num_heads, num_kv_heads, _ = SHAPES[row["shape"]]
        num_rows = num_heads // num_kv_heads * row["query_len"]
        lens = torch.full((row["batch"],), row["context"], dtype=torch.int32)
        vllm = row["ms"]["vllm"]
        own = of_vllm(row, best) * vllm
        if is_faster("amx" if best == "amx" else "vec", num_rows, lens, is_fp8=is_fp8):
            assert own <= 1.02 * vllm + FEW_MS, row
        else:
            assert own > 0.95 * vllm - FEW_MS, row


def of_vllm(row, variant):
    """A variant's time over that of vLLM's: of turns, whose speeds drift, the median of their ratios."""
    turns = row.get("turns", {"ms": {name: [ms] for name, ms in row["ms"].items()}})["ms"]
    return statistics.median(own / vllm for own, vllm in zip(turns[variant], turns["vllm"], strict=True))
