# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the draft's passes for the V2 runner, captured and dispatched by vLLM's manager."""

import copy
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec, ChunkedLocalAttentionSpec
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.lora_utils import get_lora_capture_cases
from vllm.v1.worker.utils import AttentionGroup

from vllm_magicdec.attention.switch import better_options
from vllm_magicdec.drafting.drafter import Drafter
from vllm_magicdec.drafting.sizing import draft_graph_sizes
from vllm_magicdec.drafting.wide_passes import MAX_WIDE_TOKENS
from vllm_magicdec.views.round import LayerPageView, PageView, Part, Pass, Queries, TokenView
from vllm_magicdec.views.tensors import PAD_SLOT
from vllm_magicdec.vllm_api.adapters import Adapters
from vllm_magicdec.vllm_api.page_metadata import PageMetadata


def why_no_draft_graphs(cudagraph_mode: CUDAGraphMode, weakest: AttentionGroup) -> str | None:
    """Return why draft steps have no CUDA graphs, and how to get them; None if they have.

    The target's attention supports `cudagraph_mode`, and of its groups `weakest` the fewest graphs.
    """
    if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
        return None
    if isinstance(weakest.kv_cache_spec, ChunkedLocalAttentionSpec):
        return "vLLM captures no full graphs of layers with local chunks (Llama 4)"
    backend_name, spec = weakest.backend.get_name(), weakest.kv_cache_spec
    if "MLA" in backend_name:
        better = "--attention-backend FLASH_ATTN_MLA on Hopper, FLASHINFER_MLA on Blackwell, or TRITON_MLA"
    else:
        assert isinstance(spec, AttentionSpec)
        better = better_options(spec)
    ways_out = f"use {better}, and leave cudagraph_mode at vLLM's default"
    if backend_name == "FLASHINFER":
        ways_out += (
            ", or, on Hopper and Blackwell, give FLASHINFER its kernels: pip install flashinfer-cubin"
        )
    return (
        f"with attention backend {backend_name} vLLM captures no full graphs of verifications here "
        f"(cudagraph_mode is {cudagraph_mode.name}); {ways_out}"
    )


def dummy_step(drafter: Drafter, num_reqs: int, num_blocks: int, device: torch.device) -> Pass:
    """Create a step over full views that takes as long as a real one and writes no K/V.

    The views are filled with pages from all over the KV cache, the same in every layer.
    """
    positions = torch.zeros(num_reqs, dtype=torch.int64, device=device)
    parts = []
    for index, group in enumerate(drafter.groups):
        lens = torch.empty_like(positions, dtype=torch.int32)
        view = drafter.capture_view(index, num_reqs, lens, None)
        if isinstance(view, TokenView):
            entries, width = view.slots, view.slots.shape[-1]
            num_values = num_blocks * group.cache.block_size
            if width in drafter.common_lens:  # such views have their own kernels
                view = replace(view, common_len=width)
        else:
            entries = view.block_tables if isinstance(view, LayerPageView) else view.block_table
            num_values, width = num_blocks, view.max_len
        # Of one layer only: the views of all layers may take gigabytes.
        shape = entries.shape if isinstance(view, PageView) else entries.shape[1:]
        values = torch.arange(math.prod(shape), dtype=torch.int32, device=device).remainder_(num_values)
        entries.copy_(values.view(shape))
        lens.fill_(width)
        parts.append(Part(positions, torch.full_like(positions, PAD_SLOT), view))
    tokens = torch.zeros(num_reqs, dtype=torch.int32, device=device)
    return Pass(tokens, Queries.uniform(num_reqs, 0), parts)


@dataclass(frozen=True)
class PassDescriptor(BatchExecutionDescriptor):
    """Distinguishes the graphs of one padded batch size."""

    common_len: int | None = None  # see `views.round.TokenView`


class DraftGraphs(CudaGraphManager):
    """CUDA graphs of passes of equally many queries per request, one per padded number of requests.

    A graph holds the forward pass and sampling. One graph serves all steps of rounds of any length: tokens,
    positions, slots and lengths are copied into static buffers, and views have their own. Padding requests
    attend to one token per query, write nothing and get no experts.

    Kernels outside a graph cost the host more time than a small draft takes, so a replay launches two: one
    copies all int64 inputs, one all int32 inputs. Backends derive values from lengths and keep them in
    buffers that their captured kernels read. The graph updates these if the backend supports it, as in
    vLLM's own speculators; otherwise metadata is rebuilt before every replay.

    Args:
        cudagraph_mode: mode that the target's attention supports; without full decode graphs, nothing is
            captured and every pass runs eagerly.
        forward_and_sample: runs a pass with this metadata, and samples after every query of
            `Queries.sampled`, [num_sampled] int64.
        current_step: [] int64, `Queries.first_sampled` of the pass, which sampling reads.
        num_queries: queries per request.
        num_sampled: the last of these, after which a token is sampled.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        cudagraph_mode: CUDAGraphMode,
        drafter: Drafter,
        metadata: PageMetadata,
        adapters: Adapters | None,
        forward_and_sample: Callable[[Pass, Mapping[str, Any]], torch.Tensor],
        current_step: torch.Tensor,
        num_queries: int = 1,
        num_sampled: int = 1,
    ) -> None:
        # Passes with lookups are worth it while they are small.
        self._max_tokens = MAX_WIDE_TOKENS if num_sampled > 1 else sys.maxsize
        self._num_sampled = num_sampled
        has_full_graphs = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if has_full_graphs else CUDAGraphMode.NONE
        cases = get_lora_capture_cases(vllm_config.lora_config, vllm_config.compilation_config)
        super().__init__(vllm_config, device, mode, decode_query_len=num_queries, lora_capture_cases=cases)
        self._drafter, self._metadata, self._adapters = drafter, metadata, adapters
        self._forward_and_sample, self._current_step = forward_and_sample, current_step
        # Values of `views.round.TokenView.common_len` with their own kernels, including None.
        self._common_lens = drafter.common_lens
        for descs in self._capture_descs.values():
            descs[:] = [
                PassDescriptor(**vars(desc), common_len=n)
                for desc in descs
                if desc.uniform_token_count == num_queries  # vLLM may add verifications of fewer drafts
                for n in self._common_lens
            ]
        self._captured: dict[PassDescriptor, Pass] = {}
        num_views, num_reqs = len(drafter.groups), self.max_num_reqs
        num_tokens = num_reqs * num_queries
        self._is_padding = torch.ones(num_tokens, dtype=torch.bool, device=device)
        self._tokens = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._slots = torch.full((num_views, num_tokens), PAD_SLOT, dtype=torch.int64, device=device)
        self._lens = torch.full((num_views, num_reqs), num_queries, dtype=torch.int32, device=device)
        self._num_unpadded = 0  # requests before those with the inputs of padding; captures change any
        num_steps = vllm_config.num_speculative_tokens
        self._indices = torch.arange(num_steps, device=device)
        self._sampled = torch.zeros((num_steps, num_reqs * num_sampled), dtype=torch.int32, device=device)

    @property
    def max_captured_reqs(self) -> int:
        """Batch size of the largest graph; 0: none was captured."""
        return max((desc.num_reqs or 0 for desc in self.graphs), default=0)

    def _init_candidates(self) -> None:
        num_queries = self.decode_query_len
        sizes = [
            size * num_queries
            for size in draft_graph_sizes(self.vllm_config, num_queries, self._max_tokens)
        ]
        self.compilation_config = copy.copy(self.vllm_config.compilation_config)
        self.compilation_config.cudagraph_capture_sizes = sizes
        self.compilation_config.max_cudagraph_capture_size = max(sizes, default=0)
        super()._init_candidates()

    def capture_passes(self) -> None:
        """Capture graphs of the sizes in `draft_graph_sizes`."""
        if self.needs_capture():
            self.capture(self._prepare_capture, progress_bar_desc="Capturing draft CUDA graphs")

    def _prepare_capture(
        self, desc: BatchExecutionDescriptor, warmup: bool
    ) -> Callable[[CUDAGraphMode], None]:
        assert isinstance(desc, PassDescriptor) and desc.num_reqs is not None
        num_reqs, num_queries = desc.num_reqs, self.decode_query_len
        num_tokens, num_sampled = num_reqs * num_queries, num_reqs * self._num_sampled
        if self._adapters is not None:
            self._adapters.apply_dummies(desc.num_active_loras, num_sampled)
        # The pass in the static buffers.
        parts = [
            Part(
                positions=self._positions[:num_tokens],
                slots=slots[:num_tokens],
                view=self._drafter.capture_view(index, num_reqs, lens[:num_reqs], desc.common_len),
            )
            for index, (slots, lens) in enumerate(zip(self._slots, self._lens, strict=True))
        ]
        queries = Queries.uniform(num_reqs, self._num_sampled - num_queries, num_queries)
        draft_pass = Pass(
            self._tokens[:num_tokens], queries, parts, is_padding=self._is_padding[:num_tokens]
        )
        self._captured[desc] = draft_pass
        attn_metadata = self._metadata.of_pass(draft_pass, for_capture=True)

        def run(cudagraph_mode: CUDAGraphMode) -> None:
            self._metadata.record_refresh(attn_metadata)
            sampled = self._forward_and_sample(draft_pass, attn_metadata).to(torch.int32)
            index = self._current_step.view(1)
            self._sampled[:, :num_sampled].index_copy_(0, index, sampled.unsqueeze(0))

        return run

    def replay(self, draft_pass: Pass, num_adapters: int = 0) -> torch.Tensor | None:
        """Replay the graph of a pass.

        The pass has `num_queries` queries of every request, and samples after `num_sampled`.

        Returns:
            The sampled tokens, [num_reqs * num_sampled] int32, valid until the same step of the next round;
            None if there is no graph for this batch size.
        """
        num_tokens, num_queries = len(draft_pass.tokens), self.decode_query_len
        num_reqs, parts = num_tokens // num_queries, draft_pass.parts
        desc = self.dispatch(
            num_reqs, num_tokens, uniform_token_count=num_queries, num_active_loras=num_adapters
        )
        if desc.cg_mode != CUDAGraphMode.FULL:
            return None
        if num_reqs != self._num_unpadded:
            self._num_unpadded = num_reqs
            self._is_padding[:num_tokens].fill_(False)
            self._is_padding[num_tokens:].fill_(True)
            self._lens[:, num_reqs:].fill_(num_queries)
            self._slots[:, num_tokens:].fill_(PAD_SLOT)
        lens = [part.view.common_len for part in parts if isinstance(part.view, TokenView)]
        common_len = lens[0] if lens and lens[0] in self._common_lens else None
        index = draft_pass.queries.first_sampled
        # One kernel each on CUDA, because all tensors of a list have the same dtype.
        torch._foreach_copy_(
            [self._current_step, self._positions[:num_tokens], *self._slots[:, :num_tokens]],
            [self._indices[index], draft_pass.positions, *(part.slots for part in parts)],
        )
        torch._foreach_copy_(
            [self._tokens[:num_tokens], *self._lens[:, :num_reqs]],
            [draft_pass.tokens, *(part.view.lens for part in parts)],
        )
        own = PassDescriptor(**vars(desc), common_len=common_len)
        self._metadata.refresh(self._captured[own])
        self.run_fullgraph(own)
        return self._sampled[index, : num_reqs * self._num_sampled]
