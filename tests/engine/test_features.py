# SPDX-License-Identifier: Apache-2.0
"""Everything else that vLLM does with a request keeps working, with the outputs of plain decoding."""

import engines
import pytest
import texts
from engines import POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens, first_tokens

pytestmark = pytest.mark.extended

NUM_REQUESTS = 8
SPEC = magicdec(4, draft_kv_budget=128)

# Sampling parameters that change greedy output.
ALL_TOKENS = {"temperature": 0, "ignore_eos": True}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5}
SAMPLING = {
    "stop strings": {"temperature": 0, "max_tokens": 64, "stop": [":", "return"]},
    "stop tokens": {"temperature": 0, "max_tokens": 64, "min_tokens": 8},
    "penalties": {**ALL_TOKENS, "max_tokens": 48, **PENALTIES},
    # vLLM itself refuses logit_bias and min_p with speculative decoding.
    "bad words": {**ALL_TOKENS, "max_tokens": 32, "bad_words": ["self"]},
    "logprobs": {**ALL_TOKENS, "max_tokens": 24, "logprobs": 5},
    "seeded n > 1": {**ALL_TOKENS, "temperature": 0.8, "max_tokens": 24, "n": 3, "seed": 7},
}


@pytest.fixture(scope="module")
def feature_prompts():
    return texts.prompts(NUM_REQUESTS, 60, 1200, seed=5)


def run_all(prompts, **engine):
    batches = [
        {"prompts": prompts, "sampling": {"logprobs": 2, **sampling}} for sampling in SAMPLING.values()
    ]
    return engines.run([("generate", {"batches": batches})], max_num_seqs=4, **engine)


@pytest.fixture(scope="module")
def plain_features(feature_prompts):
    return dict(zip(SAMPLING, run_all(feature_prompts).results[0], strict=True))


@pytest.fixture(scope="module")
def magicdec_features(feature_prompts):
    spec = magicdec(4, draft_kv_budget=256, **POLICIES["snapkv by token"])
    run = run_all(feature_prompts, speculative_config=spec)
    assert run.accepted > 0
    return dict(zip(SAMPLING, run.results[0], strict=True))


def test_greedy_output_is_unchanged_with_every_sampling_parameter(plain_features, magicdec_features):
    for name in (name for name, sampling in SAMPLING.items() if sampling["temperature"] == 0):
        assert_same_tokens(plain_features[name], magicdec_features[name], name)
        for expected, got in zip(plain_features[name], magicdec_features[name], strict=True):
            if expected["completions"][0]["tokens"] == got["completions"][0]["tokens"]:
                assert expected["completions"][0]["text"] == got["completions"][0]["text"]


def test_logprobs_are_the_targets(plain_features, magicdec_features):
    for expected, got in zip(plain_features["logprobs"], magicdec_features["logprobs"], strict=True):
        expected, got = expected["completions"][0], got["completions"][0]
        same = [a == b for a, b in zip(expected["tokens"], got["tokens"], strict=True)]
        for step in range(same.index(False) if False in same else len(same)):
            chosen = str(expected["tokens"][step])
            assert got["logprobs"][step][chosen] == pytest.approx(
                expected["logprobs"][step][chosen], abs=1e-3
            )


def test_several_completions_of_a_request_are_complete_and_differ(magicdec_features):
    for request in magicdec_features["seeded n > 1"]:
        tokens = [tuple(completion["tokens"]) for completion in request["completions"]]
        assert [len(t) for t in tokens] == [24, 24, 24]
        assert len(set(tokens)) > 1


def test_structured_output_is_valid_and_unchanged():
    conversations = [[{"role": "user", "content": f"value = {i}\nchoose"}] for i in range(6)]
    choices = ["alpha", "beta", "gamma delta epsilon"]
    constrained = [
        {"temperature": 0, "max_tokens": 24, "structured_outputs": {"choice": choices}},
        {"temperature": 0, "max_tokens": 24, "structured_outputs": {"regex": "[0-9]{3}-[a-f]{12}"}},
    ]
    steps = [("chat", {"conversations": conversations, "sampling": sampling}) for sampling in constrained]
    truth = engines.run(steps, max_num_seqs=4)
    run = engines.run(
        steps, max_num_seqs=4, speculative_config=magicdec(4, draft_kv_budget=engines.MODEL_LEN)
    )
    assert set(run.results[0]) <= set(choices)
    assert run.results == truth.results
    assert run.drafted > 0


def test_drafting_adds_no_weights_no_layers_and_no_kv_cache(plain_run):
    run = engines.run([("describe_draft", {})], max_num_seqs=16, speculative_config=SPEC)
    worker = run.results[0]
    assert worker["class"] == "MagicDecProposer"
    assert worker["model_is_target"]
    assert worker["attention_layers"] == 6  # the target's own
    assert run.num_kv_blocks == plain_run.num_kv_blocks
    assert (plain_run.num_lookahead_tokens, run.num_lookahead_tokens) == (0, 4)


@pytest.mark.parametrize(("v2", "takes_embeddings"), [(False, False), (False, True), (True, True)])
def test_draft_steps_have_the_inputs_of_the_compiled_target(prompts, plain, v2, takes_embeddings):
    """Multimodal targets take embeddings, and text-only ones with `--enable-prompt-embeds`.

    Draft steps replay the V1 runner's CUDA graphs, which need all inputs at the same addresses.
    """
    chosen = [i for i, prompt in enumerate(prompts) if len(prompt) < 600][:6]
    batch = {"prompts": [prompts[i] for i in chosen], "sampling": {**GREEDY, "max_tokens": 12}}
    run = engines.run(
        [("generate_and_note_inputs", {"batches": [batch]})],
        v2=v2,
        max_num_seqs=4,
        num_gpu_blocks_override=257,
        enable_prompt_embeds=takes_embeddings,
        speculative_config=magicdec(4, draft_kv_budget=128, draft_kv_policy="snapkv"),
    )
    (result,) = run.results
    assert_same_tokens([first_tokens(plain[i], 12) for i in chosen], result["batches"][0], "embeddings")
    assert run.accepted > 0
    names = {tuple(name for name, _ in inputs) for inputs in result["inputs"]}
    assert names == {("inputs_embeds" if takes_embeddings else "input_ids", "positions")}
    if not v2:
        assert len(result["inputs"]) == 1


def test_a_failure_inside_drafting_loses_and_changes_nothing(prompts, plain):
    chosen = [i for i, prompt in enumerate(prompts) if len(prompt) < 400][:6]
    batch = {"prompts": [prompts[i] for i in chosen], "sampling": {**GREEDY, "max_tokens": 12}}
    run = engines.run(
        [("generate", {"batches": [batch]}), ("generate_with_broken_drafting", {"batches": [batch]})],
        strict=False,
        own_process=True,
        max_num_seqs=4,
        num_gpu_blocks_override=257,
        speculative_config=SPEC,
    )
    for (batch_results,) in run.results:
        for index, request in zip(chosen, batch_results, strict=True):
            assert request["completions"][0]["tokens"] == plain[index]["completions"][0]["tokens"][:12]
    assert run.draft_failures == 3 and run.metrics["vllm:magicdec_draft_pauses"] == 1
    assert run.metrics["vllm:magicdec_paused_rounds"] > 0
    assert run.log.count("RuntimeError: broken on purpose") == 1, "logged once, with its trace"
    assert run.log.count("is tried again after") == 1


def test_strict_mode_raises(prompts):
    batch = {"prompts": prompts[:1], "sampling": GREEDY}
    with pytest.raises(RuntimeError, match="broken on purpose"):
        engines.run(
            [("generate_with_broken_drafting", {"batches": [batch]})],
            strict=True,
            own_process=True,
            num_gpu_blocks_override=257,
            speculative_config=SPEC,
        )
