# SPDX-License-Identifier: Apache-2.0
"""Fixes vLLM's sampling on CPUs, for all speculative methods.

`expand_batch_to_tokens` repeats each request's temperature, top-k and top-p once per draft token. On CPUs
its C++ kernel writes to a converted int64 copy that is then dropped, so sampling uses uninitialised memory
(second patch in `patches/`).

`apply_top_k_top_p` takes the maximum of all drafts' top-k. If a request limits top-k alone, a step without
drafts, such as a prompt's first one, crashes the engine (fourth patch).

The V1 runner samples also for requests whose prompt is not read to its end, and then sets the offset of
their generators back. Generators on CPUs have no offset, which ends the engine (fifth patch).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import vllm.v1.sample.ops.topk_topp_sampler as topk_topp_sampler
import vllm.v1.sample.rejection_sampler as rejection_sampler
from vllm.logger import init_logger

from vllm_magicdec.hooking import before, instead

logger = init_logger(f"vllm.{__name__}")


def expand_batch_to_tokens(
    x: torch.Tensor,  # [num_reqs]
    cu_num_tokens: torch.Tensor,  # [num_reqs], tokens up to and including each request
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each request's value once per token, [num_tokens]; `replace_from` becomes `replace_to`."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=num_tokens)


def apply_top_k_top_p(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call vLLM's function unless there are no tokens; `logits` is [num_tokens, vocab_size].

    vLLM 0.33 has one argument more than 0.32.
    """
    return topk_topp_sampler.apply_top_k_top_p(logits, *args, **kwargs) if len(logits) else logits


def patch() -> None:
    """Replace vLLM's functions if they are wrong; call it in the worker, once kernels are in place."""
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


def rewind_generators(runner: Any) -> None:
    """Set generators of seeded requests back after samples that are thrown away."""
    if "set_offset" not in runner._bookkeeping_sync.__code__.co_names:
        return  # vLLM is fixed
    states: dict[int, tuple[torch.Generator, torch.Tensor]] = {}  # by row: generator and its state

    def keep_states(*_: Any, **__: Any) -> None:
        states.clear()
        generators = runner.input_batch.generators
        for row in np.flatnonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs]).tolist():
            if row in generators:
                states[row] = generators[row], generators[row].get_state()

    def rewind_first(bookkeeping: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators
        for row, (generator, state) in states.items():
            generator.set_state(state)
            del generators[row]  # vLLM would ask for its offset
        try:
            return bookkeeping(*args, **kwargs)
        finally:
            generators.update({row: generator for row, (generator, _) in states.items()})

    runner._sample = before(keep_states)(runner, runner._sample)
    runner._bookkeeping_sync = instead(rewind_first)(runner, runner._bookkeeping_sync)
