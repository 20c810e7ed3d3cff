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


@pytest.fixture(scope="module")
def generate(prompts):
    """A function that runs an engine with a few prompts on that platform and returns its results."""
    batch = {"prompts": prompts[:6], "sampling": {**GREEDY, "max_tokens": 16}}

    def on_zen(*more_steps, **engine):
        run = engines.run(
            [("generate", {"batches": [batch]}), *more_steps], own_process=True, max_num_seqs=8, **engine
        )
        # The stub packs no weights.
        assert f"using zentorch_linear_unary (prepacked={FOLDER == ZENTORCH})" in run.log
        return run.results

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(FOLDER), prepend=os.pathsep)
        patch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")  # says which linear layers run
        yield on_zen


def test_output_is_plain_decodings_with_the_kernel(generate):
    config = magicdec(4, draft_kv_budget=256, **POLICIES["snapkv by token"])
    answers, described = generate(("describe_draft", {}), speculative_config=config)
    assert described["native_layers"] == described["attention_layers"]
    assert_same_tokens(generate()[0][0], answers[0], "Zen")
