# SPDX-License-Identifier: Apache-2.0
"""Requests at the edges, and what a starting engine refuses; tests/door/ has the other refusals."""

import engines
import pytest
from draft_engines import TINY_DRAFT, TINY_SPIRE, drafting_with
from engines import POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens

CHUNKED = {"max_num_seqs": 4, "max_num_batched_tokens": 256}
ODD_CHUNKS = {"max_num_batched_tokens": 333}
LOOKUPS = magicdec(4, draft_kv_budget=128, draft_lookup="on")
SNAPKV = magicdec(4, draft_kv_budget=128, **POLICIES["snapkv"])


@pytest.mark.parametrize(
    ("v2", "speculation", "engine"),
    [(False, LOOKUPS, {"max_num_seqs": 4}), (False, SNAPKV, CHUNKED), (True, SNAPKV, CHUNKED)],
    ids=["V1 runner, lookups, whole prompts", "V1 runner, snapkv, chunks", "V2 runner, snapkv, chunks"],
)
def test_prompts_given_as_embeddings_are_answered_as_their_tokens(prompts, plain, v2, speculation, engine):
    """Half of the requests in every batch have tokens, and drafts go on for them."""
    chosen = [i for i, prompt in enumerate(prompts) if len(prompt) < 900][:8]
    mixed = [{"embeddings_of": prompts[i]} if i % 2 else prompts[i] for i in chosen]
    run = engines.generate(
        mixed, GREEDY, v2=v2, enable_prompt_embeds=True, speculative_config=speculation, **engine
    )
    assert_same_tokens([plain[i] for i in chosen], run.results[0][0], "embeddings")
    assert run.draft_failures == 0 and run.accepted > 0


def test_a_seed_gives_the_same_text_for_a_prompt_read_whole_or_in_chunks(prompts):
    batch = [max(prompts, key=len), prompts[0]]
    sampling = {"temperature": 0.8, "max_tokens": 32, "ignore_eos": True, "seed": 7}
    engine = {"max_num_seqs": 2, "speculative_config": magicdec(3, draft_kv_budget=128)}
    runs = (
        engines.generate(batch, sampling, **engine, **chunks)
        for chunks in ({}, {"max_num_batched_tokens": 256})
    )
    whole, chunked = (engines.tokens_of(run.results[0][0])[0] for run in runs)
    assert whole == chunked


@pytest.mark.parametrize("v2", [False, True], ids=["V1 runner", "V2 runner"])
def test_shortest_and_longest_requests_are_answered_as_without_speculation(prompts, v2):
    longest = (max(prompts, key=len) * 8)[:1024]
    tokens = [longest[:1], longest[1:2], longest[:-1], longest[:-2], longest[:-6]]
    embedded = [{"embeddings_of": one} if i % 2 else one for i, one in enumerate(tokens)]
    greedy = {"temperature": 0, "ignore_eos": True}
    sampling = [{**greedy, "max_tokens": min(9, len(longest) - len(one))} for one in tokens]
    engine = {"v2": v2, "max_num_seqs": 3, "max_model_len": len(longest), "num_gpu_blocks_override": 65}
    plain = engines.generate(tokens, sampling, **engine).results[0][0]
    run = engines.generate(
        embedded, sampling, enable_prompt_embeds=True, speculative_config=SNAPKV, **engine, **ODD_CHUNKS
    )
    assert_same_tokens(plain, run.results[0][0], "edges")
    assert run.draft_failures == 0


CONNECTOR = {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}
NO_CONNECTOR = "does not work with a KV connector"
REFUSED = {
    "connector with a draft model": (drafting_with(TINY_DRAFT), CONNECTOR, NO_CONNECTOR),
    "connector with SPIRe": (drafting_with(TINY_SPIRE), CONNECTOR, NO_CONNECTOR),
    "SPIRe alone": (None, {"model": str(TINY_SPIRE)}, "serve its target with --spec-method magicdec"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_in_a_sentence(case):
    spec, engine, sentence = REFUSED[case]
    with pytest.raises(engines.RefusedError, match=sentence):
        engines.generate([[1, 2, 3]], GREEDY, speculative_config=spec, **engine)
