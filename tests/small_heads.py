# SPDX-License-Identifier: Apache-2.0
"""Heads for vLLM's own methods, which pass on the tiny model's hidden states: it accepts some drafts."""

import json
from pathlib import Path

import torch
from engines import MODEL
from safetensors.torch import load_file, save_file


def _tiny_llama() -> tuple[dict, dict[str, torch.Tensor]]:
    tensors = load_file(MODEL / "model.safetensors")
    return json.loads((MODEL / "config.json").read_text()), {k: v.float() for k, v in tensors.items()}


def _layer(config: dict, inputs: int) -> dict[str, torch.Tensor]:
    """Return a decoder layer that changes little; its attention reads `inputs` numbers per token."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    attention = {"q": (queries, inputs), "k": (kv, inputs), "v": (kv, inputs), "o": (hidden, queries)}
    shapes = {f"self_attn.{name}_proj": shape for name, shape in attention.items()}
    shapes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden))
    shapes["mlp.down_proj"] = (hidden, inner)
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": 0.01 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    return weights | {f"{name}.weight": torch.ones(hidden) for name in norms}


def write_eagle3(folder: Path) -> str:
    config, target = _tiny_llama()
    hidden = config["hidden_size"]
    weights = {f"midlayer.{name}": value for name, value in _layer(config, 2 * hidden).items()}
    weights["midlayer.hidden_norm.weight"] = torch.ones(hidden)
    weights["norm.weight"] = target["model.norm.weight"]
    weights["lm_head.weight"] = target["model.embed_tokens.weight"].clone()
    weights["fc.weight"] = torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], dim=1)
    save_file(weights, folder / "model.safetensors")
    head = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "dtype": "float32"}
    head |= {"draft_vocab_size": config["vocab_size"], "tie_word_embeddings": False}
    head |= {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    (folder / "config.json").write_text(json.dumps({**config, **head}))
    return str(folder)


def write_mtp(folder: Path) -> str:
    """Write the tiny model as a MiMo with an MTP module, and return its folder."""
    config, target = _tiny_llama()
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    for layer in range(layers):
        for name in ("q_proj", "k_proj", "v_proj"):
            own = f"model.layers.{layer}.self_attn.{name}"
            target[f"{own}.bias"] = torch.zeros(len(target[f"{own}.weight"]))
    target["lm_head.weight"] = target["model.embed_tokens.weight"].clone()
    module = _layer(config, hidden)
    for name in ("q_proj", "k_proj", "v_proj"):
        module[f"self_attn.{name}.bias"] = torch.zeros(len(module[f"self_attn.{name}.weight"]))
    module["token_layernorm.weight"] = module["final_layernorm.weight"] = torch.ones(hidden)
    module["hidden_layernorm.weight"] = target["model.norm.weight"].clone()
    module["input_proj.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    target |= {f"model.mtp_layers.0.{name}": value.clone() for name, value in module.items()}
    save_file(target, folder / "model.safetensors")
    own = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    own |= {"dtype": "float32", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**config, **own}))
    for file in MODEL.glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)
