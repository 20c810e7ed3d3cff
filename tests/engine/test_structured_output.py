# SPDX-License-Identifier: Apache-2.0
"""Grammars that begin or end inside drafted tokens: greedy output equals plain decoding's."""

import engines
import pytest
from draft_engines import V2_ENGINE, WHOLE_LEN
from engines import magicdec
from greedy import GREEDY, assert_same_tokens

pytestmark = pytest.mark.extended

PLUGIN = engines.HERE / "reasoning_until_newline.py"
REASONING = {"reasoning_parser": "until_newline", "reasoning_parser_plugin": str(PLUGIN)}
YES_OR_NO, CODE = {"regex": r"(yes|no), [0-9]{3,9}"}, {"choice": ["import os", "return None"]}
GRAMMARS = ({"structured_outputs": YES_OR_NO}, {"structured_outputs": CODE}, {})
AUTO = {"num_speculative_tokens": "auto", "max_num_speculative_tokens": 5}
SPECS = {
    "magicdec-self": magicdec("auto", max_num_speculative_tokens=5, draft_kv_budget=128),
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, **AUTO},
}


@pytest.fixture(scope="module", params=[False, True], ids=["answer", "after reasoning"])
def constrained(request, prompts):
    """Return settings, a batch and plain decoding's answers; grammars begin at once, or after a line."""
    settings = {"structured_outputs_config": REASONING} if request.param else {}
    sampling = [{**GREEDY, "ignore_eos": False, **grammar} for grammar in GRAMMARS * 3]
    batch = {"prompts": [prompt for prompt in prompts if len(prompt) < 600][:9], "sampling": sampling}
    run = engines.run([("generate", {"batches": [batch]})], max_model_len=WHOLE_LEN, **settings)
    (plain,) = run.results[0]
    texts = [answer["completions"][0]["text"] for answer in plain]
    begun = (text for text in texts[::3] if "\n" in text or not request.param)
    assert any("yes," in text or "no," in text for text in begun), texts
    return settings, batch, plain


@pytest.mark.parametrize("method", SPECS)
def test_grammars_beside_a_changing_number_of_drafts(constrained, method):
    settings, batch, plain = constrained
    run = engines.run(
        [("generate_with_random_schedule", {"batches": [batch], "seed": 2})],
        max_model_len=WHOLE_LEN,
        max_num_seqs=4,
        own_process=method == "ngram",
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        speculative_config=SPECS[method],
        **settings,
    )
    assert_same_tokens(plain, run.results[0]["batches"][0], method)
    assert run.accepted > 0


def test_grammars_on_the_v2_runner(constrained):
    settings, batch, plain = constrained
    run = engines.run(
        [("generate_with_random_schedule", {"batches": [batch], "seed": 3})],
        **V2_ENGINE,
        speculative_config=SPECS["magicdec-self"],
        **settings,
    )
    assert run.v2_runner and run.accepted > 0
    assert_same_tokens(plain, run.results[0]["batches"][0], "V2 runner")
