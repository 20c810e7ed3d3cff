# SPDX-License-Identifier: Apache-2.0
"""Every library of kernels that vLLM may load here, so that AVX-512 machines guard those without."""

import engines
import kernel_libraries
import pytest
from engines import POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens

LIBRARIES = kernel_libraries.executable()

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not LIBRARIES, reason="vLLM has one library of kernels here"),
]


@pytest.mark.parametrize("tests", ["packed_layouts", "plans_by_window", "rope_of_mla"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_attention_of_the_library(library, tests):
    engines.run_tests(f"{tests}.py", env=kernel_libraries.environment(library))


@pytest.mark.parametrize("library", LIBRARIES)
def test_greedy_output_is_unchanged_by_speculation_with_every_library(prompts, library):
    chosen = [prompt for prompt in prompts if len(prompt) < 700][:12]
    engine = {"env": kernel_libraries.environment(library), "max_num_seqs": 8}
    truth = engines.generate(chosen, GREEDY, **engine)
    assert truth.kernel_libraries == [library]
    for policy in ("snapkv by token", "verify-topk"):
        spec = magicdec(4, draft_kv_budget=256, **POLICIES[policy])
        run = engines.generate(chosen, GREEDY, speculative_config=spec, **engine)
        assert run.kernel_libraries == [library]
        assert_same_tokens(truth.results[0][0], run.results[0][0], f"{library}, {policy}")
        assert run.accepted > 0 and run.draft_failures == 0
