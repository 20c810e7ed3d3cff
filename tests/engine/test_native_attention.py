# SPDX-License-Identifier: Apache-2.0
"""The kernel for CPUs inside the engine: its switch, and plain decoding's tokens either way."""

import engines
import kernel_libraries
import pytest
from engines import POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens, first_tokens
from vllm.platforms import current_platform

from vllm_magicdec.native import huge_pages
from vllm_magicdec.native.library import best_variant

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        not current_platform.is_cpu() or best_variant() is None,
        reason="needs a CPU, and the compiled kernel",
    ),
]
NUM_TOKENS = 16
# Rounding to bfloat16 changes a logprob by less.
BFLOAT16_TOLERANCE = 0.2
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
BY_TOKEN = magicdec(4, draft_kv_budget=256, **POLICIES["snapkv by token"])


@pytest.mark.parametrize(
    ("spec", "native", "v2"),
    [
        (magicdec(4, draft_kv_budget=256), True, False),
        (BY_TOKEN, True, True),
        ({**BY_TOKEN, "native_attention": False}, False, False),
        # Other methods have the kernel on request.
        (None, True, True),
        (NGRAM, True, False),
    ],
)
def test_output_is_plain_decodings_with_the_kernel_and_without(prompts, plain, spec, native, v2):
    batch = {"prompts": prompts[:6], "sampling": {**GREEDY, "max_tokens": NUM_TOKENS}}
    is_ours = spec not in (None, NGRAM)
    run = engines.run(
        [("generate", {"batches": [batch]}), ("describe_attention", {})],
        v2=v2,
        env={} if is_ours else {"VLLM_MAGICDEC_NATIVE_ATTENTION": "1"},
        max_num_seqs=8,
        speculative_config=spec,
    )
    described = run.results[1]
    assert described["attention_layers"] > 0
    assert described["native_layers"] == (described["attention_layers"] if native else 0)
    assert not is_ours or (run.draft_failures == 0 and run.accepted > 0.7 * run.drafted)
    if huge_pages.on_demand():
        assert described["in_huge_pages"] > 0.9 if native else described["in_huge_pages"] == 0
    expected = [first_tokens(tokens, NUM_TOKENS) for tokens in plain[:6]]
    assert_same_tokens(expected, run.results[0][0], "with the kernel" if native else "without")


@pytest.mark.parametrize(
    ("policy", "kv_cache_dtype"),
    [("snapkv by token", "auto"), ("streamingllm", "fp8"), ("snapkv by token", "fp8_e5m2")],
)
def test_in_bfloat16_every_token_is_vllms_best(prompts, policy, kv_cache_dtype):
    """Up to rounding, as scored by vLLM's attention, which packs this cache for AMX if the CPU has it."""
    if kv_cache_dtype != "auto" and kernel_libraries.best() == "avx2":
        pytest.skip("vLLM's CPU attention has fp8 caches with AVX-512 only")
    chosen = prompts[:6]
    engine = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype, "max_num_seqs": 8}
    batch = {"prompts": chosen, "sampling": {**GREEDY, "max_tokens": NUM_TOKENS}}
    run = engines.run(
        [("generate", {"batches": [batch]}), ("describe_draft", {})],
        speculative_config=magicdec(4, draft_kv_budget=256, **POLICIES[policy]),
        **engine,
    )
    (answers,), described = run.results
    assert described["native_layers"] == described["attention_layers"]
    assert run.draft_failures == 0 and run.accepted > 0.7 * run.drafted
    assert engines.max_logprob_gap(chosen, answers, **engine) < BFLOAT16_TOLERANCE
