# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's plans for token views, made without host synchronisation."""

import logging

import torch

from vllm_magicdec.attention import KVRows
from vllm_magicdec.attention.flashinfer_attention import (
    FlashInferDecode,
    Geometry,
    make_page_indices,
    make_workspace,
    plan_bytes,
)

logger = logging.getLogger(f"vllm.{__name__}")

# Cached plans in addition to those of CUDA graphs; enough for a plan's pinned memory to be copied before
# it is evicted.
MAX_RECENT = 32


class CommonLengthPlans:
    """Plans for views of one length known to the host (`views.round.TokenView.common_len`).

    Full views have the length of the budget in every step, so one plan serves all layers and rounds with
    the same number of requests. CUDA graphs need plans that never change.

    Args:
        max_graph_reqs: maximum requests of a step in a CUDA graph; 0: no graphs.
    """

    def __init__(
        self, geometry: Geometry, *, max_num_reqs: int, max_graph_reqs: int, device: torch.device
    ) -> None:
        self._geometry = geometry
        self._max_num_reqs = max_num_reqs
        self._workspace = make_workspace(geometry, max_graph_reqs, device)
        self._indices = torch.empty(0, dtype=torch.int32, device=device)
        self._recent: dict[tuple[int, int], FlashInferDecode | None] = {}  # the latest last
        self._of_graphs: dict[tuple[int, int], FlashInferDecode | None] = {}

    def load_kernels(self) -> None:
        """Load or compile FlashInfer's kernels and run them once; raise any error of FlashInfer."""
        geometry, device = self._geometry, self._workspace.device
        indices = make_page_indices(geometry.num_kv_heads, 1, device)
        decode = FlashInferDecode(
            geometry, num_reqs=1, workspace=self._workspace, indices=indices, cuda_graph=False
        )
        decode.plan(torch.ones(1, dtype=torch.int32))
        # Some shapes only fail at launch.
        shape = (1, geometry.num_kv_heads, 1, 2 * geometry.head_size)
        cache = torch.zeros(shape, dtype=geometry.cache_dtype, device=device)
        query = torch.zeros(
            (1, geometry.num_heads, geometry.head_size), dtype=geometry.query_dtype, device=device
        )
        slots = torch.zeros((1, geometry.num_kv_heads, 1), dtype=torch.int32, device=device)
        decode.run(query, KVRows.of(cache, "FLASHINFER"), slots)

    def reserve(self, width: int) -> None:
        """Allocate row numbers for views of `width` columns; called before any plan."""
        num_lists = self._max_num_reqs * self._geometry.num_kv_heads
        self._indices = make_page_indices(num_lists, width, self._workspace.device)

    @property
    def num_bytes(self) -> int:
        """Device memory without plans for CUDA graphs, which vLLM measures with the graphs."""
        num_plan_bytes = MAX_RECENT * plan_bytes(self._geometry, self._max_num_reqs)[1]
        return self._workspace.nbytes + self._indices.nbytes + num_plan_bytes

    def decode(self, num_reqs: int, length: int) -> FlashInferDecode | None:
        """Return the planned attention of `num_reqs` views of `length`, or None if FlashInfer fails."""
        key = (num_reqs, length)
        if key in self._of_graphs:
            return self._of_graphs[key]
        decode = self._recent.pop(key) if key in self._recent else self._plan(*key, cuda_graph=False)
        self._recent[key] = decode
        if len(self._recent) > MAX_RECENT:
            del self._recent[next(iter(self._recent))]
        return decode

    def prepare_capture(self, num_reqs: int, length: int) -> None:
        """Make a plan that a CUDA graph of such a step may keep; see `decode`."""
        if (num_reqs, length) not in self._of_graphs:
            self._of_graphs[num_reqs, length] = self._plan(num_reqs, length, cuda_graph=True)

    def _plan(self, num_reqs: int, length: int, *, cuda_graph: bool) -> FlashInferDecode | None:
        decode = FlashInferDecode(
            self._geometry,
            num_reqs=num_reqs,
            workspace=self._workspace,
            indices=self._indices,
            cuda_graph=cuda_graph,
        )
        try:
            decode.plan(torch.full((num_reqs,), length, dtype=torch.int32))
        except Exception as error:  # FlashInfer's libraries raise many types
            logger.warning(
                "FlashInfer cannot plan token views of %d requests (%s); using Triton.", num_reqs, error
            )
            return None
        return decode
