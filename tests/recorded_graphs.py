# SPDX-License-Identifier: Apache-2.0
"""Simulate CUDA graphs on a CPU: a capture records its operators with their tensors.

A replay runs the same operators on the same memory and nothing else, so it misses whatever a real graph
would: decisions in Python, tensors created since the capture, values read on the host.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu.cudagraph_utils as cudagraph_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

# Reading a value during a capture is an error on CUDA.
HOST_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
SCHEDULER_METADATA_SIZE = 2**20

_patches = pytest.MonkeyPatch()


class RecordedGraph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_replays = 0
        self._operators: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in HOST_READS, f"{func} during a capture"
        result = func(*args, **(kwargs or {}))
        self._operators.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        self.num_replays += 1
        with _disable_current_modes():
            for func, args, kwargs, result in self._operators:
                again = func(*args, **kwargs)
                for old, new in zip(_tensors(result), _tensors(again), strict=True):
                    # Views and in-place results already have their memory.
                    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.copy_(new)


def _tensors(result: Any) -> list[torch.Tensor]:
    values = result if isinstance(result, tuple | list) else [result]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _keep_scheduler_metadata() -> None:
    """Keep the builder's scheduler metadata at fixed addresses, as backends with CUDA graphs do."""
    build, kept, latest = CPUAttentionMetadataBuilder.build, {}, {}

    def build_in_place(self, common_prefix_len, common_attn_metadata, fast_build=False):
        metadata = build(self, common_prefix_len, common_attn_metadata, fast_build)
        key = (id(self), metadata.num_actual_tokens, metadata.max_query_len)
        # It holds pointers into itself, so the original must stay alive. Its size depends on the lengths.
        built = latest[key] = metadata.scheduler_metadata
        metadata.scheduler_metadata = kept.setdefault(key, built.new_zeros(SCHEDULER_METADATA_SIZE))
        metadata.scheduler_metadata[: len(built)].copy_(built)
        return metadata

    _patches.setattr(CPUAttentionMetadataBuilder, "build", build_in_place)


@contextlib.contextmanager
def _capturing(graph: RecordedGraph, pool: Any, stream: Any) -> Iterator[None]:
    with graph:
        yield


def install() -> None:
    _patches.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    _patches.setattr(torch.cuda, "graph", _capturing)
    _patches.setattr(cudagraph_utils, "graph_capture", lambda device: contextlib.nullcontext())
    _patches.setattr(cudagraph_utils, "capture_pool", lambda pool, config: contextlib.nullcontext())
    _patches.setattr(cudagraph_utils, "current_stream", lambda: None)
    platform = type(cudagraph_utils.current_platform)
    _patches.setattr(platform, "get_global_graph_pool", lambda self: None)


def uninstall() -> None:
    _patches.undo()


def capture(speculator: Any, sizes: list[int]) -> None:
    """Capture the draft steps of a V2 speculator on a CPU for these batch sizes."""
    install()
    _keep_scheduler_metadata()
    compilation = speculator.vllm_config.compilation_config
    compilation.cudagraph_capture_sizes = sizes
    compilation.max_cudagraph_capture_size = 512  # vLLM's default on Hopper
    for layer in compilation.static_forward_context.values():
        layer.use_direct_call = True  # an operator that calls back into Python cannot be recorded
    speculator.init_cudagraph_manager(CUDAGraphMode.FULL)
    speculator.capture()


def num_replays(speculator: Any) -> dict[str, int]:
    """Count replays by padded batch size; keys with "x 2" are steps of two query tokens per request."""
    numbers = {}
    for (num_queries, num_sampled), graphs in speculator._graphs.items():
        kind = "" if num_queries == 1 else f" x {num_queries}"
        kind += ", a pass" if num_sampled > 1 else ""
        numbers |= {f"{desc.num_reqs}{kind}": graph.num_replays for desc, graph in graphs.graphs.items()}
    return numbers
