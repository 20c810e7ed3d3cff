# SPDX-License-Identifier: Apache-2.0
"""`transformers` in float32, the reference for plain vLLM."""

from functools import cache
from typing import Any

import torch
from cells import Prompt
from checkpoints import checkpoint
from families import Family

# Difference of logits computed with sums in another order; their standard deviation is a few units.
MARGIN = 2e-3


@cache
def _model(family: Family) -> torch.nn.Module:
    import transformers

    path, model_class = checkpoint(family), getattr(transformers, family.architecture)
    config = transformers.AutoConfig.from_pretrained(path)
    if family.window_excess:
        config.sliding_window += family.window_excess
    # Plain torch, which supports windows, soft caps and sinks.
    attention = {"attn_implementation": "eager"}
    return model_class.from_pretrained(path, config=config, dtype=torch.float32, **attention).eval()


@torch.inference_mode()
def assert_best_tokens(family: Family, answers: list[tuple[Prompt, dict[str, Any]]], what: str) -> None:
    """Assert that every generated token is the best one in its context, up to `MARGIN`."""
    for index, (prompt, request) in enumerate(answers):
        tokens = request["completions"][0]["tokens"]
        logits = _model(family)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        lag = logits.amax(-1) - logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        worst = int(lag.argmax())
        assert lag[worst] < MARGIN, (
            f"{what}: token {worst} of request {index} is {float(lag[worst]):.4f} below transformers' best"
        )
