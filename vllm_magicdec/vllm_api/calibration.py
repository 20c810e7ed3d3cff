# SPDX-License-Identifier: Apache-2.0
"""How large the inputs of the target's linear layers are, measured when its weights are quantised."""

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn as nn
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention


@torch.no_grad()
def mean_squares_of_inputs(
    target: nn.Module, vllm_config: VllmConfig, layers: Collection[nn.Module]
) -> dict[nn.Module, torch.Tensor]:
    """Return the mean squares of linear layers' inputs, [in_features] float32, by layer.

    The target runs once, eagerly, over random tokens. Attention is torch's, causal over all of them, since
    vLLM's backends compute nothing without metadata. A layer that does not run is absent.

    Args:
        target: the target, with its weights loaded.
        vllm_config: the engine's configuration.
        layers: linear layers of the target.
    """
    squares: dict[nn.Module, torch.Tensor] = {}

    def note(layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        mean = inputs[0].flatten(0, -2).float().square().mean(0)
        if not getattr(layer, "input_is_parallel", True):  # the layer takes its rank's part itself
            mean = mean.chunk(layer.tp_size)[layer.tp_rank]
        squares[layer] = mean

    config = vllm_config.model_config
    num_tokens = min(512, config.max_model_len, vllm_config.scheduler_config.max_num_batched_tokens)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.get_vocab_size(), (num_tokens,), generator=generator)
    attend = _causal_attention()
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(note).remove)
        for module in get_layers_from_vllm_config(vllm_config, Attention).values():
            stack.callback(setattr, module.impl, "forward", module.impl.forward)
            module.impl.forward = attend
        stack.enter_context(set_forward_context(None, vllm_config, num_tokens, skip_compiled=True))
        target(input_ids=tokens, positions=torch.arange(num_tokens))
    return squares


def _causal_attention() -> Callable[..., torch.Tensor]:
    """Return a `forward` for vLLM's attention implementations that reads the pass's own keys and values."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(
        layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any, **_: Any
    ) -> torch.Tensor:
        shared = layer.kv_sharing_target_layer_name
        if shared is not None or key is None:
            key, value = seen[shared or layer.layer_name]
        else:
            seen[layer.layer_name] = key, value
        attended = nn.functional.scaled_dot_product_attention(
            *(heads.transpose(0, 1) for heads in (query, key, value)),
            is_causal=True,
            scale=layer.impl.scale,
            enable_gqa=True,
        )
        result: torch.Tensor = output.copy_(attended.transpose(0, 1).reshape(output.shape))
        return result

    return forward
