# SPDX-License-Identifier: Apache-2.0
"""Drafts with quantised weights follow the target's; `test_random_schedules.py` has their output."""

import shutil

import engines
import pytest
import torch
import transformers
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


def test_inputs_are_measured_as_transformers_computes_them():
    spec = engines.magicdec(draft_weights="int4")
    (measured,) = engines.run([("measured_inputs", {})], speculative_config=spec).results
    model = transformers.AutoModelForCausalLM.from_pretrained(engines.MODEL, dtype=torch.float32)
    seen = {}

    def note(name):
        return lambda _, inputs: seen.update({name: inputs[0][0].square().mean(0)})

    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(
                note(name.replace("q_proj", "qkv_proj").replace("up_", "gate_up_"))
            )
    tokens = torch.randint(model.config.vocab_size, (512,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        model(tokens.unsqueeze(0))
    assert len(measured) == 4 * model.config.num_hidden_layers
    for name, values in measured.items():
        torch.testing.assert_close(torch.tensor(values), seen[name], rtol=1e-3, atol=1e-6)


def test_weights_that_are_loaded_while_serving_are_quantised_again(prompts, plain, other_weights):
    batch = {"prompts": prompts[:8], "sampling": {**GREEDY, "max_tokens": 32}}
    spec = engines.magicdec(draft_weights="int8", draft_kv_budget=engines.MODEL_LEN)
    (expected,) = engines.run([("generate", {"batches": [batch]})], model=other_weights).results[0]
    before = engines.generate(batch["prompts"], batch["sampling"], speculative_config=spec)
    assert_same_tokens([first_tokens(one, 32) for one in plain[:8]], before.results[0][0], "before")
    assert before.accepted > 0.7 * before.drafted
    steps = [("generate_after_reload", {"batches": [batch], "weights": other_weights})]
    after = engines.run(steps, speculative_config=spec)
    assert_same_tokens(expected, after.results[0][0], "after")
    assert after.accepted > 0.2 * after.drafted, "with the old weights it is none"
