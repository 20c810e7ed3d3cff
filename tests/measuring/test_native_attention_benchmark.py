# SPDX-License-Identifier: Apache-2.0
"""The benchmark of attention on CPUs, and its committed times against the choice made of them."""

import json
import statistics
import sys

import engines
import pytest
import torch
from vllm.platforms import current_platform

from vllm_magicdec.attention.native_attention import is_faster
from vllm_magicdec.native.library import best_variant

sys.path.insert(0, str(engines.HERE.parent / "benchmarks"))
import native_attention
from docs_tables import RESULTS

FEW_MS = 0.021  # no matter, of a layer's step


@pytest.mark.skipif(best_variant() is None, reason="needs the compiled kernel")
@pytest.mark.parametrize(
    ("kv_cache_dtype", "cache_dtype", "tolerance"),
    [("auto", torch.float32, 1e-5), ("fp8_e5m2", torch.float8_e5m2, 2e-3)],
)
def test_both_sides_attend_to_the_same(kv_cache_dtype, cache_dtype, tolerance):
    current_platform.import_kernels()
    torch.manual_seed(0)
    cell = native_attention.make_cell("llama-3.1-8b", 2, 96, cache_dtype)
    contenders = native_attention.contenders_of("llama-3.1-8b", cell, 3, torch.float32, kv_cache_dtype)
    outputs = {name: attend() for name, attend in contenders.items()}
    assert len(outputs) > 1 and outputs["vllm"].abs().max() > 0.1
    for output in outputs.values():
        torch.testing.assert_close(output, outputs["vllm"], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("*/native-attention*.json")), ids=lambda p: f"{p.parent.name} {p.stem}"
)
def test_the_faster_of_two_kernels_runs_as_they_were_measured(path):
    record = json.loads(path.read_text())
    _, best, *_ = record["rows"][0]["ms"]  # vLLM's, and the variant that runs; others
    is_fp8 = record["settings"].get("kv_cache_dtype", "auto") != "auto"
    for row in record["rows"]:
        num_heads, num_kv_heads, _ = native_attention.SHAPES[row["shape"]]
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
