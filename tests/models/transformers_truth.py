# SPDX-License-Identifier: Apache-2.0
"""What `transformers` computes in float32: the truth of what plain vLLM decodes."""

from functools import cache
from typing import Any

import torch
from cells import Prompt
from checkpoints import checkpoint
from families import Family

# Logits that two programs compute in another order of sums, with a standard deviation of a few.
MARGIN = 2e-3


@cache
def _model(family: Family) -> torch.nn.Module:
    import transformers

    path, kind = checkpoint(family), getattr(transformers, family.architecture)
    config = transformers.AutoConfig.from_pretrained(path)
    if family.window_excess:
        config.sliding_window += family.window_excess
    # Plain torch, which knows windows, soft caps and sinks.
    attention = {"attn_implementation": "eager"}
    return kind.from_pretrained(path, config=config, dtype=torch.float32, **attention).eval()


@torch.inference_mode()
def assert_best_tokens(family: Family, answers: list[tuple[Prompt, dict[str, Any]]], what: str) -> None:
    """Every generated token is the best one after those before it, up to `MARGIN`.

    Args:
        family: whose model; its prompts have no pictures.
        answers: prompts and what `scenarios.generate` says of their requests.
        what: the configuration, for the message.
    """
    for place, (prompt, request) in enumerate(answers):
        tokens = request["completions"][0]["tokens"]
        logits = _model(family)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        lag = logits.amax(-1) - logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        worst = int(lag.argmax())
        assert lag[worst] < MARGIN, (
            f"{what}: token {worst} of request {place} is {float(lag[worst]):.4f} below transformers' best"
        )
