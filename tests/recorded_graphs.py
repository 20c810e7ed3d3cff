# SPDX-License-Identifier: Apache-2.0
"""Simulate CUDA graphs on a CPU: a capture records its operators with their tensors.

A replay runs the same operators on the same memory and nothing else, so it misses whatever a real graph
would: decisions in Python, tensors created since the capture, values read on the host. The rest of vLLM's
machinery (`CudaGraphManager`) is unchanged.
"""

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu.cudagraph_utils as cudagraph_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

from vllm_magicdec.views.round import PageView, Part, Pass, Queries, Round, TokenView
from vllm_magicdec.views.slots import DraftSlots
from vllm_magicdec.views.token_round import TokenRound
from vllm_magicdec.vllm_api.draft_graphs import DraftGraphs

# Reading a value during a capture is an error on CUDA.
HOST_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
SCHEDULER_METADATA_SIZE = 2**20

_patches = pytest.MonkeyPatch()


class RecordedGraph(TorchDispatchMode):
    """Replaces `torch.cuda.CUDAGraph`."""

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


class KernelsOutsideGraphs(TorchDispatchMode):
    """Counts the operators outside replays that would launch a kernel on a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func == torch.ops.aten._foreach_copy_.default:
            # It is one kernel on CUDA only for equal dtypes, shapes and strides.
            targets, sources = args
            is_fused = all(len({tensor.dtype for tensor in tensors}) == 1 for tensors in args) and all(
                (one.shape, one.stride()) == (other.shape, other.stride())
                for one, other in zip(targets, sources, strict=True)
            )
            self.count += 1 if is_fused else len(targets)
        else:
            self.count += not func.is_view
        return func(*args, **(kwargs or {}))


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
    """Replace CUDA graphs with recorded ones in this process."""
    _patches.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    _patches.setattr(torch.cuda, "graph", _capturing)
    _patches.setattr(cudagraph_utils, "graph_capture", lambda device: contextlib.nullcontext())
    _patches.setattr(cudagraph_utils, "capture_pool", lambda pool, config: contextlib.nullcontext())
    _patches.setattr(cudagraph_utils, "current_stream", lambda: None)
    platform = type(cudagraph_utils.current_platform)
    _patches.setattr(platform, "get_global_graph_pool", lambda self: None)


def uninstall() -> None:
    """Undo `install` and `capture`."""
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
    for (num_queries, num_sampled), graphs in speculator._graphs._graphs.items():
        kind = "" if num_queries == 1 else f" x {num_queries}"
        kind += ", a pass" if num_sampled > 1 else ""
        numbers |= {f"{desc.num_reqs}{kind}": graph.num_replays for desc, graph in graphs.graphs.items()}
    return numbers


@torch.inference_mode()
def main() -> None:
    """Test steps of captured, smaller and larger batches; runs in a separate process."""
    install()
    cudagraph_utils.get_pp_group = lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True)
    cudagraph_utils.is_global_first_rank = lambda: False
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=5, max_num_batched_tokens=9),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[2, 4, 8], max_cudagraph_capture_size=8),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=None,
        lora_config=None,
    )
    slots = torch.zeros((1, 6, 1, 8), dtype=torch.int32)
    block_table = torch.zeros((6, 3), dtype=torch.int32)
    written = torch.full((2, 64), -1)  # by group of layers and slot
    num_with_experts = torch.zeros(1, dtype=torch.int64)
    refreshed = []  # what graphs recorded

    class Draft:
        """Samples tokens that depend on all inputs, and writes like attention layers of two groups."""

        num_views = 2
        num_speculative_steps = 15
        current_draft_step = torch.tensor(0)

        def capture_view(self, index, num_reqs, lens, common_len):
            if index == 0:
                return TokenView(lens, slots[:, :num_reqs], common_len)
            return PageView(lens, block_table[:num_reqs], 3)

        def pass_metadata(self, draft_pass, *, for_capture=False):
            return {"length": draft_pass.parts[0].view.common_len or 0}

        def refresh_metadata(self, draft_pass):
            pass

        def record_refresh(self, attn_metadata):
            refreshed.append(self.current_draft_step.add(0))  # recorded: it follows the step

        def select_adapters(self, num_active, num_tokens):
            assert num_active == 0

        def forward_and_sample(self, draft_pass, attn_metadata):
            tokens, positions = draft_pass.tokens, draft_pass.positions
            num_with_experts.copy_((~draft_pass.is_padding).sum())
            for own, part in zip(written, draft_pass.parts, strict=True):
                own.index_copy_(0, torch.where(part.slots < 0, 63, part.slots), positions)
            chosen, pages = (part.view for part in draft_pass.parts)
            read = chosen.slots[0, :, 0, 0].long() + chosen.lens
            read = read + 100 * (pages.block_table[:, 1].long() + pages.lens)
            read = read + 10**4 * refreshed[-1]
            return tokens.long() + 100 * positions + 10_000 * read + 10**9 * attn_metadata["length"]

    graphs = DraftGraphs(config, torch.device("cpu"), CUDAGraphMode.FULL_AND_PIECEWISE, Draft(), (None, 8))
    graphs.capture_passes()
    # The largest batch of 5 requests is captured too, which vLLM's sizes omit; these do not change.
    assert sorted({desc.num_reqs for desc in graphs.graphs}) == [2, 4, 5] and len(graphs.graphs) == 6
    assert config.compilation_config.cudagraph_capture_sizes == [2, 4, 8]
    for round_, (num_reqs, common_len) in enumerate(itertools.product((4, 1, 5, 3, 2), (None, 8, 5))):
        tokens, lens, page_lens = torch.randint(0, 100, (3, num_reqs), dtype=torch.int32)
        positions = torch.randint(0, 100, (num_reqs,))
        slots[:, :num_reqs] = torch.randint(0, 50, (1, num_reqs, 1, 8))
        block_table[:num_reqs] = torch.randint(0, 50, (num_reqs, 3))
        written.fill_(-1)
        own, other = torch.randperm(50)[:num_reqs], torch.randperm(50)[:num_reqs]
        view = TokenView(lens, slots[:, :num_reqs], common_len)
        pages = PageView(page_lens, block_table[:num_reqs], 3)
        parts = [Part(positions, own, view), Part(positions, other, pages)]
        sampled = graphs.replay(Pass(tokens, Queries.uniform(num_reqs, round_), parts))
        length = 8 if common_len == 8 else 0  # nothing was captured for 5
        read = slots[0, :num_reqs, 0, 0].long() + lens
        read = read + 100 * (block_table[:num_reqs, 1].long() + page_lens) + 10**4 * round_
        expected = tokens + 100 * positions + 10_000 * read + 10**9 * length
        assert sampled.dtype == torch.int32 and torch.equal(sampled, expected.int())
        # Requests that pad the batch have written nothing.
        assert torch.equal(written[0, own], positions) and torch.equal(written[1, other], positions)
        assert (written[:, :63] >= 0).sum(1).tolist() == [num_reqs, num_reqs]
        assert num_with_experts.item() == num_reqs

    # A step of token views launches three kernels outside its graph: two copies, and the view's own change.
    slots_of_drafts = DraftSlots(
        page_size=8, max_num_reqs=6, max_num_steps=4, max_model_len=60, device=torch.device("cpu")
    )
    pages = PageView(torch.ones(5, dtype=torch.int32), block_table[:5], 3)
    for _ in range(2):  # the first round's batch has another size than the one before
        own = TokenRound(
            slots_of_drafts,
            lens=torch.full((4, 5), 8, dtype=torch.int32),
            slots=slots[:, :5],
            query_columns=torch.zeros((4, 5), dtype=torch.int64),
            query_slots=torch.zeros((4, 5), dtype=torch.int32),
            common_len=8,
        )
        other = SimpleNamespace(step=lambda index: slots_of_drafts.step(index, 5, pages))
        steps, tokens, kept = Round([own, other]), torch.zeros(5, dtype=torch.int32), []
        with KernelsOutsideGraphs() as outside:
            for index in range(4):
                tokens = graphs.replay(steps.step(index, tokens))
                kept.append(tokens)
    assert 0 < outside.count <= 3 * len(kept)
    assert len({tokens.data_ptr() for tokens in kept}) == len(kept)  # valid until the next round

    class DraftOfTwo(Draft):
        """Takes two tokens of each request."""

        def forward_and_sample(self, draft_pass, attn_metadata):
            return draft_pass.tokens[1::2].long()

    released = weakref.ref(graphs)
    graphs = None
    assert released() is None, "graphs are freed with the last reference"

    # No graph has more tokens than a step: models are compiled for no more.
    graphs = DraftGraphs(config, torch.device("cpu"), CUDAGraphMode.FULL, DraftOfTwo(), (None,), 2)
    graphs.capture_passes()
    assert sorted(desc.num_reqs for desc in graphs.graphs) == [2, 4]
    # No graph is larger than vLLM's largest.
    config.scheduler_config.max_num_batched_tokens = 2048
    config.scheduler_config.max_num_seqs = 600
    config.compilation_config = SimpleNamespace(
        cudagraph_capture_sizes=[2, 4], max_cudagraph_capture_size=4
    )
    graphs = DraftGraphs(config, torch.device("cpu"), CUDAGraphMode.FULL_AND_PIECEWISE, Draft(), (None,))
    graphs.capture_passes()
    assert sorted(desc.num_reqs for desc in graphs.graphs) == [2, 4]
    view = TokenView(torch.ones(5, dtype=torch.int32), slots[:, :5], None)
    many = Part(torch.zeros(5).long(), torch.arange(5), view)
    many_reqs = Pass(torch.zeros(5, dtype=torch.int32), Queries.uniform(5, 0), [many, many])
    assert graphs.replay(many_reqs) is None


if __name__ == "__main__":
    main()
