# SPDX-License-Identifier: Apache-2.0
"""Drafts with quantised weights follow the target's; `test_random_schedules.py` has their output."""

import shutil

import engines
import pytest
from greedy import GREEDY, assert_same_tokens, first_tokens
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(engines.MODEL, folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name in [name for name in weights if name.endswith("up_proj.weight")]:
        weights[name] = -weights[name]
    save_file(weights, path, metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_that_are_loaded_while_serving_are_quantised_again(prompts, plain, other_weights, weights):
    batch = {"prompts": prompts[:8], "sampling": {**GREEDY, "max_tokens": 32}}
    spec = engines.magicdec(draft_weights=weights, draft_kv_budget=engines.MODEL_LEN)
    (expected,) = engines.run([("generate", {"batches": [batch]})], model=other_weights).results[0]
    before = engines.generate(batch["prompts"], batch["sampling"], speculative_config=spec)
    assert_same_tokens([first_tokens(one, 32) for one in plain[:8]], before.results[0][0], "before")
    assert before.accepted > 0.7 * before.drafted
    steps = [("generate_after_reload", {"batches": [batch], "weights": other_weights})]
    after = engines.run(steps, speculative_config=spec)
    assert_same_tokens(expected, after.results[0][0], "after")
    assert after.accepted > 0.2 * after.drafted, "with the old weights it is none"
