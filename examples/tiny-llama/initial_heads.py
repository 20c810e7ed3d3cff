# SPDX-License-Identifier: Apache-2.0
"""Attention heads that start as a rough copying circuit, so that few tokens suffice to train recall.

From random weights this model needs tens of millions of tokens before it looks up a key at all; from these
it does after half a million. Training changes every weight afterwards.

- Layer 0: head h attends to the token h + 1 places back (a rotation of a constant query by RoPE's own
  frequencies) and copies it into a subspace of its own.
- Layers 1 and 2: queries and keys compare such copies, shifted by one place, so that a token finds places
  whose *preceding* tokens are its own latest ones; values copy the token found there towards the output.
  They compare in RoPE's slow dimensions, which hardly turn over thousands of tokens.
"""

import math

import torch
from transformers import LlamaForCausalLM, MinistralForCausalLM

EMBEDDING_STD = 0.05
CONSTANT = 0.15  # one embedding coordinate is the same for every token: a bias for Llama, which has none
POSITION_LOGIT = 64.0  # squared length of layer 0's queries and keys, per pair of dimensions
POSITION_PAIRS = 10  # fastest RoPE pairs used to find a place
SLOW_TURN = 1.0  # radians that a slow pair may turn ...
SLOW_DISTANCE = 4096  # ... over this many tokens
MATCH_GAIN = 2.5
COPY_GAIN = {0: 0.05, 1: 0.03, 2: 0.03}
# Which place before the query is compared with which place before the key, per layer.
MATCHES = {1: ((0, 1), (1, 2)), 2: ((1, 2), (3, 4))}


def plant_heads(model: LlamaForCausalLM | MinistralForCausalLM, seed: int) -> None:
    """Overwrite the embedding and the attention of layers 0 to 2, as far as there are so many, in place.

    Expects four query heads on two key/value heads, so that heads 0, 1 and heads 2, 3 share values.
    """
    config = model.config
    hidden, heads, groups, size = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    half, per_group = size // 2, heads // groups
    generator = torch.Generator().manual_seed(seed)
    turns = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)  # radians per token
    slow = [i for i in range(half) if turns[i] * SLOW_DISTANCE < SLOW_TURN]
    slow_dims = slow + [i + half for i in slow]

    def projection(rows: int) -> torch.Tensor:
        """[rows, hidden] orthonormal rows that ignore the constant coordinate."""
        basis = torch.linalg.qr(torch.randn(hidden, rows, generator=generator))[0].T
        basis[:, 0] = 0
        return basis

    def weights(layer: int) -> tuple[torch.Tensor, ...]:
        """A layer's q [heads, size, hidden], k and v [groups, size, hidden], o [hidden, heads, size]."""
        attention = model.model.layers[layer].self_attn
        return (
            attention.q_proj.weight.view(heads, size, hidden),
            attention.k_proj.weight.view(groups, size, hidden),
            attention.v_proj.weight.view(groups, size, hidden),
            attention.o_proj.weight.view(hidden, heads, size),
        )

    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.normal_(0, EMBEDDING_STD, generator=generator)
        embedding[:, 0] = CONSTANT
        # What the constant coordinate is after RMSNorm.
        bias = CONSTANT / math.sqrt(EMBEDDING_STD**2 + CONSTANT**2 / hidden)

        q, k, v, o = weights(0)
        amplitude = math.sqrt(POSITION_LOGIT) / bias
        fast = turns[:POSITION_PAIRS]
        q.zero_()
        k.zero_()
        k[:, :POSITION_PAIRS, 0] = amplitude
        copies = []  # [hidden, size] per head: where the token h + 1 places back is written
        for head in range(heads):
            q[head, :POSITION_PAIRS, 0] = amplitude * torch.cos(fast * (head + 1))
            q[head, half : half + POSITION_PAIRS, 0] = -amplitude * torch.sin(fast * (head + 1))
            copies.append(projection(size).T)
            o[:, head] = COPY_GAIN[0] * copies[head]
        for group in range(groups):
            v[group] = projection(size)
        token_code = [v[head // per_group].clone() for head in range(heads)]

        for layer, matches in MATCHES.items():
            if layer >= config.num_hidden_layers:
                continue
            q, k, v, o = weights(layer)
            q.mul_(0.5)
            k.mul_(0.5)
            for group in range(groups):
                v[group] = projection(size)
                for part, (own, found) in enumerate(matches):
                    dims = slow_dims[part :: len(matches)]
                    code = torch.randn(len(dims), size, generator=generator) / math.sqrt(size)
                    query_reads = token_code[found - 1] if own == 0 else copies[own - 1].T
                    k[group, dims] += MATCH_GAIN * code @ copies[found - 1].T
                    for head in range(group * per_group, (group + 1) * per_group):
                        q[head, dims] += MATCH_GAIN * code @ query_reads
            for head in range(heads):
                o[:, head] = COPY_GAIN[layer] * v[head // per_group].T
