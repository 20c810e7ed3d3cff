# SPDX-License-Identifier: Apache-2.0
"""Targets that vLLM runs with embeddings, of text too: multimodal ones, and all with prompt embeddings.

Their compiled code takes nothing else, so the draft hands embeddings over as well.
"""

from typing import Any

import torch
import torch.nn as nn
from vllm.config import ModelConfig
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from vllm_magicdec.errors import METHOD, MagicDecConfigError


def refuse_more_inputs(model: nn.Module, model_state: Any = None) -> None:
    """Refuse targets that take more than tokens (or embeddings) and positions at every step.

    Args:
        model: the target.
        model_state: what the V2 runner prepares its inputs with.

    Raises:
        MagicDecConfigError: with the reason and the way out.
    """
    has_own_state = model_state is not None and type(model_state) is not DefaultModelState
    if has_own_state or getattr(model, "token_lookback_depth", False):
        raise MagicDecConfigError(
            f"{METHOD}: {type(model).__name__} takes more than tokens and positions at every step, which a "
            "draft step does not have; serve it without speculation"
        )


def takes_embeddings(model_config: ModelConfig) -> bool:
    """Whether vLLM's runners hand the target embeddings, and never token ids."""
    return model_config.supports_multimodal_inputs or model_config.enable_prompt_embeds


def embed(model: nn.Module, tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Embeddings as of text, [num_tokens, hidden_size]; `tokens` [num_tokens] int.

    Drafted tokens are text. Of a prompt's last tokens, which policies observe, some may stand for an image
    and lie outside the vocabulary: any embedding will do.
    """
    return model.embed_input_ids(tokens.clamp(0, vocab_size - 1))
