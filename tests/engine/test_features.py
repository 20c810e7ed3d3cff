# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters that the soak's requests do not have, and what drafting adds to an engine."""

import engines
import pytest
import texts
from draft_engines import few
from engines import POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens

pytestmark = pytest.mark.extended

SPEC = magicdec(4, draft_kv_budget=128)

# They change greedy output. vLLM itself refuses logit_bias and min_p with speculative decoding.
SAMPLING = {
    "minimum and stop tokens": {"max_tokens": 64, "min_tokens": 8},
    "penalties": {"max_tokens": 48, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "presence penalty": {"max_tokens": 48, "presence_penalty": 0.5},
    "bad words": {"max_tokens": 32, "ignore_eos": True, "bad_words": ["self"]},
}


def test_greedy_output_is_unchanged_with_every_sampling_parameter():
    prompts = texts.prompts(8, 60, 1200, seed=5)
    sampling = [{"temperature": 0, "logprobs": 2, **fields} for fields in SAMPLING.values()]
    steps = [("generate", {"batches": [{"prompts": prompts, "sampling": one} for one in sampling]})]
    spec = magicdec(4, draft_kv_budget=256, **POLICIES["snapkv by token"])
    plain, run = (engines.run(steps, max_num_seqs=4, **more) for more in ({}, {"speculative_config": spec}))
    for name, expected, got in zip(SAMPLING, plain.results[0], run.results[0], strict=True):
        assert_same_tokens(expected, got, name)
    assert run.accepted > 0


def test_drafting_adds_no_weights_no_layers_and_no_kv_cache(plain_run):
    run = engines.run([("describe_draft", {})], max_num_seqs=16, speculative_config=SPEC)
    worker = run.results[0]
    assert worker["class"] == "MagicDecProposer" and worker["model_is_target"]
    assert worker["attention_layers"] == 6  # the target's own
    assert run.num_kv_blocks == plain_run.num_kv_blocks
    assert (plain_run.num_lookahead_tokens, run.num_lookahead_tokens) == (0, 4)


@pytest.mark.parametrize(("v2", "takes_embeddings"), [(False, False), (False, True), (True, True)])
def test_draft_steps_have_the_inputs_of_the_compiled_target(prompts, plain, v2, takes_embeddings):
    """Multimodal targets take embeddings, and text-only ones with `--enable-prompt-embeds`."""
    batch, expected = few(prompts, plain, number=6, below=600, tokens=12)
    run = engines.run(
        [("generate_and_note_inputs", {"batches": [batch]})],
        v2=v2,
        max_num_seqs=4,
        num_gpu_blocks_override=257,
        enable_prompt_embeds=takes_embeddings,
        speculative_config=magicdec(4, draft_kv_budget=128, draft_kv_policy="snapkv"),
    )
    (result,) = run.results
    assert_same_tokens(expected, result["batches"][0], "embeddings")
    assert run.accepted > 0
    assert result["inputs"] == [["inputs_embeds" if takes_embeddings else "input_ids", "positions"]]


def test_strict_mode_raises(prompts):
    with pytest.raises(RuntimeError, match="selection, on purpose"):
        engines.generate(prompts[:1], GREEDY, env={engines.FAULT: "selection"}, speculative_config=SPEC)
