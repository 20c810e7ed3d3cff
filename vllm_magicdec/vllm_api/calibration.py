# SPDX-License-Identifier: Apache-2.0
"""How large the inputs of the target's linear layers are, measured before it serves."""

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn as nn
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

_NUM_TOKENS = 512


@torch.no_grad()
def mean_squares_of_inputs(
    target: nn.Module, vllm_config: VllmConfig, layers: Collection[nn.Module]
) -> dict[nn.Module, torch.Tensor]:
    """Return the mean squares of linear layers' inputs, [in_features] float32, by layer.

    The target runs once, eagerly, over random tokens. Attention is torch's, causal over all of them, since
    vLLM's backends return nothing without metadata. A layer that does not run is absent.

    Args:
        target: the target, with its weights loaded.
        vllm_config: the engine's configuration.
        layers: linear layers of the target.
    """
    squares: dict[nn.Module, torch.Tensor] = {}

    def note(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        squares[layer] = inputs[0].flatten(0, -2).float().square().mean(0)

    config = vllm_config.model_config
    num_tokens = min(_NUM_TOKENS, config.max_model_len)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.get_vocab_size(), (num_tokens,), generator=generator)
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(note).remove)
        for module in target.modules():
            if isinstance(module, Attention):
                stack.callback(module.register_forward_hook(_attend).remove)
        stack.enter_context(set_forward_context(None, vllm_config, num_tokens, skip_compiled=True))
        target(input_ids=tokens, positions=torch.arange(num_tokens))
    return squares


def _attend(
    layer: Any, inputs: tuple[torch.Tensor | None, ...], output: torch.Tensor
) -> torch.Tensor | None:
    query, key, value = inputs[:3]
    if query is None or key is None or value is None:  # of another layer
        return None
    attended = nn.functional.scaled_dot_product_attention(
        query.view(-1, layer.num_heads, layer.head_size).transpose(0, 1),
        key.view(-1, layer.num_kv_heads, layer.head_size).transpose(0, 1),
        value.view(-1, layer.num_kv_heads, layer.head_size_v).transpose(0, 1),
        is_causal=True,
        scale=layer.impl.scale,
        enable_gqa=True,
    )
    return attended.transpose(0, 1).reshape(output.shape)
