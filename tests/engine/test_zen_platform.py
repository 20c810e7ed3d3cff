# SPDX-License-Identifier: Apache-2.0
"""vLLM's platform for Zen, with linear layers of AMD's zentorch, or of a stub where that is missing."""

import os
import sys
from pathlib import Path

import engines
import pytest
from engines import POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens
from vllm.platforms import _is_amd_zen_cpu, current_platform

from vllm_magicdec.native.library import best_variant

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        not current_platform.is_cpu() or best_variant() is None,
        reason="needs a CPU, and the compiled kernel",
    ),
    pytest.mark.skipif(not _is_amd_zen_cpu(), reason="vLLM chooses its platform for Zen by the processor"),
]
ZENTORCH = Path(sys.prefix, "zentorch")  # by .ci/setup_venv.py
FOLDER = ZENTORCH if ZENTORCH.is_dir() else engines.HERE / "zen"


def test_output_is_plain_decodings_with_the_kernel(prompts, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=os.pathsep)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")  # says which linear layers run
    batch = {"prompts": prompts[:6], "sampling": {**GREEDY, "max_tokens": 16}}
    steps = [("generate", {"batches": [batch]}), ("describe_attention", {})]
    spec = magicdec(4, draft_kv_budget=256, **POLICIES["snapkv by token"])
    plain, run = (
        engines.run(steps, own_process=True, max_num_seqs=8, speculative_config=one) for one in (None, spec)
    )
    for log in (plain.log, run.log):  # the stub packs no weights
        assert f"using zentorch_linear_unary (prepacked={FOLDER == ZENTORCH})" in log
    answers, described = run.results
    assert described["native_layers"] == described["attention_layers"]
    assert_same_tokens(plain.results[0][0], answers[0], "Zen")
