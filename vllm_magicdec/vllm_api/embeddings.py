# SPDX-License-Identifier: Apache-2.0
"""Targets that vLLM runs with embeddings, of text too: multimodal ones, and all with prompt embeddings.

Their compiled code takes nothing else, so the draft hands embeddings over as well.
"""

import torch
import torch.nn as nn
from vllm.config import ModelConfig


def takes_embeddings(model_config: ModelConfig) -> bool:
    """Whether vLLM's runners hand the target embeddings, and never token ids."""
    return model_config.supports_multimodal_inputs or model_config.enable_prompt_embeds


def embed(model: nn.Module, tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Embeddings as of text, [num_tokens, hidden_size]; `tokens` [num_tokens] int.

    Drafted tokens are text. Of a prompt's last tokens, which policies observe, some may stand for an image
    and lie outside the vocabulary: any embedding will do.
    """
    return model.embed_input_ids(tokens.clamp(0, vocab_size - 1))
