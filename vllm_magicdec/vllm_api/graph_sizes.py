# SPDX-License-Identifier: Apache-2.0
"""Which sizes vLLM captures full CUDA graphs of, and what has to run without one."""

import math
from collections.abc import Iterator

from vllm.config import CUDAGraphMode, VllmConfig

from vllm_magicdec.config import MagicDecSpeculativeConfig


def captures_by_length(vllm_config: VllmConfig) -> bool:
    """Whether vLLM captures a full CUDA graph for every number of drafts and padded batch size.

    Then each number costs start-up time and memory, and not all sets of numbers have graphs of every batch.
    Elsewhere (CPUs, eager and piecewise engines, the V1 runner, for which vLLM turns full graphs off if
    that number varies) a number costs nothing, and all are chosen among.
    """
    mode = vllm_config.compilation_config.cudagraph_mode
    return bool(mode.decode_mode() == CUDAGraphMode.FULL and mode.separate_routine())


def capture_every_length(vllm_config: VllmConfig) -> None:
    """Have full graphs captured for every number of drafts and every batch within vLLM's largest size.

    vLLM gives a verification the graphs of the next larger number of tokens that any was captured for, and
    none if that one is of other numbers of drafts. So its sizes become, rounded down, multiples of what all
    numbers verify per request. The largest size and those of `max_num_seqs` requests stay, and the nearest
    sizes that each number can have go with them.
    """
    compilation, spec = vllm_config.compilation_config, vllm_config.speculative_config
    assert isinstance(spec, MagicDecSpeculativeConfig)
    positions = {length + 1 for length in (0, *spec.lengths)}
    common, most = math.lcm(*positions), compilation.max_cudagraph_capture_size
    sizes = set(compilation.cudagraph_capture_sizes)
    sizes = {size - size % common if size > common else size for size in sizes}
    sizes |= {most, *(vllm_config.scheduler_config.max_num_seqs * n for n in positions)}
    for n in positions:
        sizes |= {size - size % n for size in sizes} | {-(-size // n) * n for size in sizes}
    compilation.cudagraph_capture_sizes = sorted(size for size in sizes if 0 < size <= most)


def find_missing_graphs(vllm_config: VllmConfig) -> Iterator[str]:
    """What runs without a full CUDA graph by vLLM's own limits, and what to set; a sentence for each."""
    compilation, spec = vllm_config.compilation_config, vllm_config.speculative_config
    assert isinstance(spec, MagicDecSpeculativeConfig)
    if not captures_by_length(vllm_config):
        return
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    drafts = max(spec.lengths, default=spec.num_speculative_tokens)
    if spec.adaptive and max_num_seqs == 1:
        yield (
            f"with --max-num-seqs 1 vLLM captures full CUDA graphs of one number of drafts, {drafts}; with "
            "2 or more also of steps that draft nothing"
        )
    positions, most = drafts + 1, compilation.max_cudagraph_capture_size
    # As vLLM makes the sizes of one number of drafts from those of all.
    num_reqs = (-(-size // positions) for size in compilation.cudagraph_capture_sizes)
    reach = max((n for n in num_reqs if n * positions <= most), default=0)
    if max_num_seqs > reach:
        yield (
            f"vLLM's CUDA graphs end at {most} tokens, so verifications of {drafts} drafts of more than "
            f"{reach} requests at a time run without, which is slower where the GPU waits for the host "
            "(small models, tensor parallelism); if N requests decode at a time, N a multiple of 16, set "
            f"--max-cudagraph-capture-size to {positions} x N; memory and start-up time grow with it"
        )
