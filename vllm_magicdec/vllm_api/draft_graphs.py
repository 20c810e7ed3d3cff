# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of draft steps and passes for the V2 runner, captured and dispatched by vLLM's manager."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec, ChunkedLocalAttentionSpec
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.lora_utils import get_lora_capture_cases
from vllm.v1.worker.utils import AttentionGroup

from vllm_magicdec.attention.switch import better_options
from vllm_magicdec.drafting.sizing import draft_graph_sizes
from vllm_magicdec.drafting.wide_passes import MAX_WIDE_TOKENS
from vllm_magicdec.views.base import PAD_SLOT, DraftStep, LayerPageView, TokenView, View, ViewStep
from vllm_magicdec.views.passes import DraftPass, TokenPassView


def why_no_draft_graphs(cudagraph_mode: CUDAGraphMode, weakest: AttentionGroup) -> str | None:
    """Why draft steps have no CUDA graphs, with the way out, or None if they have.

    Args:
        cudagraph_mode: what the target's attention supports of what was asked for.
        weakest: of its groups, that with the fewest graphs.
    """
    if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
        return None
    if isinstance(weakest.kv_cache_spec, ChunkedLocalAttentionSpec):
        return "vLLM captures no full graphs of layers with local chunks (Llama 4)"
    backend_name, spec = weakest.backend.get_name(), weakest.kv_cache_spec
    if "MLA" in backend_name:
        better = "--attention-backend FLASH_ATTN_MLA on Hopper, FLASHINFER_MLA on Blackwell, or TRITON_MLA"
    else:
        assert isinstance(spec, AttentionSpec)  # others are refused
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


class Capturable(Protocol):
    """What a step consists of; implemented by the V2 adapter."""

    @property
    def num_views(self) -> int:
        """Parts of a step: groups of layers with a view of their own."""
        ...

    def capture_view(self, index: int, num_reqs: int, lens: torch.Tensor, common_len: int | None) -> View:
        """See `drafting.drafter.Drafter.capture_view`."""
        ...

    def step_metadata(self, step: DraftStep, *, for_capture: bool = False) -> Mapping[str, Any]:
        """Attention metadata by layer."""
        ...

    def refresh_metadata(self, step: DraftStep) -> None:
        """Put what backends derive from the step's lengths where a graph over this step looks for it."""
        ...

    def select_adapters(self, num_active: int, num_reqs: int) -> None:
        """Let the next pass be one of requests with so many LoRA adapters (`Adapters.apply_dummies`)."""
        ...

    def forward_and_sample(
        self, tokens: torch.Tensor, step: DraftStep, attn_metadata: Mapping[str, Any]
    ) -> torch.Tensor:
        """The tokens after each request's last one, [num_reqs] int64.

        Args:
            tokens: [num_tokens] int32, as many of each request.
            step: where they look and where their K/V goes; `lens` are of each request's last token.
            attn_metadata: by layer.
        """
        ...

    def forward_and_draw(
        self, tokens: torch.Tensor, step: DraftStep, attn_metadata: Mapping[str, Any]
    ) -> torch.Tensor:
        """The tokens after each of `tokens`, [num_tokens] int64; arguments as for `forward_and_sample`."""
        ...


def step_of_nobody(
    step: Capturable,
    num_reqs: int,
    *,
    num_blocks: int,
    page_sizes: Sequence[int],
    common_lens: Sequence[int | None],
    device: torch.device,
) -> DraftStep:
    """A step over full views, which writes nothing and takes as long as another one.

    The views' buffers are written, as every round does: so what is read lies all over the KV cache.

    Args:
        step: what is run.
        num_reqs: of it.
        num_blocks: of the KV cache.
        page_sizes: tokens, by view.
        common_lens: see `DraftGraphs`.
        device: where it runs.
    """
    positions = torch.zeros(num_reqs, dtype=torch.int64, device=device)
    parts = []
    for group, page_size in enumerate(page_sizes):
        lens = torch.empty_like(positions, dtype=torch.int32)
        view = step.capture_view(group, num_reqs, lens, None)
        if isinstance(view, TokenView):
            places, most, width = view.slots, num_blocks * page_size, view.slots.shape[-1]
            if width in common_lens:  # other kernels read such views
                view = replace(view, common_len=width)
        else:
            places = view.block_tables if isinstance(view, LayerPageView) else view.block_table
            most, width = num_blocks, view.max_len
        numbers = torch.arange(places.numel(), device=device) % most
        places.copy_(numbers.view(places.shape))
        lens.fill_(width)
        parts.append(ViewStep(0, positions, torch.full_like(positions, PAD_SLOT), view))
    return DraftStep(parts)


@dataclass(frozen=True)
class StepDescriptor(BatchExecutionDescriptor):
    """Tells the graphs of one padded batch size apart."""

    common_len: int | None = None  # see `views.base.TokenView`


class DraftGraphs(CudaGraphManager):
    """One graph per padded number of requests: the forward pass and the sampling of one draft step.

    A step has one query token per request, or the same number of them for all, of which the last is drawn
    after.

    It serves all steps of a round and rounds of any length, as they differ only in what lies at the places
    that the graph reads: tokens, positions, slots and lengths are copied there, and views have their own.
    Requests that pad a batch see a token per query and write nothing.

    A backend's metadata is made anew before every replay, as vLLM does for its own draft models: backends
    keep what they derive from lengths in buffers that their kernels were captured with.

    Args:
        vllm_config: the engine's.
        device: where the target runs.
        cudagraph_mode: what the target's attention supports; without full graphs of decode steps there is
            nothing to capture, and every step runs eagerly.
        step: what is captured.
        common_lens: `views.base.TokenView.common_len`s for which the step runs other kernels; None is one.
        num_queries: per request.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        cudagraph_mode: CUDAGraphMode,
        step: Capturable,
        common_lens: Sequence[int | None],
        num_queries: int = 1,
    ) -> None:
        has_full_graphs = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if has_full_graphs else CUDAGraphMode.NONE
        cases = get_lora_capture_cases(vllm_config.lora_config, vllm_config.compilation_config)
        super().__init__(vllm_config, device, mode, decode_query_len=num_queries, lora_capture_cases=cases)
        self._step = step
        self._common_lens = common_lens
        for descs in self._capture_descs.values():
            descs[:] = [
                StepDescriptor(**vars(desc), common_len=n)
                for desc in descs
                if desc.uniform_token_count == num_queries  # vLLM may add verifications of fewer drafts
                for n in common_lens
            ]
        self._captured: dict[StepDescriptor, DraftStep] = {}
        num_views, num_reqs = step.num_views, self.max_num_reqs
        num_tokens = num_reqs * num_queries
        self._tokens = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._slots = torch.full((num_views, num_tokens), PAD_SLOT, dtype=torch.int64, device=device)
        self._lens = torch.full((num_views, num_reqs), num_queries, dtype=torch.int32, device=device)
        self._sampled = torch.zeros(self._num_sampled(num_reqs), dtype=torch.int64, device=device)

    @property
    def _most_tokens(self) -> int:
        """No graph is for more query tokens."""
        return self.vllm_config.scheduler_config.max_num_batched_tokens

    def _num_sampled(self, num_reqs: int) -> int:
        """Tokens that are drawn."""
        return num_reqs

    def _sample(
        self, tokens: torch.Tensor, step: DraftStep, attn_metadata: Mapping[str, Any]
    ) -> torch.Tensor:
        """[_num_sampled] int64; arguments as for `Capturable.forward_and_sample`."""
        return self._step.forward_and_sample(tokens, step, attn_metadata)

    def _init_candidates(self) -> None:
        """vLLM's own, for sizes of draft steps; models are compiled for no more tokens than fit a step."""
        sizes = [size * self.decode_query_len for size in draft_graph_sizes(self.vllm_config)]
        sizes = [size for size in sizes if size <= self._most_tokens]
        self.compilation_config = copy.copy(self.vllm_config.compilation_config)
        self.compilation_config.cudagraph_capture_sizes = sizes
        self.compilation_config.max_cudagraph_capture_size = max(sizes, default=0)
        super()._init_candidates()

    def capture_steps(self) -> None:
        """Capture what `draft_graph_sizes` says."""
        if self.needs_capture():
            self.capture(self._prepare_capture, progress_bar_desc="Capturing draft CUDA graphs")

    def _prepare_capture(
        self, desc: BatchExecutionDescriptor, warmup: bool
    ) -> Callable[[CUDAGraphMode], None]:
        assert isinstance(desc, StepDescriptor) and desc.num_reqs is not None
        num_reqs = desc.num_reqs
        num_tokens, num_sampled = num_reqs * self.decode_query_len, self._num_sampled(num_reqs)
        self._step.select_adapters(desc.num_active_loras, num_sampled)
        # The step that is at the places that the graph reads.
        parts = [
            ViewStep(
                index=0,
                positions=self._positions[:num_tokens],
                slots=slots[:num_tokens],
                view=self._step.capture_view(index, num_reqs, lens[:num_reqs], desc.common_len),
            )
            for index, (slots, lens) in enumerate(zip(self._slots, self._lens, strict=True))
        ]
        step = DraftStep(parts)
        self._captured[desc] = step
        attn_metadata = self._step.step_metadata(step, for_capture=True)

        def run(cudagraph_mode: CUDAGraphMode) -> None:
            self._sampled[:num_sampled].copy_(self._sample(self._tokens[:num_tokens], step, attn_metadata))

        return run

    def replay(self, tokens: torch.Tensor, step: DraftStep, num_adapters: int = 0) -> torch.Tensor | None:
        """The step's sampled tokens, [num_reqs] int64 (of a pass [num_tokens]), valid until the next step.

        Args:
            tokens: [num_reqs x num_queries] int32, the query tokens.
            step: where they look and where their K/V goes.
            num_adapters: `Adapters.num_active` of the round; they are applied.

        Returns:
            None if there is no graph for so many requests.
        """
        num_tokens, num_queries = tokens.shape[0], self.decode_query_len
        num_reqs = num_tokens // num_queries
        desc = self.dispatch(
            num_reqs, num_tokens, uniform_token_count=num_queries, num_active_loras=num_adapters
        )
        if desc.cg_mode != CUDAGraphMode.FULL:
            return None
        lens = [part.view.common_len for part in step.parts if isinstance(part.view, TokenView)]
        common_len = lens[0] if lens and lens[0] in self._common_lens else None
        self._tokens[:num_tokens].copy_(tokens)
        self._positions[:num_tokens].copy_(step.positions)
        for part, slots, lens_in_view in zip(step.parts, self._slots, self._lens, strict=True):
            lens_in_view[:num_reqs].copy_(part.view.lens)
            slots[:num_tokens].copy_(part.slots)
        self._lens[:, num_reqs:].fill_(num_queries)
        self._slots[:, num_tokens:].fill_(PAD_SLOT)
        own = StepDescriptor(**vars(desc), common_len=common_len)
        self._step.refresh_metadata(self._captured[own])
        self.run_fullgraph(own)
        return self._sampled[: self._num_sampled(num_reqs)]


class PassGraphs(DraftGraphs):
    """One graph per padded number of requests: a pass of all of a round's tokens, each of which is drawn
    after (`drafting/wide_passes.py`).
    """

    @property
    def max_captured_reqs(self) -> int:
        """Requests of the largest graph; 0: none was captured."""
        return max((desc.num_reqs or 0 for desc in self.graphs), default=0)

    @property
    def _most_tokens(self) -> int:
        return min(super()._most_tokens, MAX_WIDE_TOKENS)

    def _num_sampled(self, num_reqs: int) -> int:
        return num_reqs * self.decode_query_len

    def _sample(
        self, tokens: torch.Tensor, step: DraftStep, attn_metadata: Mapping[str, Any]
    ) -> torch.Tensor:
        return self._step.forward_and_draw(tokens, step, attn_metadata)


class RoundGraphs:
    """All graphs that draft: those of steps and those of wide passes. Without any, everything runs eagerly.

    Args:
        steps: by query tokens per request.
        passes: by drafts of a round.
    """

    def __init__(
        self, steps: Mapping[int, DraftGraphs] | None = None, passes: Mapping[int, PassGraphs] | None = None
    ) -> None:
        self._steps, self._passes = steps or {}, passes or {}

    @property
    def _every(self) -> Sequence[DraftGraphs]:
        return [*self._steps.values(), *self._passes.values()]

    def capture(self) -> None:
        """Capture all of them; once it has failed, they are to be used no more."""
        for graphs in self._every:
            graphs.capture_steps()

    def max_wide_reqs(self, num_steps: int) -> int | None:
        """Requests of the largest wide pass for so many drafts; None: nothing was captured at all."""
        # Beside steps with graphs, passes without are slower.
        return self._passes[num_steps].max_captured_reqs if any(g.graphs for g in self._every) else None

    def replay_step(
        self, tokens: torch.Tensor, step: DraftStep, num_reqs: int, num_adapters: int
    ) -> torch.Tensor | None:
        """See `DraftGraphs.replay`; `tokens` [num_reqs x queries of the step]."""
        graphs = self._steps.get(len(tokens) // num_reqs)
        return None if graphs is None else graphs.replay(tokens, step, num_adapters)

    def replay_pass(
        self, tokens: torch.Tensor, draft_pass: DraftPass, num_adapters: int
    ) -> torch.Tensor | None:
        """[num_tokens] int64, where there is a graph of such a pass."""
        graphs = self._passes.get(len(tokens) // len(draft_pass.queries.lens))
        if graphs is None:
            return None
        parts = []
        for part in draft_pass.parts:
            assert not isinstance(part.view, TokenPassView)  # refused where passes have graphs
            parts.append(ViewStep(0, part.positions, part.slots, part.view))
        return graphs.replay(tokens, DraftStep(parts), num_adapters)
