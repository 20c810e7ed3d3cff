# SPDX-License-Identifier: Apache-2.0
"""Reference of SPIRe from its equations: float64, NumPy, one token, one head and one key at a time.

It uses nothing of the package: only weights by their names in a state dict, and numbers for the shape.
"""

from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class SlowSpire:
    """A draft with float64 weights by a Llama's names."""

    weights: dict[str, Array]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    theta: float
    sinks: int
    window: int
    feedback_memory: bool = True

    def draft(self, verified: Array, tokens: list[int]) -> Array:
        """Compute a round's logits `[len(tokens), vocab_size]`.

        Args:
            verified: the target's activations of all tokens before, `[n, num_layers + 1, hidden_size]`.
            tokens: input tokens of the passes, the first at position n.
        """
        memories = [[self._memory(each, layer) for each in verified] for layer in range(self.num_layers)]
        logits = []
        for number, token in enumerate(tokens):
            at = len(verified) + number
            hidden = self._weight("model.embed_tokens")[token]
            activations = [hidden]
            for layer in range(self.num_layers):
                # A query attends to the memories of earlier tokens and to its own block input.
                hidden = self._block(layer, at, hidden, [*memories[layer], hidden])
                activations.append(hidden)
            for layer in range(self.num_layers):
                memories[layer].append(self._memory(np.stack(activations), layer))
            head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
            logits.append(head @ self._norm(hidden, "model.norm"))
        return np.stack(logits)

    def _memory(self, activations: Array, layer: int) -> Array:
        if not self.feedback_memory:
            return activations[layer]
        logits = self.weights["model.memory_logits"][layer]
        shares = np.exp(logits) / np.exp(logits).sum()
        return sum(share * activation for share, activation in zip(shares, activations, strict=True))

    def _block(self, layer: int, at: int, hidden: Array, seen: list[Array]) -> Array:
        name = f"model.layers.{layer}."
        norm = f"{name}input_layernorm"
        queries = self._split(self._weight(f"{name}self_attn.q_proj") @ self._norm(hidden, norm))
        outputs = []
        for head in range(self.num_heads):
            kv_head = head // (self.num_heads // self.num_kv_heads)
            query = self._rotate(queries[head], at)
            scores, values = [], []
            for position, source in enumerate(seen):
                if position < self.sinks or position > at - self.window:
                    normed = self._norm(source, norm)
                    key = self._split(self._weight(f"{name}self_attn.k_proj") @ normed)[kv_head]
                    scores.append(query @ self._rotate(key, position) / np.sqrt(self.head_dim))
                    values.append(self._split(self._weight(f"{name}self_attn.v_proj") @ normed)[kv_head])
            shares = np.exp(np.array(scores) - max(scores))
            outputs.append(shares / shares.sum() @ np.stack(values))
        hidden = hidden + self._weight(f"{name}self_attn.o_proj") @ np.concatenate(outputs)
        normed = self._norm(hidden, f"{name}post_attention_layernorm")
        gate = self._weight(f"{name}mlp.gate_proj") @ normed
        up = self._weight(f"{name}mlp.up_proj") @ normed
        return hidden + self._weight(f"{name}mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * up)

    def _weight(self, name: str) -> Array:
        return self.weights[f"{name}.weight"]

    def _norm(self, vector: Array, name: str) -> Array:
        return vector / np.sqrt((vector**2).mean() + self.eps) * self._weight(name)

    def _split(self, vector: Array) -> Array:
        return vector.reshape(-1, self.head_dim)

    def _rotate(self, vector: Array, position: int) -> Array:
        half = self.head_dim // 2
        rotated = np.empty_like(vector)
        for index in range(half):
            angle = position / self.theta ** (2 * index / self.head_dim)
            x, y = vector[index], vector[index + half]
            rotated[index] = x * np.cos(angle) - y * np.sin(angle)
            rotated[index + half] = y * np.cos(angle) + x * np.sin(angle)
        return rotated
