# SPDX-License-Identifier: Apache-2.0
"""Mends vLLM 0.32.0's rejection sampler on CPU, which samples wrongly and in one case ends the engine.

`expand_batch_to_tokens` repeats each request's temperature, top-k and top-p once per draft token. On CPU it
hands its float result to a C++ kernel as a converted int64 copy that is then dropped, so every speculative
method samples with whatever the memory held. The same mend for vLLM itself is the second patch in
`patches/vllm-0.32.0/`.

`apply_top_k_top_p` asks for the largest top-k of all drafts. A step without any, as every first one of a
prompt is, then ends the engine if a request limits top-k alone, with every speculative method (the fourth
patch).
"""

import torch
import vllm.v1.sample.ops.topk_topp_sampler as topk_topp_sampler
import vllm.v1.sample.rejection_sampler as rejection_sampler
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")


def expand_batch_to_tokens(
    x: torch.Tensor,  # [num_reqs]
    cu_num_tokens: torch.Tensor,  # [num_reqs], tokens up to and including each request
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Each request's value once per token, [num_tokens]; a value `replace_from` becomes `replace_to`."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=num_tokens)


def apply_top_k_top_p(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
    k: torch.Tensor | None,  # [num_tokens]
    p: torch.Tensor | None,  # [num_tokens]
) -> torch.Tensor:
    """vLLM's, where there are tokens."""
    return topk_topp_sampler.apply_top_k_top_p(logits, k, p) if len(logits) else logits


def mend() -> None:
    """Replace vLLM's functions where they are wrong; call it in the worker, once kernels are in place."""
    try:
        rejection_sampler.apply_top_k_top_p(torch.empty(0, 2), torch.empty(0, dtype=torch.int32), None)
    except RuntimeError:
        rejection_sampler.apply_top_k_top_p = apply_top_k_top_p
    x, counts = torch.tensor([0.25, 0.75]), torch.tensor([1, 3], dtype=torch.int32)
    found = rejection_sampler.expand_batch_to_tokens(x, counts, 3)
    if torch.equal(found, torch.tensor([0.25, 0.75, 0.75])):
        return
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    logger.info_once(
        "Replaced vLLM's expand_batch_to_tokens, which loses temperature and top-p on CPU, so that "
        "sampled output keeps the target's distribution."
    )
