# SPDX-License-Identifier: Apache-2.0
"""The sizes of layers' inputs, to which `int4` weights are fitted, are those that transformers computes."""

import cells
import engines
import pytest
import torch
import transformers
from checkpoints import checkpoint
from families import FAMILIES

pytestmark = pytest.mark.extended


# The second one is computed by vLLM's Transformers backend.
@pytest.mark.parametrize("name", ["Llama", "GPT-NeoX"])
def test_inputs_are_measured_as_transformers_computes_them(name):
    path = str(checkpoint(next(family for family in FAMILIES if family.name == name)))
    spec = engines.magicdec(draft_weights="int4")
    (measured,) = engines.run(
        [("measured_inputs", {})],
        model=path,
        skip_tokenizer_init=True,
        max_model_len=cells.MODEL_LEN,
        speculative_config=spec,
    ).results
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32)
    squares = {}

    def note(name):
        return lambda _, inputs: squares.update({name: inputs[0][0].square().mean(0)})

    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            merged = name.replace("q_proj", "qkv_proj").replace("up_proj", "gate_up_proj")
            layer.register_forward_pre_hook(note(f"model.{merged}"))
    tokens = torch.randint(model.config.vocab_size, (512,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        model(tokens.unsqueeze(0))
    assert len(measured) == 4 * model.config.num_hidden_layers
    for name, values in measured.items():
        torch.testing.assert_close(torch.tensor(values), squares[name], rtol=1e-3, atol=1e-6)
