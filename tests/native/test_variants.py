# SPDX-License-Identifier: Apache-2.0
"""Which variant of the kernel runs: the fastest one, as it was measured."""

import pytest
import torch

from vllm_magicdec import machine
from vllm_magicdec.native import library
from vllm_magicdec.spire.training import has_fast_bfloat16

INTEL = "vendor_id : GenuineIntel\nflags : avx512_bf16 avx512_fp16"
COOPER_LAKE = "vendor_id : GenuineIntel\nflags : avx512_bf16"
AMD = "vendor_id : AuthenticAMD\nflags : avx512_bf16 avx512_fp16"


def describe(monkeypatch, tmp_path, cpu_info):
    path = tmp_path / "cpuinfo"
    path.write_text(cpu_info)
    monkeypatch.setattr(machine, "CPU_INFO", path)


@pytest.mark.parametrize(
    ("cpu_info", "has_amx", "names"),
    [
        (INTEL, True, ["amx", "avx512", "avx512_bf16", "avx2", "portable"]),
        (INTEL, False, ["avx512", "avx512_bf16", "avx2", "portable"]),
        (COOPER_LAKE, False, ["avx512_bf16", "avx512", "avx2", "portable"]),
        (AMD, False, ["avx512_bf16", "avx512", "avx2", "portable"]),
    ],
)
def test_avx512_bf16_runs_where_it_multiplies_fast(monkeypatch, tmp_path, cpu_info, has_amx, names):
    describe(monkeypatch, tmp_path, cpu_info)
    monkeypatch.setattr(library, "runs_here", lambda variant: variant.name != "amx" or has_amx)
    assert [variant.name for variant in library.variants_here()] == names


@pytest.mark.parametrize(
    ("cpu_info", "has_amx", "is_fast"), [(INTEL, True, True), (INTEL, False, False), (AMD, False, True)]
)
def test_drafts_are_trained_in_bfloat16_where_it_multiplies_fast(
    monkeypatch, tmp_path, cpu_info, has_amx, is_fast
):
    describe(monkeypatch, tmp_path, cpu_info)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    assert has_fast_bfloat16(torch.device("cpu")) is is_fast
