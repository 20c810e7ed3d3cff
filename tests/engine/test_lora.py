# SPDX-License-Identifier: Apache-2.0
"""LoRA: a request drafts with its own adapter, in batches with several adapters and none."""

import json

import engines
import pytest
import texts
import torch
from engines import POLICIES, magicdec
from greedy import GREEDY, assert_same_tokens, first_tokens
from safetensors.torch import save_file

pytestmark = pytest.mark.extended

GAMMA, RANK, MODEL_LEN = 3, 8, 512
NUM_ADAPTERS = 3
SAMPLING = {**GREEDY, "max_tokens": 24}
V2_TOKENS = 8  # in Triton's interpreter
# vLLM's CPU kernels give tokens without an adapter the last slot's, so one slot stays empty.
LORA = {"enable_lora": True, "max_loras": NUM_ADAPTERS + 1, "max_lora_rank": RANK}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Numbers and folders of adapters that change the shipped model's answers."""
    model = json.loads((engines.MODEL / "config.json").read_text())
    hidden, head = model["hidden_size"], model["head_dim"]
    outputs = {"q_proj": model["num_attention_heads"] * head, "v_proj": model["num_key_value_heads"] * head}
    numbered = []
    for number in range(1, NUM_ADAPTERS + 1):
        generator = torch.Generator().manual_seed(number)
        folder = tmp_path_factory.mktemp(f"adapter-{number}")
        weights = {}
        for layer in range(model["num_hidden_layers"]):
            for name, size in outputs.items():
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                down = torch.randn((RANK, hidden), generator=generator) / hidden**0.5
                weights[f"{prefix}.lora_A.weight"] = down
                weights[f"{prefix}.lora_B.weight"] = 0.2 * torch.randn((size, RANK), generator=generator)
        save_file(weights, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(outputs)}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        numbered.append([number, str(folder)])
    return numbered


def batches(adapters):
    """A mixed batch, an adapter that is loaded while serving, no adapter, and a prompt for all of them."""
    prompts = texts.prompts(6, 40, 400, seed=11)
    first, second, late = adapters
    mixed = [None, first, second, first, None, second]
    return [
        {"prompts": prompts, "sampling": SAMPLING, "adapters": mixed},
        {"prompts": prompts[:4], "sampling": SAMPLING, "adapters": [late, None, first, late]},
        {"prompts": prompts[:2], "sampling": SAMPLING, "adapters": [None, None]},
        {"prompts": prompts[:1] * 4, "sampling": SAMPLING, "adapters": [None, *adapters]},
    ]


def run(adapters, *, v2: bool, **engine):
    given = batches(adapters)
    if v2:
        given = [{**given[0], "sampling": {**SAMPLING, "max_tokens": V2_TOKENS}}]
    sizes = {"max_model_len": MODEL_LEN, "max_num_seqs": 4}
    return engines.run([("generate", {"batches": given})], v2=v2, **sizes, **LORA, **engine)


@pytest.fixture(scope="module")
def plain(adapters):
    answers = run(adapters, v2=False).results[0]
    same_prompt = {tuple(answer["completions"][0]["tokens"]) for answer in answers[3]}
    assert len(same_prompt) == 1 + NUM_ADAPTERS, "the tests could not tell adapters apart"
    return answers


@pytest.mark.parametrize(
    ("policy", "lookup", "v2"),
    [("streamingllm", "on", False), ("snapkv", "off", False), ("streamingllm", "on", True)],
)
def test_every_request_drafts_with_its_own_adapter(adapters, plain, policy, lookup, v2):
    spec = magicdec(GAMMA, draft_kv_budget=MODEL_LEN, draft_lookup=lookup, **POLICIES[policy])
    got = run(adapters, v2=v2, speculative_config=spec)
    assert got.v2_runner == v2 and got.draft_failures == 0
    for number, answers in enumerate(got.results[0]):
        length = V2_TOKENS if v2 else SAMPLING["max_tokens"]
        expected = [first_tokens(answer, length) for answer in plain[number]]
        assert_same_tokens(expected, answers, f"{policy}, batch {number}")
    assert got.accepted == got.drafted > 0, "a view of the whole context drafts what the target decodes"


def test_a_draft_model_drafts_without_adapters_for_requests_with_them(adapters, plain):
    spec = {**magicdec(GAMMA, draft_kv_budget=64), "method": "magicdec", "model": str(engines.MODEL)}
    got = run(adapters, v2=False, speculative_config=spec)
    for expected, answers in zip(plain, got.results[0], strict=True):
        assert_same_tokens(expected, answers, "a draft model, adapters")
    assert got.draft_failures == 0 and 0 < got.accepted < got.drafted
