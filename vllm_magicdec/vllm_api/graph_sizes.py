# SPDX-License-Identifier: Apache-2.0
"""Batch sizes of vLLM's full CUDA graphs, and steps that run without one."""

import math
from collections.abc import Iterator

from vllm.config import CUDAGraphMode, VllmConfig

from vllm_magicdec.config import AdaptiveConfig


def captures_by_length(vllm_config: VllmConfig) -> bool:
    """Whether vLLM captures a full CUDA graph for every number of drafts and padded batch size.

    Each number of drafts then costs start-up time and memory. Elsewhere (CPUs, eager and piecewise engines,
    and the V1 runner, which captures none for other numbers) it costs nothing.
    """
    mode = vllm_config.compilation_config.cudagraph_mode
    return vllm_config.use_v2_model_runner and bool(
        mode.decode_mode() == CUDAGraphMode.FULL and mode.separate_routine()
    )


def capture_every_length(vllm_config: VllmConfig) -> None:
    """Set capture sizes so that every number of drafts has full graphs up to vLLM's largest size.

    vLLM dispatches a verification to the next larger captured size, and runs it eagerly if that size is not
    a multiple of its tokens per request. So sizes are rounded down to common multiples; the largest size,
    those of `max_num_seqs` requests, and the nearest multiples for each number of drafts are added.
    """
    compilation, spec = vllm_config.compilation_config, vllm_config.speculative_config
    assert isinstance(spec, AdaptiveConfig)
    positions = {length + 1 for length in (0, *spec.lengths)}
    common, max_size = math.lcm(*positions), compilation.max_cudagraph_capture_size
    sizes = set(compilation.cudagraph_capture_sizes)
    sizes = {size - size % common if size > common else size for size in sizes}
    sizes |= {max_size, *(vllm_config.scheduler_config.max_num_seqs * n for n in positions)}
    for n in positions:
        sizes |= {size - size % n for size in sizes} | {-(-size // n) * n for size in sizes}
    compilation.cudagraph_capture_sizes = sorted(size for size in sizes if 0 < size <= max_size)


def find_missing_graphs(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield a warning for each kind of step without full CUDA graphs, with the option to set."""
    compilation, spec = vllm_config.compilation_config, vllm_config.speculative_config
    assert isinstance(spec, AdaptiveConfig)
    if not captures_by_length(vllm_config):
        return
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    drafts = max(spec.lengths, default=spec.num_speculative_tokens)
    if spec.adaptive and max_num_seqs == 1:
        yield (
            f"with --max-num-seqs 1 vLLM captures full CUDA graphs of one number of drafts, {drafts}; with "
            "2 or more also of steps that draft nothing"
        )
    positions, max_size = drafts + 1, compilation.max_cudagraph_capture_size
    # As vLLM derives the sizes for one number of drafts.
    num_reqs = (-(-size // positions) for size in compilation.cudagraph_capture_sizes)
    reach = max((n for n in num_reqs if n * positions <= max_size), default=0)
    if max_num_seqs > reach:
        yield (
            f"vLLM's CUDA graphs end at {max_size} tokens: verifications of {drafts} drafts of more than "
            f"{reach} requests at a time run without, which is slower where the GPU waits for the host "
            "(small models, tensor parallelism); if N requests decode at a time, N a multiple of 16, set "
            f"--max-cudagraph-capture-size to {positions} x N; memory and start-up time grow with it"
        )
