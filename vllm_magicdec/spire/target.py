# SPDX-License-Identifier: Apache-2.0
"""The target in training: its activations and logits, and a draft's initial weights."""

from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from vllm_magicdec.spire.model import SpireDraft
from vllm_magicdec.spire.settings import SpireError, SpireSettings


class Target:
    """A frozen Llama, by its name or folder.

    Raises:
        SpireError: the model cannot be loaded, is no Llama, or is quantised.
    """

    def __init__(self, model: str, dtype: torch.dtype, device: torch.device) -> None:
        try:
            config = AutoConfig.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise _cannot_be_loaded(model, error) from None
        if config.model_type != "llama":
            raise SpireError(f"--model {model} has the type {config.model_type}; name a Llama")
        if getattr(config, "quantization_config", None) is not None:
            raise SpireError(f"--model {model} is quantised; name the original model")
        self.config: LlamaConfig = config
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise _cannot_be_loaded(model, error) from None
        self.model = loaded.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def run(self, tokens: Tensor, layers: tuple[int, ...], cache: Any = None) -> tuple[Tensor, Tensor]:
        """Compute the residual stream and the logits of sequences.

        Args:
            tokens: `[batch, length]` int64.
            layers: numbers of blocks after which to take the residual stream.
            cache: transformers' cache of the tokens before, which is extended.

        Returns:
            Activations `[batch, length, len(layers), hidden_size]`, logits `[batch, length, vocab_size]`.
        """
        body = self.model.model
        taken: dict[int, Tensor] = {}

        def take(layer: int) -> Any:
            def hook(module: Any, arguments: tuple, keywords: dict) -> None:
                taken[layer] = arguments[0] if arguments else keywords["hidden_states"]

            return hook

        # The input of the final norm is the last block's output.
        modules = [*body.layers, body.norm]
        hooks = [
            modules[layer].register_forward_pre_hook(take(layer), with_kwargs=True) for layer in layers
        ]
        try:
            logits = self.model(tokens, past_key_values=cache, use_cache=cache is not None).logits
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack([taken[layer] for layer in layers], dim=2), logits


def _cannot_be_loaded(model: str, error: Exception) -> SpireError:
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return SpireError(f"--model {model} cannot be loaded: {reason}; name another")


def make_draft(target: Target, settings: SpireSettings) -> SpireDraft:
    """Create a draft in float32 with the target's embedding, last blocks, norm and unembedding."""
    fields = {**target.config.to_dict(), "num_hidden_layers": settings.num_layers, "dtype": "float32"}
    if fields.get("head_dim") is None:
        fields["head_dim"] = target.config.hidden_size // target.config.num_attention_heads
    draft = SpireDraft(LlamaConfig(**fields), settings).float()
    source = target.model.state_dict()
    taken = {}
    for name in draft.state_dict():
        if name == "model.memory_logits":
            continue
        origin = name
        if name.startswith("model.layers."):
            index, rest = name.removeprefix("model.layers.").split(".", 1)
            origin = f"model.layers.{settings.target_layers[int(index)]}.{rest}"
        taken[name] = source[origin].float()
    draft.load_state_dict(taken, strict=False)
    draft.tie_weights()
    return draft.to(target.model.device)
