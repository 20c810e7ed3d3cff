# SPDX-License-Identifier: Apache-2.0
"""Mends vLLM 0.32.0's rejection sampler on CPU, which samples from the wrong distribution.

`expand_batch_to_tokens` repeats each request's temperature, top-k and top-p once per draft token. On CPU it
hands its float result to a C++ kernel as a converted int64 copy that is then dropped, so every speculative
method samples with whatever the memory held. The same mend for vLLM itself is the second patch in
`patches/vllm-0.32.0/`.
"""

import torch
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


def mend() -> None:
    """Replace vLLM's function if it is wrong here; call it in the worker, once kernels are in place."""
    x, counts = torch.tensor([0.25, 0.75]), torch.tensor([1, 3], dtype=torch.int32)
    found = rejection_sampler.expand_batch_to_tokens(x, counts, 3)
    if torch.equal(found, torch.tensor([0.25, 0.75, 0.75])):
        return
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    logger.info_once(
        "Replaced vLLM's expand_batch_to_tokens, which loses temperature and top-p on CPU, so that "
        "sampled output keeps the target's distribution."
    )
