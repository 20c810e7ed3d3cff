# SPDX-License-Identifier: Apache-2.0
"""fp8 KV caches in an engine: drafts read them, and verifications overwrite what drafts wrote."""

import engines
import kernel_libraries
import pytest
import texts
from engines import POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens, first_tokens

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        kernel_libraries.best() == "avx2", reason="vLLM's CPU attention has fp8 caches with AVX-512 only"
    ),
]

WHOLE_LEN = 1024  # tokens
ENGINE = {"kv_cache_dtype": "fp8", "max_num_seqs": 8, "max_model_len": WHOLE_LEN}


@pytest.fixture(scope="module")
def answered():
    prompts = texts.prompts(8, 60, 900, seed=5)
    return prompts, engines.generate(prompts, GREEDY, **ENGINE).results[0][0]


@pytest.mark.parametrize(
    ("policy", "budget", "v2"), [("verify-topk", 256, False), ("snapkv by token", WHOLE_LEN, True)]
)
def test_greedy_output_equals_plain_decoding_over_the_same_cache(answered, policy, budget, v2):
    # The same attention on both sides: another kernel may round to a neighbouring fp8 number.
    spec = magicdec(4, draft_kv_budget=budget, native_attention=False, **POLICIES[policy])
    (chosen, plain), sampling = answered, GREEDY
    if v2:  # in Triton's interpreter
        chosen, sampling = chosen[:3], {**GREEDY, "max_tokens": 8}
    run = engines.generate(chosen, sampling, v2=v2, speculative_config=spec, **ENGINE)
    assert run.v2_runner == v2
    expected = [first_tokens(answer, sampling["max_tokens"]) for answer in plain[: len(chosen)]]
    assert_same_tokens(expected, run.results[0][0], f"fp8, {policy}, budget {budget}")
    assert run.draft_failures == 0
    if budget == WHOLE_LEN:
        assert run.accepted == run.drafted > 0, "a view of everything drafts what the target decodes"
    else:
        assert run.accepted > 0.8 * run.drafted
