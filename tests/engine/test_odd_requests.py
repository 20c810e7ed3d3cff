# SPDX-License-Identifier: Apache-2.0
"""Requests that ended the engine before: prompts given as embeddings, seeds with prompts read in chunks."""

import engines
import pytest
from engines import POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens

CHUNKED = {"max_num_seqs": 4, "max_num_batched_tokens": 256}
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
    assert run.draft_failures == 0
    assert run.accepted > 0


def test_a_seed_gives_the_same_text_for_a_prompt_read_whole_or_in_chunks(prompts):
    prompt = max(prompts, key=len)
    sampling = {"temperature": 0.8, "max_tokens": 32, "ignore_eos": True, "seed": 7}
    texts = [
        engines.generate(
            [prompt, prompts[0]], sampling, speculative_config=magicdec(3, draft_kv_budget=128), **engine
        ).results[0][0][0]["completions"][0]["tokens"]
        for engine in ({"max_num_seqs": 2}, {"max_num_seqs": 2, "max_num_batched_tokens": 256})
    ]
    assert texts[0] == texts[1]
