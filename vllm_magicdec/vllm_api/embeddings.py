# SPDX-License-Identifier: Apache-2.0
"""Targets whose input is embeddings, also of text: multimodal ones, and all with prompt embeddings.

Their compiled code takes no token ids, so draft passes compute embeddings too. Parts of prompts that are
given as embeddings have no token ids.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from vllm.config import ModelConfig
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_magicdec.errors import METHOD, MagicDecConfigError


def refuse_more_inputs(model: nn.Module, model_state: Any = None) -> None:
    """Raise MagicDecConfigError for models that take more than tokens (or embeddings) and positions.

    `model_state` prepares the target's inputs in the V2 runner.
    """
    has_own_state = model_state is not None and type(model_state) is not DefaultModelState
    if has_own_state or getattr(model, "token_lookback_depth", False):
        raise MagicDecConfigError(
            f"{METHOD}: {type(model).__name__} takes more than tokens and positions at every step, which a "
            "draft step does not have; serve it without speculation"
        )


def takes_embeddings(model_config: ModelConfig) -> bool:
    """Whether vLLM's runners always give the target embeddings instead of token ids."""
    return model_config.supports_multimodal_inputs or model_config.enable_prompt_embeds


def embed(model: nn.Module, tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Embed tokens as text, [num_tokens, hidden_size]; `tokens` [num_tokens] int.

    Drafts are text. Among the prompt tokens that policies observe, placeholders of images may lie outside
    the vocabulary; any embedding will do for them.
    """
    return model.embed_input_ids(tokens.clamp(0, vocab_size - 1))


@dataclass(frozen=True)
class _WithoutPromptTokens:
    """Stands for a request of the V1 runner whose prompt has embeddings."""

    request: CachedRequestState

    def get_token_id(self, index: int) -> int:
        return 0 if index < self.request.num_prompt_tokens else self.request.get_token_id(index)


def blank_embedded_prompts(requests: dict[str, Any], inputs: InputBatch) -> dict[str, Any]:
    """Let embeddings in prompts have token id 0 in the V1 runner, as they have in the V2 runner.

    vLLM's proposers raise for them or read whatever the batch's row holds. This changes the batch's
    `token_ids_cpu`, and returns all requests by id for vLLM's bookkeeping of next tokens.
    """
    blanked = dict(requests)
    for row in inputs.req_prompt_embeds:
        length = inputs.num_prompt_tokens[row]
        inputs.token_ids_cpu[row, :length][~inputs.is_token_ids[row, :length]] = 0
        req_id = inputs.req_ids[row]
        blanked[req_id] = _WithoutPromptTokens(requests[req_id])
    return blanked
