# SPDX-License-Identifier: Apache-2.0
"""Untrained SPIRe drafts, and a token-by-token float64 reference of their computation.

Both follow only the description of the file format. A draft has its target's embedding, last blocks and
unembedding with noise, so that some drafts are accepted.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def write(
    path: Path,
    target: Path,
    *,
    num_layers: int,
    sinks: int,
    window: int,
    noise: float = 0.1,
    feedback_memory: bool = True,
    memory: torch.Tensor | None = None,
    seed: int = 0,
    **fields: Any,
) -> Path:
    """Write a draft of the target's last layers to `path` and return it.

    `noise` is relative to the standard deviation of each weight, `memory` are the memory's logits
    [num_layers, num_layers + 1], and `fields` are those of config.json, within `spire` or outside.
    """
    torch.manual_seed(seed)
    path.mkdir(parents=True, exist_ok=True)
    config, given = json.loads((target / "config.json").read_text()), load_weights(target)
    num_target_layers = config["num_hidden_layers"]
    first = num_target_layers - num_layers
    names = {name: name for name in ("model.embed_tokens.", "model.norm.", "lm_head.")}
    names |= {f"model.layers.{first + i}.": f"model.layers.{i}." for i in range(num_layers)}
    weights = {}
    for theirs, own in names.items():
        for name in (name for name in given if name.startswith(theirs)):
            weight = given[name]
            if "norm" not in name:
                weight = weight + noise * weight.std() * torch.randn_like(weight)
            weights[own + name.removeprefix(theirs)] = weight
    if feedback_memory:
        weights["model.memory_logits"] = (
            torch.randn(num_layers, num_layers + 1) if memory is None else memory
        )
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path / "model.safetensors")
    spire = {"version": 1, "target": target.name, "target_num_hidden_layers": num_target_layers}
    spire |= {"target_layers": list(range(first, num_target_layers)), "sinks": sinks, "window": window}
    spire |= {"num_draft_steps": 4, "feedback_memory": feedback_memory, "target_activations": True}
    config |= {
        "architectures": ["MagicDecSpireForCausalLM"],
        "num_hidden_layers": num_layers,
        "eagle_aux_hidden_state_layer_ids": list(range(first, num_target_layers + 1)),
        "dtype": "float32",
        "spire": spire | {name: value for name, value in fields.items() if name in spire},
    }
    config |= {name: value for name, value in fields.items() if name not in spire}
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (target / name).exists():
            shutil.copy(target / name, path / name)
    return path


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: weight.float() for name, weight in load_file(path / "model.safetensors").items()}


class Llama:
    """A Llama in float64, one token at a time."""

    def __init__(self, path: Path) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.weights = {name: weight.double() for name, weight in load_weights(path).items()}
        self.num_layers = self.config["num_hidden_layers"]
        self.num_heads = self.config["num_attention_heads"]
        self.num_kv_heads = self.config["num_key_value_heads"]
        self.head_size = self.config["head_dim"]

    def embed(self, token: int) -> torch.Tensor:
        return self.weights["model.embed_tokens.weight"][token]

    def normed(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm of [..., hidden_size]."""
        variance = hidden.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return hidden / variance.sqrt() * self.weights[f"model.{name}.weight"]

    def project(
        self, layer: int, what: str, normed: torch.Tensor, position: int | None = None
    ) -> torch.Tensor:
        """Return queries, keys or values, [heads, head_size], with RoPE if there is a position."""
        weight = self.weights[f"model.layers.{layer}.self_attn.{what}_proj.weight"]
        heads = (weight @ normed).view(-1, self.head_size)
        if position is None:
            return heads
        half = self.head_size // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        one, other = heads[:, :half], heads[:, half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=1)

    def block(
        self, layer: int, hidden: torch.Tensor, position: int, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Return a block's output; `keys`, `values` [n, kv_heads, head_size]: other tokens in view."""
        normed = self.normed(hidden, f"layers.{layer}.input_layernorm")
        queries = self.project(layer, "q", normed, position)
        keys = torch.cat([keys, self.project(layer, "k", normed, position)[None]])
        values = torch.cat([values, self.project(layer, "v", normed)[None]])
        attended = []
        for head, query in enumerate(queries):
            own = head * self.num_kv_heads // self.num_heads
            weights = (keys[:, own] @ query / math.sqrt(self.head_size)).softmax(0)
            attended.append(weights @ values[:, own])
        layers = f"model.layers.{layer}"
        hidden = hidden + self.weights[f"{layers}.self_attn.o_proj.weight"] @ torch.cat(attended)
        normed = self.normed(hidden, f"layers.{layer}.post_attention_layernorm")
        gate = self.weights[f"{layers}.mlp.gate_proj.weight"] @ normed
        up = self.weights[f"{layers}.mlp.up_proj.weight"] @ normed
        return hidden + self.weights[f"{layers}.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return head @ self.normed(hidden, "norm")

    def residual_streams(self, tokens: list[int]) -> torch.Tensor:
        """Return [num_tokens, num_layers + 1, hidden_size]: before each block and after the last one."""
        shape = (self.num_layers, len(tokens), self.num_kv_heads, self.head_size)
        keys, values = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        streams = []
        for position, token in enumerate(tokens):
            hidden = [self.embed(token)]
            for layer in range(self.num_layers):
                normed = self.normed(hidden[-1], f"layers.{layer}.input_layernorm")
                before = keys[layer, :position], values[layer, :position]
                hidden.append(self.block(layer, hidden[-1], position, *before))
                keys[layer, position] = self.project(layer, "k", normed, position)
                values[layer, position] = self.project(layer, "v", normed)
            streams.append(torch.stack(hidden))
        return torch.stack(streams)


class SpireReference:
    def __init__(self, draft: Path, target: Path) -> None:
        self._draft, self._target = Llama(draft), Llama(target)
        self._fields = self._draft.config["spire"]
        num_layers = self._draft.num_layers
        if self._fields["feedback_memory"]:
            self._weights = self._draft.weights["model.memory_logits"].softmax(1)
        else:
            self._weights = torch.eye(num_layers, num_layers + 1, dtype=torch.float64)

    def activations(self, verified: list[int]) -> torch.Tensor:
        """Return the target's activations, [num_tokens, num_layers + 1, hidden_size]."""
        chosen = self._draft.config["eagle_aux_hidden_state_layer_ids"]
        return self._target.residual_streams(verified)[:, chosen]

    def memory(
        self, layer: int, activations: torch.Tensor, position: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a token's key and value in a block, [num_kv_heads, head_size], from its activations."""
        summed = sum(weight * own for weight, own in zip(self._weights[layer], activations, strict=True))
        normed = self._draft.normed(summed, f"layers.{layer}.input_layernorm")
        return self._draft.project(layer, "k", normed, position), self._draft.project(layer, "v", normed)

    def logits(self, activations: torch.Tensor, drafted: list[int]) -> torch.Tensor:
        """Return logits after each of `drafted`; the first of them is what the target sampled last."""
        model, first = self._draft, len(activations)
        held = [  # by block and position: keys and values
            [self.memory(layer, own, position) for position, own in enumerate(activations)]
            for layer in range(model.num_layers)
        ]
        logits = []
        for position, token in enumerate(drafted, start=first):
            first_recent = position - self._fields["window"] + 1
            seen = [p for p in range(position) if p < self._fields["sinks"] or p >= first_recent]
            hidden = [model.embed(token)]
            own = []
            for layer in range(model.num_layers):
                normed = model.normed(hidden[-1], f"layers.{layer}.input_layernorm")
                own.append((model.project(layer, "k", normed, position), model.project(layer, "v", normed)))
                nothing = torch.zeros((0, model.num_kv_heads, model.head_size), dtype=torch.float64)
                keys, values = nothing, nothing
                if seen:
                    keys, values = map(torch.stack, zip(*(held[layer][p] for p in seen), strict=True))
                hidden.append(model.block(layer, hidden[-1], position, keys, values))
            logits.append(model.logits(hidden[-1]))
            for layer in range(model.num_layers):
                kept = own[layer]
                if self._fields["feedback_memory"]:
                    kept = self.memory(layer, torch.stack(hidden), position)
                held[layer].append(kept)
        return torch.stack(logits)
